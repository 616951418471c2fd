"""From the margin that a figure shall have to the budget that gives it: published, and exact.

A margin m is met where P(|Z| > m) <= .05.  The published inversions are not exact:

* geometric: epsilon = ln 20 / (m + 1) has margins of m + 1 (7, 12, 51 for 6, 11, 50), because the
  factor 2 / (1 + e^epsilon) of the tail was left out;
* discrete Gaussian: rho = 1.92 / m^2 spends more than needed, because |Z| <= m reaches to m + 1/2.

Margins are whole numbers, so many budgets have the same: ``same_margins`` is the least of them.
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


def published_epsilon(most: float) -> float:
    """Parameter of geometric noise on one count of this margin, as published."""
    return math.log(20) / (math.floor(most) + 1)


def published_rho(most: float) -> float:
    """rho of one count of this margin, as published."""
    return 1.92 / math.floor(most) ** 2


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


def level_budget(count: float, groups: int, gamma: float) -> Fraction:
    """Budget of a level of which step 2 measures each count with ``count``: s / (1 - gamma) of it.

    The published text has 1 / gamma, its tables this.
    """
    return Fraction(count) * groups / (1 - Fraction(repr(gamma)))


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
