"""Noise strategies for prefixes of a stream: one interface, see ``base.Strategy``."""

from accounting.strategies.base import Strategy
from accounting.strategies.tree import TreeStrategy

__all__ = ["Strategy", "TreeStrategy", "make_strategy"]


def make_strategy(name: str, triggers: int) -> Strategy:
    """The strategy of that name for ``triggers`` public triggers."""
    if name == "tree":
        return TreeStrategy(triggers)
    raise ValueError("unknown strategy name")
