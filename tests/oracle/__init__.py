"""Slow, simple, independent versions of what the product does, to compare it with."""
