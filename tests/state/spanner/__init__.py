"""Tests of the Spanner store."""
