"""Budgets for a margin as SafeTab's authors publish them: the baseline of the product's budgets.

The published inversions are not exact: for geometric noise epsilon = ln 20 / (m + 1) leaves out the
factor 2 / (1 + e^epsilon) of the tail, so that margins come out one larger; for discrete Gaussian
noise rho = 1.92 / m^2 spends more than needed, because |Z| <= m reaches to m + 1/2.
"""

import math
from fractions import Fraction


def published_epsilon(most: float) -> float:
    """Parameter of geometric noise on one count of this margin."""
    return math.log(20) / (math.floor(most) + 1)


def published_rho(most: float) -> float:
    """rho of one count of this margin."""
    return 1.92 / math.floor(most) ** 2


def level_budget(count: float, groups: int, gamma: float) -> Fraction:
    """Budget of a level of which step 2 measures each count with ``count``: s / (1 - gamma) of it.

    The published text has 1 / gamma, its tables this.
    """
    return Fraction(count) * groups / (1 - Fraction(repr(gamma)))
