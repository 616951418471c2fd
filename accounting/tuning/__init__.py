"""Contribution bounds and clamps by a charged question, and what other mechanisms would give."""
