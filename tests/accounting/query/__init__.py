"""Tests of queries in accounting."""
