"""Tests of recordings that are replayed."""
