"""Tests of census tables of an office's own files."""
