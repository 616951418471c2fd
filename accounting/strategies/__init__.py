"""Noise strategies for prefixes of a stream: one interface, see ``base.Strategy``."""

from dpstream.accounting.arrays import Float64
from dpstream.accounting.strategies.base import Strategy, TreeStrategy
from dpstream.accounting.strategies.blt import BltStrategy
from dpstream.accounting.strategies.dense import DenseStrategy
from dpstream.accounting.strategies.geometric import GeometricStrategy

__all__ = [
    "STRATEGIES",
    "BltStrategy",
    "DenseStrategy",
    "GeometricStrategy",
    "Strategy",
    "TreeStrategy",
    "make_strategy",
]

STRATEGIES: dict[str, type[Strategy]] = {
    "tree": TreeStrategy,
    "blt": BltStrategy,
    "dense": DenseStrategy,
    "geometric": GeometricStrategy,
}


def make_strategy(name: str, triggers: int, parameters: Float64 | None = None) -> Strategy:
    """Return the strategy of that name for ``triggers`` public triggers.

    Args:
        parameters: those of a run that was begun before (``Strategy.parameters``); by default
            what this version of the program would choose.
    """
    if name not in STRATEGIES:
        raise ValueError("unknown strategy name")
    return STRATEGIES[name](triggers, parameters)
