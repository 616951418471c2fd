"""Columns of the answer from noisy parts: values, sds and 95% intervals; all post-processing.

An interval is about the noise: it holds the same figure of the bounded rows (sampled, clamped,
scaled) with probability 95% or a little more, not that of the raw table.  Groups that passed by
little were helped by the noise of the count that was tested; that is not in it.  NULL is NaN.

A count or a sum has its noise's own exact interval.  A mean's is that of ``ratio`` (first order).
A variance s2 / n + centre - (s1 / n)^2 moves with its three noises by

    d s2 / n,   -2 m d s1 / n,   (2 m^2 - o) d n / n,     m = s1 / n, o = s2 / n,

and a standard deviation's interval is the root of its variance's.
"""

from typing import NamedTuple

import numpy as np

from dpstream.accounting.aggregates.mean import ratio
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
    """A count or a sum."""
    step = (column.grid if noise.part.what == "sum" else 1.0) / noise.part.unit
    value, margin = np.asarray(noisy * step, np.float64), noise.margin * step
    sd = np.full(len(noisy), noise.sd * step)
    return Estimate(value, sd, value - margin, value + margin)


def mean(
    column: QueryColumn, noises: list[PartNoise], noisy: list[Int64], quantile: float
) -> Estimate:
    """A mean, from sum and count."""
    (total, count), (total_sd, count_sd) = _scaled(noises, noisy)
    value, sd = ratio(column.aggregate, middle_of(column), total, count, (total_sd, count_sd))
    lo, hi = (bound * column.grid for bound in column.grid_bounds())
    low, high = value - quantile * sd, value + quantile * sd
    return Estimate(value, sd, np.clip(low, lo, hi), np.clip(high, lo, hi))


def variance(
    column: QueryColumn, noises: list[PartNoise], noisy: list[Int64], quantile: float
) -> Estimate:
    """A variance or a standard deviation, from sum, squares and count."""
    (total, square, count), sds = _scaled(noises, noisy)
    defined = count >= 1
    safe = np.where(defined, count, 1.0)
    offset, second = total / safe, square / safe
    most = float(half_of(column) ** 2)
    found = np.clip(second + centre_of(column) - offset * offset, 0, most)
    moves = sds[1], 2 * offset * sds[0], (2 * offset * offset - second) * sds[2]
    sd = np.sqrt(sum(np.square(move) for move in moves)) / safe
    low, high = np.clip(found - quantile * sd, 0, most), np.clip(found + quantile * sd, 0, most)
    scale = column.grid**2
    if column.kind == "stddev":
        root = np.sqrt(found)
        low, high, scale = np.sqrt(low), np.sqrt(high), column.grid
        # Near 0 the root has no first-order error: half of its interval then.
        sd = np.minimum(sd / np.where(root > 0, 2 * root, np.inf), (high - low) / 2)
        sd = np.where(root > 0, sd, (high - low) / 2)
        found = root
    parts = (np.where(defined, part * scale, np.nan) for part in (found, sd, low, high))
    return Estimate(*parts)


def _scaled(
    noises: list[PartNoise], noisy: list[Int64]
) -> tuple[tuple[Float64, ...], tuple[float, ...]]:
    """Noisy parts and their sds in grid units."""
    values = tuple(y / n.part.unit for y, n in zip(noisy, noises, strict=True))
    return values, tuple(n.sd / n.part.unit for n in noises)
