"""From the margin that a figure shall have to the least budget that gives it.

A margin m is met where P(|Z| > m) <= .05.  Margins are whole numbers, so many budgets have the
same: ``same_margins`` is the least of them.  The budgets that are published with the mechanism are
not exact (`tests.oracle.published_margins` has them, and a test compares).
"""

import functools
import math
from fractions import Fraction

from dpstream.accounting import special
from dpstream.accounting.errors import required
from dpstream.accounting.roots import brentq
from dpstream.accounting.tabulation.margins import margin, tail
from dpstream.accounting.tabulation.scales import Draws, LawName, Noise

#: Chance that a figure misses its margin.
MISSED = 0.05


@functools.lru_cache(maxsize=1024)
def least_budget(law: LawName, most: int) -> float:
    """Least rho or epsilon of one count whose noise is within ``most`` with 95%."""
    if law == "discrete laplace":
        return brentq(lambda e: _geometric_tail(e, most) - MISSED, 1e-9, 50.0, xtol=1e-15)
    if law == "rounded gauss":
        return 1 / (2 * ((most + 0.5) / -float(special.ndtri(MISSED / 2))) ** 2)
    near = (most + 0.5) / -float(special.ndtri(MISSED / 2))
    sigma = brentq(lambda x: tail(Noise(law, x), most) - MISSED, near / 2, 2 * near, xtol=2e-12)
    return 1 / (2 * sigma**2)


def same_margins(noise: Draws, budget: Fraction, groups: int, gamma: Fraction) -> Fraction:
    """Least budget of a level at which single counts have no larger margins than they have.

    Margins of sums grow with it, and so does step 1's noise.

    Args:
        noise: of the level at its budget; groups: s.
    """
    least_budget = least_of(required(noise.detail, "noise.detail is there")) * groups / (1 - gamma)
    if noise.total is not None:
        least_budget = max(least_budget, least_of(noise.total) * groups)
    return min(least_budget, budget)


def least_of(noise: Noise) -> Fraction:
    """Least budget of one count with no larger margin than this noise has, a little above it."""
    return Fraction(least_budget(noise.law, margin(noise))) * (1 + Fraction(1, 10**6))


def _geometric_tail(epsilon: float, most: int) -> float:
    return 2 * math.exp(-epsilon * most) / (1 + math.exp(epsilon))
