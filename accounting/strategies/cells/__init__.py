"""Strategies over cells: what to measure so that a linear workload is answered with least error."""
