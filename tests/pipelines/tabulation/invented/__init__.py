"""Tests of invented offices."""
