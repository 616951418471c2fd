"""Tests of noise strategies."""
