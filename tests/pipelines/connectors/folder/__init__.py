"""Tests of the folder that grows."""
