"""Audits of the whole flow: neighbouring streams, sabotaged variants, leaks."""
