"""What an execution costs one record, by every accounting that holds, and by those published.

**Geometric noise.**  Between neighbours a count moves by one, and the privacy loss of geometric
noise with parameter e is +e or -e only: +e with probability e^e / (e^e + 1).  That is randomized
response, which every e-DP mechanism is post-processing of (Kairouz, Oh and Viswanath 2015).  So
the exact Renyi divergence of order alpha is

    tau(alpha, e) = ln[(e^(alpha e) + e^((1 - alpha) e)) / (e^e + 1)] / (alpha - 1),

and a group measured once with all of e costs no less than one measured with gamma e and then with
(1 - gamma) e, however the second depends on the first.  The published corollary integrates over
the reals what is a sum over the integers; its figure (``renyi_integral``) is no bound, and stands
in plans only to be compared.  ``losses`` composes the losses themselves.

**Gaussian noise.**  rho adds up, and epsilon follows by the best conversion (Canonne, Kamath and
Steinke 2020, proposition 7) or by rho + 2 sqrt(rho ln(1/delta)).  Rounded Gaussians are one
Gaussian mechanism of mu = sqrt(2 rho), whose curve is exact.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from dpstream.accounting.arrays import Float64
from dpstream.accounting.gaussian import cdp_eps, epsilon_of

#: The delta that figures are published for.
DELTA = 1e-10
#: Relative error allowed for sums of floats, logarithms and exponentials.
_UP = 1 + 1e-11
#: Orders that Renyi bounds are minimised over: the published ones, and some on either side.
_ORDERS = np.unique(np.concatenate([np.arange(101, 1001) / 100, 1 + np.logspace(-3, 4, 4001)]))


class Spent(NamedTuple):
    """What a table spends at one level.

    Attributes:
        groups: s, groups of the level that a record is in at most.
        budget: rho or epsilon of the level, exact.
        gamma: part of it that step 1 spends, 0 where there is no step 1.
        undivided: whether groups exist that are measured once, with all of it.
        alike: levels of one number take the same iterations, so that a record has equally many
            groups of either kind in each of them.
    """

    groups: int
    budget: Fraction
    gamma: Fraction = Fraction()
    undivided: bool = True
    alike: int = 0

    @property
    def releases(self) -> list[tuple[Fraction, ...]]:
        """Budgets of the releases of one group, for each kind of group there is."""
        one = self.budget / self.groups
        kinds: list[tuple[Fraction, ...]] = [(one,)] if self.undivided or not self.gamma else []
        if self.gamma:
            kinds.append((self.gamma * one, (1 - self.gamma) * one))
        return kinds


def total(spent: Sequence[Spent]) -> Fraction:
    """Sum of the budgets: rho of Gaussian noise, pure epsilon of geometric noise."""
    return sum((each.budget for each in spent), Fraction())


def rounded_up(figure: Fraction) -> float:
    """A float that is, as a person writes it, no less; the figure itself where it is one."""
    near = float(figure)
    while Fraction(repr(near)) < figure:
        near = math.nextafter(near, math.inf)
    return near


def mu_of_rho(rho: Fraction) -> float:
    """mu of rounded Gaussian noise of this rho, rounded up."""
    mu = math.sqrt(float(2 * rho))
    while Fraction(mu) ** 2 < 2 * rho:
        mu = math.nextafter(mu, math.inf)
    return mu


def gaussian_epsilon(rho: Fraction, delta: float) -> float:
    """Epsilon of rounded Gaussian noise: one Gaussian mechanism, exact, rounded up."""
    return epsilon_of(mu_of_rho(rho), delta)


def zcdp_epsilon(rho: Fraction, delta: float) -> float:
    """Epsilon of rho-zCDP by the best conversion, rounded up."""
    return cdp_eps(rounded_up(rho) * _UP, delta)


def zcdp_epsilon_analytic(rho: Fraction, delta: float) -> float:
    """rho + 2 sqrt(rho ln(1/delta)), rounded up: valid, and never the least."""
    above = rounded_up(rho)
    return (above + 2 * math.sqrt(above * math.log(1 / delta))) * _UP


def renyi_sum(order: Float64, epsilon: float) -> Float64:
    """(n,) Renyi divergences of geometric noise of parameter ``epsilon`` shifted by one, exact."""
    above = np.logaddexp(order * epsilon, (1 - order) * epsilon)
    return np.asarray((above - np.logaddexp(epsilon, 0)) / (order - 1))


def renyi_integral(order: Float64, epsilon: float) -> Float64:
    """(n,) the published figures, an integral where the sum belongs: no bound."""
    odd = epsilon * (2 * order - 1)
    more = np.log(2 * order / odd) + (order - 1) * epsilon
    less = np.log(2 * (order - 1) / odd) - order * epsilon
    scale = math.log(math.tanh(epsilon / 2))
    return np.asarray((scale + np.logaddexp(more, less)) / (order - 1))


def renyi_epsilon(spent: Sequence[Spent], delta: float, *, integral: bool = False) -> float:
    """Epsilon of geometric noise by Renyi divergences, rounded up.

    Of each level the worse kind of group counts, s times.

    Args:
        integral: by the published formula, which is no bound.
    """
    tau = renyi_integral if integral else renyi_sum
    sums = np.zeros(len(_ORDERS))
    for each in spent:
        kinds = [np.sum([tau(_ORDERS, float(e)) for e in kind], axis=0) for kind in each.releases]
        sums = sums + each.groups * np.max(kinds, axis=0)
    odds = (math.log(1 / delta) - np.log(_ORDERS)) / (_ORDERS - 1) + np.log1p(-1 / _ORDERS)
    return float(min(np.min(sums + odds), float(total(spent)))) * _UP
