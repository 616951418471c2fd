"""Faults at file calls: a preloaded library kills, tears or fails the n-th of a real command."""
