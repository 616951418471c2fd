"""Audits of the whole flow: neighbouring streams, sabotaged twins, leaks."""
