"""What a noise strategy is: an integer encoder of a stream, its noise, and a streaming decoder.

Symbols are listed in ``strategies/README.md``.  A strategy for T public triggers turns the
leaf inputs x (int64, one per trigger) into integer nodes ``y = A x + z`` with z independent
rounded Gaussians of sd sigma; what is released at trigger t is a fixed function of y's first
nodes, equal to ``prefix_t + n_t`` where n_t is a fixed function of z alone.  All methods are
public arithmetic: no data, no randomness.
"""

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]


class Strategy(ABC):
    """One way to noise all T prefixes of a stream.

    Args:
        triggers: T >= 1.
    """

    name: str

    def __init__(self, triggers: int) -> None:
        if triggers < 1:
            raise ValueError("a strategy needs at least one trigger")
        self.triggers = triggers

    @property
    @abstractmethod
    def col2(self) -> int:
        """Largest squared column norm of the encoder: squared L2 effect of one unit of input."""

    @property
    @abstractmethod
    def sd_factors(self) -> Float64:
        """(T,) sd of n_t for node noise of sd 1, rounded up."""

    @property
    @abstractmethod
    def rounding(self) -> Float64:
        """(T,) D_t: the most n_t differs from its Gaussian ideal (node and decode rounding)."""

    @abstractmethod
    def worst_split(self, pieces: int, total: int) -> float:
        """Upper bound of |A a|^2 over a >= 1 on ``pieces`` distinct leaves, sum(a) = ``total``."""

    @abstractmethod
    def matrix(self) -> Int64:
        """Dense encoder (nodes, T), nodes in the order in which they complete (small T)."""

    @abstractmethod
    def nodes_through(self, leaf: int | Int64) -> Int64:
        """Number of nodes that are complete after leaf ``leaf`` (0 for leaf 0)."""
