"""Tests of tables of population groups."""
