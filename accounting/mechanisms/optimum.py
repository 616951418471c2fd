"""Selection of keys by a single count of units: the best chances, and truncated geometric noise.

**The best chances**, where a unit has one key (Desfontaines, Voss, Gipson and Mandayam,
"Differentially private partition selection", 2022): each key of n units is shown independently with
chance p_n,

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
noise (below) has the same chances where its k is not rounded, and slightly smaller ones otherwise.

**Truncated noise** of a count of units that is shown above a threshold.  A count n of units is
shown as n + Z iff n + Z > k, Z two-sided geometric of scale 1 / b and truncated to [-k, k]
(``accounting.mechanisms.laws.TruncatedGeometricLaw``).  The same paper shows that no (b, d)-DP
mechanism shows a key more often, up to rounding of k to whole numbers, with

    k = the least whole number with P[Z = k] <= d
      = ceil(ln((e^b + 2 d - 1) / ((e^b + 1) d)) / b).

Rounding k up leaves a part of d unused.  So for each key a coin with a public chance c replaces k
by k - 1, both in the truncation and in the comparison:

    c P_(k-1)[Z = k - 1] + (1 - c) P_k[Z = k] <= d.

**Sensitivity.**  One unit moves a key's count from n to n + 1 or back.  The shift by 1 changes the
chance of each value that both counts can give by a factor of at most e^b.  Only n + 1 can give the
value n + 1 + k, with chance P[Z = k] <= d, and only n can give n - k, with the same chance.  "Not
shown" is the set of the values up to k.  So the outcome of one key, its shown value or "not shown",
is (b, P[Z = k])-DP.  The coin is independent of the data: chances, and their excess over e^b times
the other chance, are means over it, so that with the coin the outcome is (b, d)-DP.  A key without
a unit has 0 + Z <= k and is never shown, so that the list of keys reveals nothing else.  A unit has
at most kappa keys, whose noises are independent: with b = epsilon / kappa and d = delta / kappa all
keys together are (epsilon, delta)-DP by basic composition, in both directions.  Other columns have
geometric noise that is not truncated and are shown where the count is; their epsilons per key are
added to the count's.

With ``min_units`` m the threshold is m - 1 higher.  This shows a subset of what k shows, which is
post-processing.  No count below m passes it, because Z <= k.
"""

import functools
import math
from fractions import Fraction
from typing import Any, NamedTuple

import flint
import numpy as np

from dpstream.accounting.arrays import Ids
from dpstream.accounting.balls import precision
from dpstream.accounting.limits import COIN_BITS
from dpstream.accounting.mechanisms.laws import Uniform

#: Precision of the first attempt, in bits.
_TRUNCATION_PRECISION = 192


class Truncation(NamedTuple):
    """The bound of truncated noise.

    Attributes:
        most: k.
        sooner: chance of k - 1 instead of k, in 2^-COIN_BITS, rounded down; 0 where k is 1.
    """

    most: int
    sooner: int


def truncation(scale: float, delta: float, groups: int) -> Truncation:
    """Return k, the least whole number with P[Z = k] <= delta / groups (at least 1), and its coin.

    With q = e^(-1 / scale) and d = delta / groups this is q^k (1 - q + 2 d q) <= d (1 + q).  The
    two sides are never equal, because q is transcendental, so that some precision decides.

    Args:
        scale: of the noise as it is drawn.
        delta: in (0, 1), the exact value of the float.
        groups: kappa.
    """
    chance, bits = Fraction(delta) / groups, _TRUNCATION_PRECISION
    while True:
        with precision(bits):
            d = flint.arb(flint.fmpq(chance.numerator, chance.denominator))
            lower = -1 / flint.arb(scale)
            ratio = lower.exp()
            times = (2 * d * ratio - lower.expm1()) / (d * (1 + ratio))
            least = (-flint.arb(scale) * times.log()).floor().unique_fmpz()
            coin = None if least is None else _coin(scale, d, -int(least))
        if least is not None and coin is not None:
            return Truncation(-int(least), coin)
        bits *= 2


def _coin(scale: float, d: Any, most: int) -> int | None:
    """c in 2^-COIN_BITS; ``None`` where the precision does not decide it."""
    if most == 1:  # k - 1 is no noise
        return 0
    less, last = _last(scale, most - 1), _last(scale, most)
    chance = ((d - last) / (less - last) * (1 << COIN_BITS)).floor().unique_fmpz()
    return None if chance is None else int(chance)


def _last(scale: float, most: int) -> Any:
    """P[Z = k] of noise that is truncated to [-k, k]."""
    steps = 1 / flint.arb(scale)
    total = -(-steps).expm1() - 2 * (-steps).exp() * (-most * steps).expm1()
    return (-most * steps).exp() * -(-steps).expm1() / total


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
        """Return p_n of n units, at most 1; a ball of the current precision."""
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
        """Return M for a real uniform, of as many bits as are needed.

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
        # The last chances may be delta, or e^-epsilon, or less below 1.
        zeros = max(-math.frexp(self.delta)[1], math.ceil(self.epsilon / math.log(2)), 0)
        edges = []
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
    """Return the chances of (epsilon, delta); ``None`` where there are more than MOST_COUNTS."""
    try:
        return SelectionOptimum(epsilon, delta)
    except ValueError:
        return None
