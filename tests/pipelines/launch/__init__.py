"""Tests of the SQL front."""
