"""The best selection of keys where a unit has one key: the chance that a key of n units is shown.

Desfontaines, Voss, Gipson and Mandayam ("Differentially private partition selection", 2022): each
key of n units is shown independently with chance p_n,

    p_0 = 0,    p_(n + 1) = min(e^epsilon p_n + delta,  1 - e^-epsilon (1 - p_n - delta),  1).

**Why this is private, and the best.**  One unit moves one key from n to n + 1 units.  The outcome
of a key is one bit, so that (epsilon, delta)-DP is four inequalities: p_(n + 1) <= e^epsilon p_n +
delta, 1 - p_n <= e^epsilon (1 - p_(n + 1)) + delta, and the same with n and n + 1 exchanged, which
hold because p_n rises.  The first two are the terms of the minimum.  By induction no mechanism has
a larger p_n, because each bound grows with p_n.  A key without a unit is never shown, so that the
list of keys reveals nothing else.  Where a unit has at most one key nothing is composed, and this
selection is the best.  kappa keys compose, at (epsilon / kappa, delta / kappa) each; no optimum is
known there.

Up to n_1, the first n with p_n >= (1 - delta) / (1 + e^epsilon), the first term is the smallest,
after it the second:

    p_n = delta (e^(n epsilon) - 1) / (e^epsilon - 1)                                      n <= n_1
    1 - p_n = r^j (1 - p_(n_1)) - delta r (1 - r^j) / (1 - r),   r = e^-epsilon, j = n - n_1.

A key is shown iff n >= M, M the least n with U < p_n for a real uniform U.  Truncated geometric
noise (``accounting.mechanisms.truncation``) has the same chances where its k is not rounded, and
slightly smaller ones otherwise.
"""

import functools
import math
from typing import Any

import flint
import numpy as np

from dpstream.accounting.arrays import Ids
from dpstream.accounting.balls import precision
from dpstream.accounting.mechanisms.laws import Uniform

#: Largest number of counts with a chance between 0 and 1.  Smaller epsilons have more of them, and
#: there truncated noise is as good.
MOST_COUNTS = 1 << 16
_PRECISION = 256
_WORD = 1 << 64


class SelectionOptimum:
    """The chances p_n of (epsilon, delta).

    Args:
        epsilon: positive; delta: in (0, 1); both taken as the floats that they are.

    Raises:
        ValueError: more than MOST_COUNTS counts have a chance between 0 and 1.
    """

    def __init__(self, epsilon: float, delta: float) -> None:
        self.epsilon, self.delta = epsilon, delta
        bits = _PRECISION
        while (turn := self._turn(bits)) is None:
            bits *= 2
        self._first = turn
        #: (N - 1,) floor of 2^64 p_n for n = 1 .. N - 1, N the least n with p_n = 1.
        self.edges = self._edges()

    @property
    def even(self) -> int:
        """The least number of units whose key is shown with a chance of 1/2 or more."""
        return int(np.searchsorted(self.edges, np.uint64(_WORD >> 1), "left")) + 1

    def chance(self, count: int) -> Any:
        """p_n of n units, at most 1; a ball of the current precision."""
        if count <= 0:
            return flint.arb(0)
        delta, epsilon = self._numbers()
        early = min(count, self._first)
        # p_1 is delta itself, which a word may be.
        grown = (early * epsilon).expm1() / epsilon.expm1() if early > 1 else flint.arb(1)
        chance = delta * grown
        steps = count - early
        if steps:
            # r (1 - r^j) / (1 - r) = (1 - r^j) / (e^epsilon - 1)
            decay = (-steps * epsilon).exp()
            missing = decay * (1 - chance) + delta * (-steps * epsilon).expm1() / epsilon.expm1()
            return flint.arb(1) if missing <= 0 else 1 - missing
        return flint.arb(1) if chance >= 1 else chance

    def settle(self, uniform: Uniform) -> int:
        """M for a real uniform, of as many bits as are needed.

        Args:
            uniform: a function from a number of further draws to the first bits of the uniform, as
                (integer, number of bits).
        """
        further = 0
        while True:
            value, bits = uniform(further)
            with precision(2 * bits + _PRECISION):
                least = self._least(value, bits)
            if least is not None:
                return least
            further += 1

    def _least(self, value: int, bits: int) -> int | None:
        """M, or ``None`` where the bits leave it open."""
        unit = flint.arb(2) ** bits
        low, high = flint.arb(value) / unit, flint.arb(value + 1) / unit
        edge = np.uint64(value >> (bits - 64))
        count = int(np.searchsorted(self.edges, edge, "left")) + 1
        while count <= len(self.edges) and self.edges[count - 1] == edge:
            chance = self.chance(count)
            if high < chance:
                return count
            if not low >= chance:
                return None
            count += 1
        return count

    def _numbers(self) -> tuple[Any, Any]:
        return flint.arb(self.delta), flint.arb(self.epsilon)

    def _turn(self, bits: int) -> int | None:
        """n_1: delta (e^(n epsilon) - 1) / (e^epsilon - 1) >= (1 - delta) / (1 + e^epsilon)."""
        with precision(bits):
            delta, epsilon = self._numbers()
            grown = epsilon.exp()
            ratio = (1 - delta) * epsilon.expm1() / (delta * (1 + grown))
            turn = (ratio.log1p() / epsilon).ceil().unique_fmpz()
        if turn is None:
            return None
        if int(turn) > MOST_COUNTS // 2:
            raise ValueError("too many counts have a chance between 0 and 1")
        return max(1, int(turn))

    def _edges(self) -> Ids:
        # The last chance may be delta or less below 1.
        edges, zeros = [], max(0, -math.frexp(self.delta)[1])
        with precision(_PRECISION + 2 * zeros):
            for count in range(1, MOST_COUNTS + 2):
                chance = self.chance(count)
                if chance >= 1:
                    break
                edge = (chance * _WORD).floor().unique_fmpz()
                if edge is None:
                    raise ArithmeticError("the precision does not decide a chance")
                edges.append(int(edge))
        return np.array(edges, np.uint64)


@functools.lru_cache(maxsize=16)
def selection_optimum(epsilon: float, delta: float) -> SelectionOptimum | None:
    """The chances of (epsilon, delta); ``None`` where there are more than MOST_COUNTS."""
    try:
        return SelectionOptimum(epsilon, delta)
    except ValueError:
        return None
