"""From the margin that a figure shall have to the budget that gives it: published, and exact.

A margin m is met where P(|Z| > m) <= .05.  The published inversions are not exact:

* geometric: epsilon = ln 20 / (m + 1) has margins of m + 1 (7, 12, 51 for 6, 11, 50), because the
  factor 2 / (1 + e^epsilon) of the tail was left out;
* discrete Gaussian: rho = 1.92 / m^2 spends more than needed, because |Z| <= m reaches to m + 1/2.
"""

import math
from fractions import Fraction

from scipy.optimize import brentq
from scipy.special import ndtri

from dpstream.accounting.tabulation.margins import tail
from dpstream.accounting.tabulation.scales import LawName, Noise

#: Chance that a figure misses its margin.
MISSED = 0.05


def published_epsilon(margin: float) -> float:
    """Parameter of geometric noise on one count, as published."""
    return math.log(20) / (math.floor(margin) + 1)


def published_rho(margin: float) -> float:
    """rho of one count, as published."""
    return 1.92 / math.floor(margin) ** 2


def least_budget(law: LawName, margin: int) -> float:
    """Least rho or epsilon of one count whose noise is within ``margin`` with 95%."""
    if law == "discrete laplace":
        return float(brentq(lambda e: _geometric_tail(e, margin) - MISSED, 1e-9, 50.0, xtol=1e-15))
    if law == "rounded gauss":
        return 1 / (2 * ((margin + 0.5) / -float(ndtri(MISSED / 2))) ** 2)
    sigma = brentq(lambda x: tail(Noise(law, x), margin) - MISSED, 0.3, 2.0 * margin + 2)
    return 1 / (2 * float(sigma) ** 2)


def level_budget(count: float, groups: int, gamma: float) -> Fraction:
    """Budget of a level of which step 2 measures each count with ``count``: s / (1 - gamma) of it.

    The published text has 1 / gamma, its tables this.
    """
    return Fraction(count) * groups / (1 - Fraction(repr(gamma)))


def _geometric_tail(epsilon: float, margin: int) -> float:
    return 2 * math.exp(-epsilon * margin) / (1 + math.exp(epsilon))
