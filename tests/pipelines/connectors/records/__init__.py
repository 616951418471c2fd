"""Tests of records as text and as columns."""
