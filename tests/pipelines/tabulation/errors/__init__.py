"""Errors of published census tables against the truth: NOT private, for invented data only."""
