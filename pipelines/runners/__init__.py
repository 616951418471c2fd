"""Engines and the programs that they need on a machine."""
