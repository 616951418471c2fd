"""Laws of noise of one count, and what is known of each in closed form.

* Two-sided geometric, P[k] proportional to e^(-|k| b): *Universally Utility-Maximizing Privacy
  Mechanisms* (Ghosh, Roughgarden, Sundararajan 2009); the whole numbers of the Laplace law.
* Truncated geometric: *Differentially Private Partition Selection* (Desfontaines, Voss, Gipson,
  Mandayam 2022), theorem 2: the law above cut at k and scaled to sum to 1.
* Staircase: *The Optimal Noise-Adding Mechanism in Differential Privacy* (Geng and Viswanath
  2016): pure epsilon, any shift of at most the sensitivity.
* Gaussian by its exact curve: *Improving the Gaussian Mechanism for Differential Privacy:
  Analytical Calibration and Optimal Denoising* (Balle and Wang 2018), theorem 8.
"""

import functools
import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq, minimize_scalar
from scipy.special import log_ndtr, ndtri_exp

Floats = npt.NDArray[np.float64]
#: Tails below this are left out of sums over a law.
_TINY = 1e-16


class Law(NamedTuple):
    """A law on the whole numbers -reach .. reach.

    Attributes:
        mass: (2 reach + 1,) probabilities.
    """

    mass: Floats

    @property
    def reach(self) -> int:
        """The largest value."""
        return len(self.mass) // 2

    @property
    def sd(self) -> float:
        """Standard deviation."""
        values = np.arange(-self.reach, self.reach + 1)
        return math.sqrt(float(self.mass @ values**2))

    def survival(self) -> Floats:
        """(2 reach + 2,) P[Z >= k] for k = -reach .. reach + 1."""
        return np.append(np.cumsum(self.mass[::-1])[::-1], 0.0)


def geometric(b: float) -> Law:
    """Two-sided geometric noise, b-DP for a shift of 1."""
    reach = max(1, math.ceil(-math.log(_TINY) / b) + 1)
    mass = np.exp(-b * np.abs(np.arange(-reach, reach + 1.0)))
    return Law(mass / mass.sum())


def geometric_sd(b: float) -> float:
    """sd of two-sided geometric noise in closed form."""
    return math.sqrt(2 * math.exp(-b)) / -math.expm1(-b)


def cut_of(b: float, d: float) -> int:
    """k of the truncated geometric law that is (b, d)-DP for a shift of 1."""
    return max(1, math.ceil(math.log((math.expm1(b) + 2 * d) / ((math.exp(b) + 1) * d)) / b))


def truncated_geometric(b: float, d: float) -> Law:
    """The geometric law on -k .. k; released if and only if noisy > k."""
    k = cut_of(b, d)
    mass = np.exp(-b * np.abs(np.arange(-k, k + 1.0)))
    return Law(mass / mass.sum())


def laplace_sd(b: float) -> float:
    """sd of Laplace noise of scale 1 / b."""
    return math.sqrt(2) / b


def staircase_sd(b: float) -> float:
    """sd of the staircase law, real values, sensitivity 1, at the gamma of least variance."""
    ratio = math.exp(-b)

    def variance(gamma: float) -> float:
        # Steps of 2 halves: on [i, i + gamma) height a r^i, on [i + gamma, i + 1) a r^(i + 1).
        i = np.arange(max(8, math.ceil(-math.log(_TINY) / b)))
        first = ((i + gamma) ** 3 - i**3.0) / 3
        second = ((i + 1.0) ** 3 - (i + gamma) ** 3) / 3
        height = (1 - ratio) / (2 * (gamma + ratio * (1 - gamma)))
        return float(2 * height * np.sum(ratio**i * (first + ratio * second)))

    best = minimize_scalar(variance, bounds=(1e-9, 1 - 1e-9), method="bounded")
    return math.sqrt(min(float(best.fun), variance(0.5)))


def discrete_staircase(b: float, sensitivity: int, step: int) -> Law:
    """The staircase law on whole numbers: P falls by e^-b every ``sensitivity``, ``step`` wide.

    P[|z| = i sensitivity + j] is proportional to e^(-b i) for j < step and to e^(-b (i + 1)) above
    (Geng and Viswanath 2016, section 5); step = 1 and sensitivity = 1 is the geometric law.
    """
    falls = math.ceil(-math.log(_TINY) / b) + 1
    size = np.arange(falls * sensitivity)
    level = size // sensitivity + (size % sensitivity >= step)
    half = np.exp(-b * level.astype(np.float64))
    mass = np.concatenate([half[:0:-1], half])
    return Law(mass / mass.sum())


@functools.lru_cache(maxsize=256)
def discrete_staircase_sd(b: float, sensitivity: int) -> float:
    """Least sd over the width of a step."""
    return min(discrete_staircase(b, sensitivity, r).sd for r in range(1, sensitivity + 1))


def gaussian_delta(epsilon: float, mu: float) -> float:
    """delta of Gaussian noise of sd 1 / mu for a shift of 1, at epsilon."""
    below = float(log_ndtr(mu / 2 - epsilon / mu))
    above = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
    return math.exp(below) * -math.expm1(above - below)


@functools.lru_cache(maxsize=1024)
def gaussian_mu(epsilon: float, delta: float) -> float:
    """mu at which the curve passes (epsilon, delta)."""

    def off(log_mu: float) -> float:
        mass = gaussian_delta(epsilon, math.exp(log_mu))
        return math.log(max(mass, 1e-300)) - math.log(delta)

    return math.exp(brentq(off, -12.0, 6.0, xtol=1e-13))


def quantile(tail: float) -> float:
    """z with P[N(0, 1) > z] = tail."""
    return -float(ndtri_exp(math.log(tail)))
