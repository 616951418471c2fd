"""Differentially private SQL: reads, checks, rewrites and answers a statement."""
