"""Adaptive tables of counts by region and characteristic: pure functions over columns."""
