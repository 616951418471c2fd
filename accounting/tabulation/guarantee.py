"""What an execution costs one record, by every accounting that holds, and by those published.

**Geometric noise.**  Between neighbours a count moves by one, and the privacy loss of geometric
noise with parameter e is +e or -e only: +e with probability e^e / (e^e + 1).  That is randomized
response, which every e-DP mechanism is post-processing of (Kairouz, Oh and Viswanath 2015).  So
the exact Renyi divergence of order alpha is

    tau(alpha, e) = ln[(e^(alpha e) + e^((1 - alpha) e)) / (e^e + 1)] / (alpha - 1),

and a group measured once with all of e costs no less than one measured with gamma e and then with
(1 - gamma) e, however the second depends on the first.  The published corollary integrates over
the reals what is a sum over the integers; its figure (``renyi_integral``) is no bound, and stands
in plans only to be compared.  ``loss_epsilon`` composes the two-valued losses themselves.

**Gaussian noise.**  rho adds up, and epsilon follows by the best conversion (Canonne, Kamath and
Steinke 2020, proposition 7) or by rho + 2 sqrt(rho ln(1/delta)).  Rounded Gaussians are one
Gaussian mechanism of mu = sqrt(2 rho), whose curve is exact.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from scipy.special import gammaln

from dpstream.accounting.arrays import Float64
from dpstream.accounting.gaussian import cdp_eps, epsilon_of

#: The delta that figures are published for.
DELTA = 1e-10
#: Relative error allowed for sums of floats, logarithms and exponentials.
_UP = 1 + 1e-11
#: Orders that Renyi bounds are minimised over: the published ones, and some on either side.
_ORDERS = np.unique(
    np.concatenate([np.arange(101, 1001) / 100, 1 + np.logspace(-3, 4, 4001)])
)  # fmt: skip
#: Steps that the range of privacy losses is divided into, each loss rounded up to one.
_STEPS = 1 << 20


class Spent(NamedTuple):
    """What a table spends at one level.

    Attributes:
        groups: s, groups of the level that a record is in at most.
        budget: rho or epsilon of the level, exact.
        gamma: part of it that step 1 spends, 0 where there is no step 1.
        whole: whether groups exist that are measured once, with all of it.
    """

    groups: int
    budget: Fraction
    gamma: Fraction = Fraction()
    whole: bool = True

    @property
    def releases(self) -> list[tuple[Fraction, ...]]:
        """Budgets of the releases of one group, for each kind of group there is."""
        one = self.budget / self.groups
        kinds: list[tuple[Fraction, ...]] = [(one,)] if self.whole or not self.gamma else []
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


def loss_epsilon(spent: Sequence[Spent], delta: float) -> float:
    """Epsilon of geometric noise by its privacy losses themselves, rounded up.

    A group that is measured once is the worse kind (above), and all groups of a level are taken to
    be of it where it exists.  Releases of equal parameter have binomial losses; sums of those are
    kept on a grid, each loss rounded up to it; where the grid is too coarse, Renyi's is less.
    """
    times: dict[Fraction, int] = {}
    for each in spent:
        for epsilon in each.releases[0]:
            times[epsilon] = times.get(epsilon, 0) + each.groups
    most = float(total(spent))
    if most == 0:
        return 0.0
    step = 2 * most / _STEPS
    size = _STEPS + 2 * len(times) + 2
    chances, lowest = np.ones(1), 0
    for epsilon, count in times.items():
        below, atoms = _binomial(float(epsilon), count, step)
        chances = _plus(chances, atoms, size)
        lowest += below
    losses = np.asarray((lowest + np.arange(len(chances))) * step, np.float64)
    return min(_least_epsilon(losses, chances, delta) * _UP, renyi_epsilon(spent, delta))


def _binomial(epsilon: float, count: int, step: float) -> tuple[int, Float64]:
    """Lowest place on the grid, and chances from it on, of ``count`` losses of +-epsilon."""
    plus = np.arange(count + 1)
    log_more, log_less = -np.logaddexp(0, -epsilon), -np.logaddexp(0, epsilon)
    ways = gammaln(count + 1) - gammaln(plus + 1) - gammaln(count - plus + 1)
    chance = np.exp(ways + plus * log_more + (count - plus) * log_less)
    places = np.ceil((2 * plus - count) * (epsilon / step)).astype(np.int64)
    atoms = np.zeros(places[-1] - places[0] + 1)
    np.add.at(atoms, places - places[0], chance)
    return int(places[0]), atoms


def _plus(chances: Float64, atoms: Float64, size: int) -> Float64:
    """Chances of the sum of two losses, of which the second has few values."""
    assert len(chances) + len(atoms) <= size + 2
    out = np.zeros(len(chances) + len(atoms) - 1)
    for at in np.flatnonzero(atoms):
        out[at : at + len(chances)] += atoms[at] * chances
    return out


def _least_epsilon(losses: Float64, chances: Float64, delta: float) -> float:
    """Smallest epsilon >= 0 on which at most ``delta`` of the losses' excess lies."""

    def excess(epsilon: float) -> float:
        over = losses > epsilon
        return float(np.sum(chances[over] * -np.expm1(epsilon - losses[over])))

    low, high = 0.0, float(losses[-1])
    if excess(low) <= delta:
        return 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if excess(middle) * (1 + 1e-9) <= delta else (middle, high)
    return high
