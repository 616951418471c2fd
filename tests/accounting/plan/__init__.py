"""Tests of plans and what they derive."""
