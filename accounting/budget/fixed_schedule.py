"""Cost of k mechanisms of plain epsilon e each, where k and e are fixed beforehand.

They are dominated by k randomised responses with odds e^e, whose privacy loss is e (k - 2 j) with j
binomial of chance 1 / (1 + e^e) (Kairouz, Oh and Viswanath 2015).  This holds for interactive
mechanisms that run in parallel too (Lyu 2022).  So, exactly for responses and as a bound for all
others,

    delta(epsilon) = sum over j of  P[j] max(0, 1 - e^(epsilon - e (k - 2 j))).

k and e must not depend on outputs.  An account decides each charge after the answers before it, so
that it may not use this bound and adds epsilons up.
"""

import math

import numpy as np

from dpstream.accounting.arrays import Float64

#: Relative error allowed for logarithms of factorials and sums.
_UP = 1 + 1e-9
_STEPS = 100


def delta_of_responses(epsilon: float, each: float, count: int) -> float:
    """Delta at ``epsilon`` of ``count`` mechanisms of plain epsilon ``each``, rounded up.

    Args:
        epsilon: of all of them together, not negative.
        each: e > 0.
        count: k >= 1.
    """
    return _delta(epsilon, *_losses(each, count))


def epsilon_of_responses(delta: float, each: float, count: int) -> float:
    """Least epsilon of ``count`` mechanisms of plain epsilon ``each`` at ``delta``, rounded up.

    Args:
        delta: 0 <= delta < 1; 0: the sum of their epsilons.
        each: e > 0.
        count: k >= 1.
    """
    low, high = 0.0, count * each
    if delta <= 0:
        return high
    losses = _losses(each, count)
    if _delta(low, *losses) <= delta:
        return low
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if _delta(middle, *losses) <= delta else (middle, high)
    return high


def _losses(each: float, count: int) -> tuple[Float64, Float64]:
    """((k + 1,) losses, (k + 1,) logarithms of their chances)."""
    from scipy.special import gammaln  # a plan alone needs it

    flips = np.arange(count + 1)
    ways = gammaln(count + 1) - gammaln(flips + 1) - gammaln(count - flips + 1)
    chances = ways - flips * each - count * math.log1p(math.exp(-each))
    return np.asarray(each * (count - 2.0 * flips)), np.asarray(chances, np.float64)


def _delta(epsilon: float, losses: Float64, chances: Float64) -> float:
    above = losses > epsilon
    parts = np.exp(chances[above]) * -np.expm1(epsilon - losses[above])
    return min(1.0, float(parts.sum()) * _UP)
