"""Tests of keys and noise."""
