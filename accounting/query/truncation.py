"""Counts of units with truncated geometric noise, shown above a threshold: where to truncate.

A count n of units is shown as n + Z iff n + Z > k, Z two-sided geometric of scale 1 / b and
truncated to [-k, k] (``accounting.mechanisms.laws.TruncatedGeometricLaw``).  Desfontaines, Voss,
Gipson and Mandayam ("Differentially private partition selection", 2022) show that no (b, d)-DP
mechanism shows a key more often, up to rounding of k to whole numbers, with

    k = the least whole number with P[Z = k] <= d
      = ceil(ln((e^b + 2 d - 1) / ((e^b + 1) d)) / b).

**Sensitivity.**  One unit moves a key's count from n to n + 1 or back.  The shift by 1 changes the
chance of each value that is possible under both by a factor of at most e^b.  Only n + 1 + k is
possible for n + 1 alone, with chance P[Z = k] <= d, and only n - k for n alone, with the same
chance; nothing shown is the sum of the values up to k.  So the outcome of one key, what is shown or
that nothing is, is (b, d)-DP.  A key without a unit has 0 + Z <= k: nothing is shown of it, and
nothing was asked of it, so which keys have units is not told.  A unit is in at most kappa keys,
whose noise is independent: with b = epsilon / kappa and d = delta / kappa the whole is
(epsilon, delta)-DP by basic composition, in both directions.  Columns beside the count have plain
geometric noise and are shown where the count is: their epsilons add up to the count's per key.

With ``min_units`` m the threshold is k + m - 1, which shows a part of what k shows:
post-processing.  No count below m passes it, because Z <= k.
"""

from fractions import Fraction

import flint

from dpstream.accounting.balls import precision

#: Bits that are computed with first.
_PRECISION = 192


def truncation(scale: float, delta: float, groups: int) -> int:
    """k: the least whole number with P[Z = k] <= delta / groups; 1 or more.

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
        if least is not None:
            return -int(least)
        bits *= 2
