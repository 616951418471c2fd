"""Engines and what they need on a machine."""
