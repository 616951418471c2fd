"""Estimates of figures, and exact margins: the smallest m that the error exceeds with at most 5%.

**Margins.**  A figure is one measured count, or a sum of measured counts, each with noise of its
own.  Laws of sums are convolved, not taken to be normal: P(|Z| <= m) is a sum of chances of
integers.  A margin is decided with a tolerance that is larger than all float errors, towards the
larger m.

Where counts below 0 are published as 0, a single figure comes no further from the truth.  A sum of
such counts does: if many of them are truly 0, errors below 0 are cut and those above stay.  Its
margin then is the smallest m with P(sum max(0, Z_i) > m) + P(sum Z_i < -m) <= 5%, which holds
whatever the true counts are: an error max(-x, Z) is largest at x = 0 and smallest without end.

**Combined estimates** have both steps of a group in one, by least squares: less error at the same
cost.  The published method measures a group's total in step 1, chooses the detail by it, and throws
it away; the total that it publishes is the sum of n noisy cells.  Let y be the total of step 1, of
noise variance u, and c_1 .. c_n the cells, each of variance v.  The linear unbiased estimate of
least variance of the total x is

    T = S + w (y - S),    S = sum c_i,    w = n v / (u + n v),

of variance n v (1 - w), and that of a cell is c_i + (T - S) / n: what the total has moved, spread
evenly.  A sum of k cells has variance k v (1 - k w / n).  Nothing but released numbers is used, so
it is post-processing and costs nothing.

**Whole numbers.**  D = floor(w (y - S) + 1/2) is added to the total, and the cells share it: with
q = floor(D / n) each takes q, and the first D - n q of them in public order one more.  The order
alternates between the sexes.  So the published total is exactly the sum of the published cells,
and a sex's margin the sum of its cells; rounding adds at most 1/2 to a total and 1 to a cell.

**Counts below 0.**  Where they may not be published, each figure (total, margin, cell) that is
below 0 becomes 0 after the estimate.  No figure comes further from the truth by it, and a total is
then not always the sum of its cells: clipping first, as the published method does, would add a
bias that grows with the number of empty cells.

**Bias.**  T is unbiased over all noise.  Given the detail it is not: a group came to a detail
*because* y lay between two thresholds, and w of y's conditional error stays in T.  Its mean is 0
far from thresholds, and near one it pulls estimates of groups that were lifted over it up, and of
those that fell below it down.  The published method has no such bias, because its cells are drawn
after the choice.
"""

import bisect
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.libraries import special
from dpstream.accounting.tabulation.parameters import Noise, Parameters

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
        """Return (m,) chances of no more than each value."""
        before = np.concatenate([[0.0], np.cumsum(self.mass)])
        places = np.floor(value).astype(np.int64) - self.lowest + 1
        return np.asarray(before[np.clip(places, 0, len(self.mass))])


def chances(noise: Noise) -> Chances:
    """Return the law of the noise of one count."""
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
    """Return the law of the sum of ``count`` independent draws of one law, by powers of its
    transform.
    """
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
    """Return the law of the sum of two independent integers."""
    length = len(one.mass) + len(other.mass) - 1
    size = 1 << length.bit_length()
    full = np.fft.irfft(np.fft.rfft(one.mass, size) * np.fft.rfft(other.mass, size), size)
    return Chances(one.lowest + other.lowest, np.maximum(full[:length], 0.0))


def tail(noise: Noise, margin: int) -> float:
    """Return P(|Z| > margin) of the noise of one count."""
    law = chances(noise)
    return float(law.mass[np.abs(law.values) > margin].sum())


def least_margin(missed: Callable[[int], float], most: int) -> int:
    """Return the smallest m in 0 .. ``most`` that at most 5% exceed; ``missed`` falls."""
    return bisect.bisect_left(
        range(most), True, key=lambda m: missed(m) <= 1 - COVERAGE - TOLERANCE
    )


def margin(noise: Noise, count: int = 1, *, clipped: bool = False) -> int:
    """Return 95% margin of a sum of ``count`` measured counts.

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
    """Return the smallest k with P(Z <= k) >= ``chance``, which a true zero seldom exceeds.

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


class Estimates(NamedTuple):
    """Published figures of groups of one detail.

    Attributes:
        total: (g,); sexes: (g, 2), ``None`` of detail 0; cells: (g, n).
    """

    total: Int64
    sexes: Int64 | None
    cells: Int64


def weight(first: Noise, detail: Noise, cells: int) -> float:
    """Return w, the weight of step 1's total against the sum of ``cells`` cells."""
    u, v = chances(first).variance, chances(detail).variance
    return cells * v / (u + cells * v) if v else 0.0


def combine(first: Int64, cells: Int64, weight: float, *, allow_negative: bool) -> Estimates:
    """Return the estimates of some groups of one detail.

    Args:
        first: (g,) noisy totals of step 1.
        cells: (g, n) noisy cells, n = 1 or sex-major and even; as measured, so not clipped.
        weight: w of this level and detail.
        allow_negative: whether figures below 0 are published.
    """
    groups, n = cells.shape
    apart = first - cells.sum(axis=1)
    moved = np.floor(weight * apart + 0.5).astype(np.int64)
    shared = cells + (moved[:, None] + n - 1 - _ranks(n)) // n
    total = shared.sum(axis=1)
    sexes = None if n == 1 else shared.reshape(groups, 2, n // 2).sum(axis=2)
    if allow_negative:
        return Estimates(total, sexes, shared)
    clipped = None if sexes is None else np.maximum(sexes, 0)
    return Estimates(np.maximum(total, 0), clipped, np.maximum(shared, 0))


def _ranks(n: int) -> Int64:
    """(n,) place of each cell in the order in which remainders are given out."""
    if n == 1:
        return np.zeros(1, np.int64)
    return np.asarray(np.arange(n).reshape(n // 2, 2).T.ravel())


def variance(first: Noise, detail: Noise, cells: int, part: int) -> float:
    """Return the variance of the estimate of a sum of ``part`` of the cells, before it is
    rounded.
    """
    w = weight(first, detail, cells)
    return part * chances(detail).variance * (1 - part * w / cells)


def published_margin(
    parameters: Parameters, first: Noise | None, detail: Noise, cells: int, part: int
) -> int:
    """Return the exact 95% margin of the published sum of ``part`` of a group's measured cells.

    Args:
        first: noise of the group's step 1, ``None`` without one.
        detail: noise of each measured cell; cells: how many the group has.
    """
    own = first if parameters.estimates == "combined" else None
    return _published_margin(own, detail, cells, part, not parameters.allow_negative)


@functools.lru_cache(maxsize=4096)
def _published_margin(
    first: Noise | None, detail: Noise, cells: int, part: int, clipped: bool
) -> int:
    if first is None:
        return margin(detail, part, clipped=clipped)
    return combined_margin(first, detail, cells, part)


def combined_margin(first: Noise, detail: Noise, cells: int, part: int) -> int:
    """Return the exact 95% margin of the published sum of ``part`` cells: 1, a half or all of them.

    With A the noise of these cells and U that of step 1 less that of the other cells, the figure's
    error is A + floor((D + c) / m), D = floor(w (U - A) + 1/2), m = cells / part, with some c in 0
    .. m - 1 for the figure's place in the order.  A and U are independent, and for each A the error
    is within m of 0 on an interval of U: P is one sum over A.
    """
    w, law = weight(first, detail, cells), chances(detail)
    measured, rest = summed(law, part), summed(law, cells - part)
    others = plus(chances(first), Chances(-rest.lowest - len(rest.mass) + 1, rest.mass[::-1]))
    ways = cells // part
    most = (
        max(-measured.lowest, int(measured.values[-1]))
        + max(-others.lowest, int(others.values[-1]))
        + 1
    )
    if w == 0:
        return least_margin(lambda m: float(measured.mass[np.abs(measured.values) > m].sum()), most)
    return max(least_margin(_missed(measured, others, w, ways, c), most) for c in {0, ways - 1})


def _missed(
    measured: Chances, others: Chances, w: float, ways: int, c: int
) -> Callable[[int], float]:
    """P(|error| > m) as a function of m."""
    a = measured.values

    def up_to(moved: Int64) -> Float64:
        """P(D <= moved): U - A < (moved + 1/2) / w."""
        return others.at_most(np.ceil(a + (moved + 0.5) / w) - 1)

    def missed(m: int) -> float:
        inside = up_to(ways * (m - a + 1) - 1 - c) - up_to(ways * (-m - a) - c - 1)
        return 1 - float(measured.mass @ inside)

    return missed
