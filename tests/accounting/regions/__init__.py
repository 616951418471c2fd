"""Tests of regions of records and what they spend."""
