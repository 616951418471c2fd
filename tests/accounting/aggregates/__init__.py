"""Tests of the kinds of published columns."""
