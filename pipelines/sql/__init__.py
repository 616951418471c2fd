"""Differentially private SQL: the front that reads, checks and rewrites a statement."""
