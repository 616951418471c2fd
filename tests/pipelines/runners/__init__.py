"""Tests of runners and their parts."""
