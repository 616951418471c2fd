"""Tests of laws of noise."""
