"""The cost of an execution to one record, by every accounting that holds and the published ones.

**Geometric noise.**  Between neighbours a count moves by one, and the privacy loss of geometric
noise with parameter e is +e or -e only: +e with probability e^e / (e^e + 1).  That is randomized
response, which every e-DP mechanism is post-processing of (Kairouz, Oh and Viswanath 2015).  So
the exact Renyi divergence of order alpha is

    tau(alpha, e) = ln[(e^(alpha e) + e^((1 - alpha) e)) / (e^e + 1)] / (alpha - 1),

and a group measured once with all of e costs no less than one measured with gamma e and then with
(1 - gamma) e, however the second depends on the first.  The published corollary integrates over
the reals what is a sum over the integers; its figure (``renyi_integral``) is no bound, and stands
in plans only to be compared.

**Gaussian noise.**  rho adds up, and epsilon follows by the best conversion (Canonne, Kamath and
Steinke 2020, proposition 7) or by rho + 2 sqrt(rho ln(1/delta)).  Rounded Gaussians are one
Gaussian mechanism of mu = sqrt(2 rho), whose curve is exact.

**Privacy losses** themselves, composed, give the least epsilon that can be said of an execution.
The loss of a release is the logarithm of how much likelier an outcome is with a record than without
it.  Losses of independent releases add up, and delta(epsilon) is the mean of max(0, 1 - e^(epsilon
- loss)).  What an earlier release decides, here the detail, changes neither: whatever the
partition, the loss of its one changed cell has the same law.

* Geometric noise of parameter e: +e or -e, so that n releases have a binomial loss.  A group that
  is measured once is the worse kind (above), so all groups of a level are taken to be of it
  where it exists.
* Discrete Gaussian noise of sigma: (1 + 2 Z) / (2 sigma^2), Z the noise itself, so that n releases
  have (n + 2 S) / (2 sigma^2), S the sum of n draws.  Neither kind of group is the worse one: every
  number of groups of either kind is tried, and the largest epsilon counts.

Releases of equal noise are summed exactly; then losses are rounded up to a grid, on which they are
added.  What is cut off, and float errors, are below ``_SLACK`` of delta.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dpstream.accounting.arrays import Float64
from dpstream.accounting.gaussian import bisected, cdp_eps, epsilon_of
from dpstream.accounting.libraries import special
from dpstream.accounting.tabulation.margins import chances, summed
from dpstream.accounting.tabulation.parameters import Noise

#: The delta that figures are published for.
DELTA = 1e-10
#: Relative error allowed for sums of floats, logarithms and exponentials.
_UP = 1 + 1e-11
#: Orders that Renyi bounds are minimised over: the published ones, and some on either side.
_ORDERS = np.unique(np.concatenate([np.arange(101, 1001) / 100, 1 + np.logspace(-3, 4, 4001)]))


class Spent(NamedTuple):
    """The budget of a table at one level.

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
    """Return the least float whose decimal text is at least the figure."""
    near = float(figure)
    while Fraction(repr(near)) < figure:
        near = math.nextafter(near, math.inf)
    return near


def mu_of_rho(rho: Fraction) -> float:
    """Return mu of rounded Gaussian noise of this rho, rounded up."""
    mu = math.sqrt(float(2 * rho))
    while Fraction(mu) ** 2 < 2 * rho:
        mu = math.nextafter(mu, math.inf)
    return mu


def gaussian_epsilon(rho: Fraction, delta: float) -> float:
    """Return epsilon of rounded Gaussian noise: one Gaussian mechanism, exact, rounded up."""
    return epsilon_of(mu_of_rho(rho), delta)


def zcdp_epsilon(rho: Fraction, delta: float) -> float:
    """Return epsilon of rho-zCDP by the best conversion, rounded up."""
    return cdp_eps(rounded_up(rho) * _UP, delta)


def zcdp_epsilon_analytic(rho: Fraction, delta: float) -> float:
    """Return rho + 2 sqrt(rho ln(1/delta)), rounded up: valid, and never the least."""
    above = rounded_up(rho)
    return (above + 2 * math.sqrt(above * math.log(1 / delta))) * _UP


def renyi_sum(order: Float64, epsilon: float) -> Float64:
    """Return (n,) Renyi divergences of geometric noise of parameter ``epsilon`` shifted by one,
    exact.
    """
    above = np.logaddexp(order * epsilon, (1 - order) * epsilon)
    return np.asarray((above - np.logaddexp(epsilon, 0)) / (order - 1))


def renyi_integral(order: Float64, epsilon: float) -> Float64:
    """Return (n,) the published figures, an integral where the sum belongs: no bound."""
    odd = epsilon * (2 * order - 1)
    more = np.log(2 * order / odd) + (order - 1) * epsilon
    less = np.log(2 * (order - 1) / odd) - order * epsilon
    scale = math.log(math.tanh(epsilon / 2))
    return np.asarray((scale + np.logaddexp(more, less)) / (order - 1))


def renyi_epsilon(spent: Sequence[Spent], delta: float, *, integral: bool = False) -> float:
    """Return epsilon of geometric noise by Renyi divergences, rounded up.

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


Complex = npt.NDArray[np.complex128]

#: Steps that the range of losses is divided into: of few values each, and of transforms.
_STEPS, _PLACES = 1 << 20, 1 << 18
_SLACK = 1e-13


def geometric_losses(spent: Sequence[Spent], delta: float) -> float:
    """Return epsilon of geometric noise, rounded up."""
    times: dict[Fraction, int] = {}
    for each in spent:
        for epsilon in each.releases[0]:
            times[epsilon] = times.get(epsilon, 0) + each.groups
    most = float(total(spent))
    if most == 0:
        return 0.0
    step = 2 * most / _STEPS
    mass, lowest = np.ones(1), 0
    for epsilon, count in times.items():
        below, atoms = _binomial(float(epsilon), count, step)
        mass = _plus(mass, atoms)
        lowest += below
    losses = np.asarray((lowest + np.arange(len(mass))) * step, np.float64)
    # Where the grid is too coarse, Renyi's is less.
    return min(_least_epsilon(losses, mass, delta) * _UP, renyi_epsilon(spent, delta))


def _binomial(epsilon: float, count: int, step: float) -> tuple[int, Float64]:
    """Lowest place on the grid, and chances from it on, of ``count`` losses of +-epsilon."""
    plus = np.arange(count + 1)
    log_more, log_less = -np.logaddexp(0, -epsilon), -np.logaddexp(0, epsilon)
    ways = (
        special.gammaln(count + 1) - special.gammaln(plus + 1) - special.gammaln(count - plus + 1)
    )
    chance = np.exp(ways + plus * log_more + (count - plus) * log_less)
    places = np.ceil((2 * plus - count) * (epsilon / step)).astype(np.int64)
    atoms = np.zeros(places[-1] - places[0] + 1)
    np.add.at(atoms, places - places[0], chance)
    return int(places[0]), atoms


def _plus(mass: Float64, atoms: Float64) -> Float64:
    """Chances of the sum of two losses, of which the second has few values."""
    out = np.zeros(len(mass) + len(atoms) - 1)
    for at in np.flatnonzero(atoms):
        out[at : at + len(mass)] += atoms[at] * mass
    return out


@functools.lru_cache(maxsize=64)
def gaussian_losses(spent: tuple[Spent, ...], delta: float) -> float:
    """Return epsilon of discrete Gaussian noise, rounded up.

    Args:
        delta: above 1e-12.
    """
    rho = total(spent)
    if rho == 0:
        return 0.0
    grid = _Grid(float(rho))
    fixed, kinds = grid.none(), dict[tuple[int, int], list[Spent]]()
    for each in spent:
        if each.undivided and each.gamma:
            kinds.setdefault((each.alike, each.groups), []).append(each)
        else:
            fixed = fixed * grid.of(each, 0 if each.gamma else each.groups)
    choices = [
        [
            math.prod((grid.of(e, once) for e in alike), start=grid.none())
            for once in range(groups + 1)
        ]
        for (_, groups), alike in kinds.items()
    ]
    worst = 0.0
    for chosen in itertools.product(*choices):
        worst = grid.least_epsilon(math.prod(chosen, start=fixed), delta - _SLACK, worst)
    return min(worst * _UP, zcdp_epsilon(rho, delta))


class _Grid:
    """Losses from -most to most, as transforms of their chances.

    Args:
        rho: of everything; the loss is no more than rho + 9 sqrt(2 rho) but with 1e-18.
    """

    def __init__(self, rho: float) -> None:
        most = rho + 9 * math.sqrt(2 * rho) + 1e-6
        self._step = 2 * most / _PLACES
        self._losses = np.asarray((np.arange(_PLACES) - _PLACES / 2) * self._step, np.float64)
        self._cache = dict[tuple[Fraction, int], Complex]()

    def none(self) -> Complex:
        """Of no release."""
        return np.ones(_PLACES // 2 + 1, np.complex128)

    def of(self, each: Spent, once: int) -> Complex:
        """A level of which ``once`` groups are measured once and the others in two steps."""
        share = each.budget / each.groups
        out = self._releases(share, once)
        if each.gamma:
            for part in (each.gamma, 1 - each.gamma):
                out = out * self._releases(part * share, each.groups - once)
        return out

    def _releases(self, rho: Fraction, count: int) -> Complex:
        """``count`` releases of rho each."""
        if not count or not rho:
            return self.none()
        if (rho, count) not in self._cache:
            sigma = math.sqrt(float(1 / (2 * rho)))
            law = summed(chances(Noise("discrete gauss", sigma)), count)
            places = np.ceil((count + 2 * law.values) * (float(rho) / self._step)).astype(np.int64)
            places = np.clip(places, -_PLACES // 2, _PLACES // 2 - 1) % _PLACES
            self._cache[rho, count] = np.asarray(
                np.fft.rfft(np.bincount(places, law.mass, _PLACES))
            )
        return self._cache[rho, count]

    def least_epsilon(self, transform: Complex, delta: float, lower_bound: float) -> float:
        """The least epsilon, or the one that is known if it suffices."""
        mass = np.fft.fftshift(np.fft.irfft(transform, _PLACES))
        return _least_epsilon(self._losses, np.maximum(np.asarray(mass), 0.0), delta, lower_bound)


def _least_epsilon(losses: Float64, mass: Float64, delta: float, lower_bound: float = 0.0) -> float:
    """Smallest epsilon >= ``lower_bound`` on which at most ``delta`` of the losses' excess lies."""

    def excess(epsilon: float) -> float:
        over = int(np.searchsorted(losses, epsilon, side="right"))
        return float(np.sum(mass[over:] * -np.expm1(epsilon - losses[over:])))

    low, high = lower_bound, float(losses[-1])
    if excess(low) <= delta:
        return low
    return bisected(lambda epsilon: excess(epsilon) * (1 + 1e-9) <= delta, low, high, 50)[1]
