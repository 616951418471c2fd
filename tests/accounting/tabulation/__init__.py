"""Tests of the mathematics of tables of population groups."""
