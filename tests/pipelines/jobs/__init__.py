"""Tests of job files."""
