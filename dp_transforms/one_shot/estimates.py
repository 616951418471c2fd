"""Columns of the answer from noisy parts: values, sds and 95% intervals; all post-processing.

An interval is about the noise: it holds the same figure of the bounded rows (sampled, clamped,
scaled) with probability 95% or a little more, not that of the raw table.  Groups that passed by
little were helped by the noise of the count that was tested; that is not in it.  NULL is NaN.

A count or a sum has its noise's own exact interval.

A mean's interval (Fieller's) is where its noise is within the quantile: if o is the bounded rows'
mean less the middle, s - o n = 0, so that S - o N of the noisy S and N is noise of sd
sqrt(sd_S^2 + o^2 sd_N^2), whatever n is.  The interval holds all o in range, and the estimate, for
which that is within the quantile of 0: a quadratic's solutions.  Its coverage is that of one such
test, also for groups as small as their noise, where a first-order interval around S / N is too
wide on one side and too narrow on the other.  More than 95% are covered where solutions are two
pieces (a count that noise alone could give: then mostly the whole range), where there is none
(S / N far out of range: then the first-order one), and, a little, with geometric noise, as the
quantile is that of one such noise and two together have less.

A variance s2 / n + centre - (s1 / n)^2 moves with its three noises by

    d s2 / n,   -2 m d s1 / n,   (2 m^2 - o) d n / n,     m = s1 / n, o = s2 / n,

which is its sd.  Its interval is a mean's: with w = s2 / n - 2 m^2 the noise of S2 - 2 m^2 N - w N
is that of s2 and 2 m s1, and w times that of n, if m is taken as it was found.  What m itself is
off is of second order, and counts only where the count is within three sds of its noise or the
variance is at an end of its range.  A standard deviation's interval is the root of its variance's.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dpstream.accounting.aggregates import ratio
from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.query.calibration import PartNoise
from dpstream.accounting.query.parts import centre_of, half_of, middle_of
from dpstream.accounting.query.plan import QueryColumn


class Estimate(NamedTuple):
    """A column of the answer: (groups,) or, for quantiles, (groups, quantiles); NaN is NULL."""

    value: Float64
    sd: Float64
    low: Float64
    high: Float64


def direct(column: QueryColumn, noise: PartNoise, noisy: Int64) -> Estimate:
    """Return the estimate of a count or a sum."""
    step = (column.grid if noise.part.what == "sum" else 1.0) / noise.part.unit
    value, margin = np.asarray(noisy * step, np.float64), noise.margin * step
    sd = np.full(len(noisy), noise.sd * step)
    return Estimate(value, sd, value - margin, value + margin)


def mean(
    column: QueryColumn, noises: list[PartNoise], noisy: list[Int64], quantile: float
) -> Estimate:
    """Return the estimate of a mean, from sum and count."""
    (total, count), (total_sd, count_sd) = _scaled(noises, noisy)
    value, sd = ratio(column.aggregate, middle_of(column), total, count, (total_sd, count_sd))
    middle, grid = middle_of(column), column.grid
    lo, hi = (float(bound) for bound in column.grid_bounds())
    ends = _fieller(total, count, (total_sd, count_sd), quantile, (lo - middle, hi - middle))
    low, high = _around(
        value, quantile * sd, [(middle + end) * grid for end in ends], (lo * grid, hi * grid)
    )
    defined = ~np.isnan(value)
    return Estimate(value, sd, np.where(defined, low, np.nan), np.where(defined, high, np.nan))


def _around(
    value: Float64, spread: Float64, ends: Sequence[Float64], limits: tuple[float, float]
) -> tuple[Float64, Float64]:
    """Ends that hold the value; where there are none, those of a spread around it."""
    low, high = ends
    none = ~(low <= high)
    low = np.where(none, np.maximum(value - spread, limits[0]), np.minimum(low, value))
    high = np.where(none, np.minimum(value + spread, limits[1]), np.maximum(high, value))
    return low, high


def _fieller(
    total: Float64,
    count: Float64,
    sds: tuple[Float64 | float, float],
    quantile: float,
    within: tuple[Float64 | float, Float64 | float],
) -> tuple[Float64, Float64]:
    """Least and largest o within limits for which total - o count is within the quantile of 0.

    Without any, the least is above the largest.
    """
    first, last = within
    most = [quantile * quantile * sd * sd for sd in sds]
    # a o^2 - 2 b o + c <= 0
    a, b, c = count * count - most[1], total * count, total * total - most[0]
    root = np.sqrt(np.maximum(b * b - a * c, 0))
    # Both solutions without a difference of two like numbers.
    far = b + np.where(b >= 0, root, -root)
    with np.errstate(divide="ignore", invalid="ignore"):
        one, other = far / a, c / far
    left, right = np.fmin(one, other), np.fmax(one, other)
    inner = np.maximum(left, first), np.minimum(right, last)
    # The count may be none: what is not between the solutions, if there are any.
    few = left >= first, right <= last
    outer = (
        np.where(few[0], first, np.maximum(right, first)),
        np.where(few[1], last, np.minimum(left, last)),
    )
    unbounded = (a <= 0) & (b * b - a * c <= 0)
    low = np.where(unbounded, first, np.where(a >= 0, inner[0], outer[0]))
    high = np.where(unbounded, last, np.where(a >= 0, inner[1], outer[1]))
    return low, high


def variance(
    column: QueryColumn, noises: list[PartNoise], noisy: list[Int64], quantile: float
) -> Estimate:
    """Return the estimate of a variance or a standard deviation, from sum, squares and count."""
    (total, square, count), sds = _scaled(noises, noisy)
    defined = count >= 1
    safe = np.where(defined, count, 1.0)
    offset, second = total / safe, square / safe
    most = float(half_of(column) ** 2)
    estimate = np.clip(second + centre_of(column) - offset * offset, 0, most)
    moves = sds[1], 2 * offset * sds[0], (2 * offset * offset - second) * sds[2]
    sd = np.sqrt(sum(np.square(move) for move in moves)) / safe
    squared = offset * offset
    moved, shift = np.hypot(sds[1], 2 * offset * sds[0]), centre_of(column) + squared
    ends = _fieller(
        square - 2 * squared * count, count, (moved, sds[2]), quantile, (-shift, most - shift)
    )
    low, high = _around(estimate, quantile * sd, [end + shift for end in ends], (0, most))
    scale = column.grid**2
    if column.kind == "stddev":
        root = np.sqrt(estimate)
        low, high, scale = np.sqrt(low), np.sqrt(high), column.grid
        # Near 0 the root has no first-order error: half of its interval then.
        sd = np.minimum(sd / np.where(root > 0, 2 * root, np.inf), (high - low) / 2)
        sd = np.where(root > 0, sd, (high - low) / 2)
        estimate = root
    parts = (np.where(defined, part * scale, np.nan) for part in (estimate, sd, low, high))
    return Estimate(*parts)


def _scaled(
    noises: list[PartNoise], noisy: list[Int64]
) -> tuple[tuple[Float64, ...], tuple[float, ...]]:
    """Return noisy parts and their sds in grid units."""
    values = tuple(y / n.part.unit for y, n in zip(noisy, noises, strict=True))
    return values, tuple(n.sd / n.part.unit for n in noises)
