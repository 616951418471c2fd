"""Counts of units with truncated geometric noise, shown above a threshold: where to truncate.

A count n of units is shown as n + Z iff n + Z > k, Z two-sided geometric of scale 1 / b and
truncated to [-k, k] (``accounting.mechanisms.laws.TruncatedGeometricLaw``).  Desfontaines, Voss,
Gipson and Mandayam ("Differentially private partition selection", 2022) show that no (b, d)-DP
mechanism shows a key more often, up to rounding of k to whole numbers, with

    k = the least whole number with P[Z = k] <= d
      = ceil(ln((e^b + 2 d - 1) / ((e^b + 1) d)) / b).

Rounding k up leaves a part of d unused.  So for each key a coin, whose chance c is public, takes
k - 1 in the place of k, both where noise is truncated and where it is compared:

    c P_(k-1)[Z = k - 1] + (1 - c) P_k[Z = k] <= d.

**Sensitivity.**  One unit moves a key's count from n to n + 1 or back.  The shift by 1 changes the
chance of each value that is possible under both by a factor of at most e^b.  Only n + 1 + k is
possible for n + 1 alone, with chance P[Z = k] <= d, and only n - k for n alone, with the same
chance; nothing shown is the sum of the values up to k.  So the outcome of one key, what is shown or
that nothing is, is (b, P[Z = k])-DP.  The coin is independent of the data: chances, and what they
exceed, are means over it, so that with the coin the outcome is (b, d)-DP.  A key without a unit
has 0 + Z <= k: nothing is shown of it, and nothing was asked of it, so which keys have units is not
told.  A unit is in at most kappa keys, whose noise is independent: with b = epsilon / kappa and
d = delta / kappa the whole is (epsilon, delta)-DP by basic composition, in both directions.
Columns beside the count have plain geometric noise and are shown where the count is: their epsilons
add up to the count's per key.

With ``min_units`` m the threshold is m - 1 higher, which shows a part of what k shows:
post-processing.  No count below m passes it, because Z <= k.
"""

from fractions import Fraction
from typing import Any, NamedTuple

import flint

from dpstream.accounting.balls import precision

#: Bits that are computed with first.
_PRECISION = 192
#: Chances of coins are whole numbers of 2^-COIN_BITS.
COIN_BITS = 32


class Truncation(NamedTuple):
    """k, and the chance of k - 1 in its place, in 2^-COIN_BITS, rounded down; none at k = 1."""

    most: int
    sooner: int


def truncation(scale: float, delta: float, groups: int) -> Truncation:
    """Where noise is truncated, and counts are compared.

    k is the least whole number with P[Z = k] <= delta / groups; 1 or more.

    With q = e^(-1 / scale) and d = delta / groups that is q^k (1 - q + 2 d q) <= d (1 + q).  The
    two sides are never equal, for q is transcendental, so that some precision decides.

    Args:
        scale: of the noise, as it is drawn; delta: in (0, 1), taken as the float it is.
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
    """c in 2^-COIN_BITS, ``None`` where the precision does not decide it."""
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
