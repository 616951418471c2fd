"""Exact margins: the smallest m that the error of a figure does not exceed with 95%.

A figure is one measured count, or a sum of measured counts, each with noise of its own.  Laws of
sums are convolved, not taken to be normal: P(|Z| <= m) is a sum of chances of integers.  A margin
is decided with a tolerance that is larger than all float errors, towards the larger m.

Where counts below 0 are published as 0, a single figure comes no further from the truth.  A sum of
such counts does: if many of them are truly 0, errors below 0 are cut and those above stay.  Its
margin then is the smallest m with P(sum max(0, Z_i) > m) + P(sum Z_i < -m) <= 5%, which holds
whatever the true counts are: an error max(-x, Z) is largest at x = 0 and smallest without end.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from dpstream.accounting import special
from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.tabulation.scales import Noise

COVERAGE = 0.95
#: Above the error of any chance that is computed here.
TOLERANCE = 1e-11


class Chances(NamedTuple):
    """A law on the integers ``lowest`` and after; what is left out has less than 1e-15.

    Attributes:
        mass: (n,) chances.
    """

    lowest: int
    mass: Float64

    @property
    def values(self) -> Int64:
        """(n,) the integers."""
        return self.lowest + np.arange(len(self.mass))

    @property
    def variance(self) -> float:
        """Variance about the mean."""
        values = self.values.astype(np.float64)
        mean = float(self.mass @ values)
        return float(self.mass @ (values - mean) ** 2)

    def at_most(self, value: Float64 | Int64) -> Float64:
        """(m,) chances of no more than each value."""
        before = np.concatenate([[0.0], np.cumsum(self.mass)])
        places = np.floor(value).astype(np.int64) - self.lowest + 1
        return np.asarray(before[np.clip(places, 0, len(self.mass))])


def chances(noise: Noise) -> Chances:
    """Law of the noise of one count."""
    if noise.scale == 0:
        return Chances(0, np.ones(1))
    laplace = noise.law == "discrete laplace"
    far = math.ceil((37 if laplace else 8.5) * noise.scale) + 1
    values = np.arange(-far, far + 1)
    if noise.law == "rounded gauss":
        # Both halves from their own tail: a difference near 1 has no digits left.
        upper = special.ndtr(-(np.abs(values) - 0.5) / noise.scale)
        mass = upper - special.ndtr(-(np.abs(values) + 0.5) / noise.scale)
    elif laplace:
        mass = np.exp(-np.abs(values) / noise.scale)
    else:
        mass = np.exp(-((values / noise.scale) ** 2) / 2)
    return Chances(-far, mass / mass.sum())


def summed(law: Chances, count: int) -> Chances:
    """Law of the sum of ``count`` independent draws of one law, by powers of its transform."""
    if count == 0:
        return Chances(0, np.ones(1))
    if count == 1:
        return law
    values, sd = law.values, math.sqrt(law.variance)
    mean = float(law.mass @ values)
    # Beyond the largest single value and ten sds of the sum there is nothing left to wrap around.
    far = math.ceil(10 * sd * math.sqrt(count) + max(abs(law.lowest), abs(values[-1])))
    low = max(math.floor(count * mean) - far, count * law.lowest)
    high = min(math.floor(count * mean) + far, count * int(values[-1]))
    size = 1 << (2 * far).bit_length()
    spread = np.zeros(size)
    spread[: len(law.mass)] = law.mass
    full = np.fft.irfft(np.fft.rfft(spread) ** count, size)
    # Place i holds the chance of count * lowest + i, modulo the size.
    places = np.arange(low - count * law.lowest, high + 1 - count * law.lowest) % size
    return Chances(low, np.maximum(full[places], 0.0))


def plus(one: Chances, other: Chances) -> Chances:
    """Law of the sum of two independent integers."""
    length = len(one.mass) + len(other.mass) - 1
    size = 1 << length.bit_length()
    full = np.fft.irfft(np.fft.rfft(one.mass, size) * np.fft.rfft(other.mass, size), size)
    return Chances(one.lowest + other.lowest, np.maximum(full[:length], 0.0))


def tail(noise: Noise, margin: int) -> float:
    """P(|Z| > margin) of the noise of one count."""
    law = chances(noise)
    return float(law.mass[np.abs(law.values) > margin].sum())


def least_margin(missed: Callable[[int], float], most: int) -> int:
    """Smallest m in 0 .. ``most`` at which no more than 5% is missed; ``missed`` falls."""
    low, high = -1, most
    while high - low > 1:
        middle = (low + high) // 2
        if missed(middle) <= 1 - COVERAGE - TOLERANCE:
            high = middle
        else:
            low = middle
    return high


def margin(noise: Noise, count: int = 1, *, clipped: bool = False) -> int:
    """95% margin of a sum of ``count`` measured counts.

    Args:
        clipped: counts below 0 become 0 before they are summed.
    """
    law = chances(noise)
    total = summed(law, count)
    upper = summed(_clipped(law), count) if clipped and count > 1 else total

    def missed(m: int) -> float:
        above = float(upper.mass[upper.values > m].sum())
        return above + float(total.mass[total.values < -m].sum())

    return least_margin(missed, max(-total.lowest, int(upper.values[-1])))


def quantile(noise: Noise, chance: float) -> int:
    """Smallest k with P(Z <= k) >= ``chance``: a true zero exceeds it at most 1 - chance often.

    Args:
        chance: in (0, 1).
    """
    law = chances(noise)
    reached = np.cumsum(law.mass) >= chance + TOLERANCE
    return int(law.values[int(np.argmax(reached))]) if reached.any() else int(law.values[-1])


def _clipped(law: Chances) -> Chances:
    """Law of max(0, Z)."""
    zero = -law.lowest
    mass = law.mass[zero:].copy()
    mass[0] += law.mass[:zero].sum()
    return Chances(0, mass)
