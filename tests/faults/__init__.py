"""Faults of workers, stores and delivery."""
