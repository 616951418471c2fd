"""Where to truncate the geometric noise of a count of units that is shown above a threshold.

A count n of units is shown as n + Z iff n + Z > k, Z two-sided geometric of scale 1 / b and
truncated to [-k, k] (``accounting.mechanisms.laws.TruncatedGeometricLaw``).  Desfontaines, Voss,
Gipson and Mandayam ("Differentially private partition selection", 2022) show that no (b, d)-DP
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

from fractions import Fraction
from typing import Any, NamedTuple

import flint

from dpstream.accounting.balls import precision
from dpstream.accounting.limits import COIN_BITS

#: Precision of the first attempt, in bits.
_PRECISION = 192


class Truncation(NamedTuple):
    """Where noise is truncated.

    Attributes:
        most: k.
        sooner: chance of k - 1 instead of k, in 2^-COIN_BITS, rounded down; 0 where k is 1.
    """

    most: int
    sooner: int


def truncation(scale: float, delta: float, groups: int) -> Truncation:
    """k, the least whole number with P[Z = k] <= delta / groups (at least 1), and its coin.

    With q = e^(-1 / scale) and d = delta / groups this is q^k (1 - q + 2 d q) <= d (1 + q).  The
    two sides are never equal, because q is transcendental, so that some precision decides.

    Args:
        scale: of the noise as it is drawn.
        delta: in (0, 1), the exact value of the float.
        groups: kappa.
    """
    chance, bits = Fraction(delta) / groups, _PRECISION
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
