"""Privacy losses themselves, composed: the least epsilon that can be said of an execution.

The loss of a release is the logarithm of how much likelier an outcome is with a record than without
it.  Losses of independent releases add up, and delta(epsilon) is the mean of max(0, 1 -
e^(epsilon - loss)).  What an earlier release decides, here the detail, changes neither: whatever
the partition, the loss of its one changed cell has the same law.

* Geometric noise of parameter e: +e or -e, so that n releases have a binomial loss.  A group that
  is measured once is the worse kind (``guarantee``), so all groups of a level are taken to be of it
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

import numpy as np
import numpy.typing as npt

from dpstream.accounting import special
from dpstream.accounting.arrays import Float64
from dpstream.accounting.tabulation.guarantee import Spent, renyi_epsilon, total, zcdp_epsilon
from dpstream.accounting.tabulation.margins import chances, summed
from dpstream.accounting.tabulation.scales import Noise

Complex = npt.NDArray[np.complex128]

#: Steps that the range of losses is divided into: of few values each, and of transforms.
_STEPS, _PLACES = 1 << 20, 1 << 18
_SLACK = 1e-13
_UP = 1 + 1e-11


def geometric_losses(spent: Sequence[Spent], delta: float) -> float:
    """Epsilon of geometric noise, rounded up."""
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


def gaussian_losses(spent: Sequence[Spent], delta: float) -> float:
    """Epsilon of discrete Gaussian noise, rounded up.

    Args:
        delta: above 1e-12.
    """
    return _gaussian_losses(tuple(spent), delta)


@functools.lru_cache(maxsize=64)
def _gaussian_losses(spent: tuple[Spent, ...], delta: float) -> float:
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
            self._cache[rho, count] = self._transform(rho, count)
        return self._cache[rho, count]

    def _transform(self, rho: Fraction, count: int) -> Complex:
        sigma = math.sqrt(float(1 / (2 * rho)))
        law = summed(chances(Noise("discrete gauss", sigma)), count)
        places = np.ceil((count + 2 * law.values) * (float(rho) / self._step)).astype(np.int64)
        places = np.clip(places, -_PLACES // 2, _PLACES // 2 - 1) % _PLACES
        return np.asarray(np.fft.rfft(np.bincount(places, law.mass, _PLACES)))

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
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if excess(middle) * (1 + 1e-9) <= delta else (middle, high)
    return high
