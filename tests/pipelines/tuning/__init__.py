"""Tests of choosing by a charged query."""
