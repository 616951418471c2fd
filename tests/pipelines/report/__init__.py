"""Tests of the report of a run."""
