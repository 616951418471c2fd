"""Columns of the answer from noisy parts: values, sds and 95% intervals; all post-processing.

An interval is about the noise: it holds the same figure of the bounded rows (sampled, clamped,
scaled) with probability 95% or a little more, not that of the raw table.  Groups that passed by
little were helped by the noise of the count that was tested; that is not in it.  NULL is NaN.

A count or a sum has its noise's own exact interval.

A mean is that of releases (`accounting.aggregates`): not clipped to its bounds.  Its interval
(Fieller's) is where its noise is within the quantile: if o is the bounded rows'
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

**Quantiles** of selected groups come from one noisy tree each: all of a column's, and in order.
Prefixes are least squares over the noisy nodes, made non-decreasing (the mean of the largest so
far and the smallest still to come: both rise, and so does their mean).  The quantile q is where
the prefix reaches q times the total, straight within a cell.  MIN and MAX are no limits of that:
the first cell whose noise is above 0 is mostly the first of all.  Ranks are kept ``_FAR`` sds of a
prefix away from both ends (or in the middle where a group is smaller), so MIN and MAX are values
that are seldom passed, not the extremes of one unit.

The interval of a quantile (Woodruff's) holds all cells that noise does not rule out.  If the
bounded rows' quantile is in cell c, prefixes less q times the total are 0 or more from c on, and
below 0 before c.  So are their means over some neighbouring prefixes, from c on and before c: c is
ruled out if one of the two means is on the wrong side by more than 1.96 of its sds, which noise
does to the quantile's own cell with 5% at most.  A tree's noise goes up and down from cell to cell,
and the interval goes from the first cell that is left to the last: where a cell has few rows,
single prefixes would leave one far away by chance.  Means over as many cells as half a sd of a
prefix has rows (on average over the range; by the noisy total) leave fewer, and cost nothing where
cells are full.  Measured, 97% to 99.9% are covered, never less than 95%: the rest is due to
those ups and downs, and to whole cells, which are 1/256 of the range, or single values.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from dpstream.accounting.aggregates import quotient
from dpstream.accounting.arrays import Float64, Ids, Int64
from dpstream.accounting.query.calibration import PartNoise
from dpstream.accounting.query.parts import (
    Tree,
    Windows,
    cells_of,
    centre_of,
    half_of,
    middle_of,
    tree_of,
    value_at,
    windows_of,
)
from dpstream.accounting.query.plan import QueryColumn
from dpstream.dp_transforms.one_shot.partials import Bounded, histograms

#: Draws one-shot noise of items: (items, scale) -> integers.
Draw = Callable[[Ids, float], Int64]
_FAR = 2.0
#: Groups that are worked on together: their nodes and cells stay in a few MiB.
_AT_ONCE = 1_024


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
    value, sd = quotient(column.aggregate, middle_of(column), total, count, (total_sd, count_sd))
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
    low = np.where(none, np.maximum(value - spread, limits[0]), low)
    high = np.where(none, np.minimum(value + spread, limits[1]), high)
    return np.minimum(low, value), np.maximum(high, value)


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


class _Smoothed(NamedTuple):
    """Means of prefixes of some groups: their numbers, totals, and means by cell."""

    groups: Int64
    windows: Windows
    total: Float64
    ahead: Float64
    behind: Float64


def quantiles(
    column: QueryColumn,
    noise: PartNoise,
    shards: Sequence[Bounded],
    groups: Int64,
    ids: Ids,
    draw: Draw,
    quantile: float,
) -> Estimate:
    """Return quantiles of some groups, a row each.

    Args:
        groups: codes of selected (or public) groups; ids: (all, 2) of every group.
        quantile: half-width of a 95% interval in sds.
    """
    shape = len(groups), len(column.at)
    out = Estimate(*(np.full(shape, np.nan) for _ in range(4)))
    for begin in range(0, len(groups), _AT_ONCE):
        chunk = groups[begin : begin + _AT_ONCE]
        prefixes = noisy_prefixes(column, noise, shards, chunk, ids, draw)
        estimates = read_off(column, prefixes, noise.sd / noise.part.unit, quantile)
        for target, part in zip(out, estimates, strict=True):
            target[begin : begin + _AT_ONCE] = part
    return out


def noisy_prefixes(
    column: QueryColumn,
    noise: PartNoise,
    shards: Sequence[Bounded],
    groups: Int64,
    ids: Ids,
    draw: Draw,
) -> Float64:
    """Return (groups, cells) least-squares prefixes of the noisy trees."""
    tree = tree_of(cells_of(column))
    exact = histograms(shards, column, groups, len(ids)) @ tree.matrix.T
    nodes = exact.shape[1]
    items = np.repeat(ids[groups], nodes, axis=0)
    # Ids are keyed digests; a node changes bits that numbers of public groups do not use.
    items[:, 1] ^= np.tile(np.arange(nodes, dtype=np.uint64) << np.uint64(40), len(groups))
    noisy = exact + draw(items, noise.scale).reshape(exact.shape)
    return np.asarray((noisy / noise.part.unit) @ tree.prefixes.T)


def read_off(column: QueryColumn, prefixes: Float64, sd: float, quantile: float) -> Estimate:
    """Return the estimates of a column's quantiles in each group, each (groups, quantiles).

    Args:
        prefixes: (groups, cells) noisy counts of the values up to each cell, from a group's tree.
        sd: sd of the noise of a tree's node.
        quantile: half of an interval's width, in sds.
    """
    tree = tree_of(cells_of(column))
    total = prefixes[:, -1]
    rising = np.maximum.accumulate(prefixes, axis=1)
    falling = np.minimum.accumulate(prefixes[:, ::-1], axis=1)[:, ::-1]
    level = (rising + falling) / 2
    far = _FAR * sd * float(np.sqrt(tree.factor.diagonal().max()))
    smoothed = _smoothed(tree, prefixes, sd)
    columns = [_one(tree, smoothed, level, q, (sd, quantile, far)) for q in column.at]
    # Two quantiles of one level curve are in order; their intervals are put so.
    order = np.argsort(column.at, kind="stable")
    out = [np.stack(part, axis=1) for part in zip(*columns, strict=True)]
    for part in out:
        part[:, order] = np.maximum.accumulate(part[:, order], axis=1)
    value, low, high = (value_at(column, part) for part in out)
    defined = (total >= 1)[:, None]
    low, high = np.minimum(low, value), np.maximum(high, value)
    fields = value, (high - low) / (2 * quantile), low, high
    return Estimate(*(np.where(defined, part, np.nan) for part in fields))


def _one(
    tree: Tree,
    smoothed: Sequence[_Smoothed],
    level: Float64,
    q: float,
    noise: tuple[float, float, float],
) -> tuple[Float64, Float64, Float64]:
    """Positions, in cells, of a quantile and of both ends of its interval."""
    sd, quantile, far = noise
    cells, total = level.shape[1], level[:, -1]
    margin = np.minimum(far, total / 2)
    rank = np.clip(q * total, margin, total - margin)
    reached = level >= rank[:, None]
    cell = np.where(reached.any(axis=1), reached.argmax(axis=1), cells - 1)
    row = np.arange(len(level))
    before = np.where(cell > 0, level[row, cell - 1], 0.0)
    inside = level[row, cell] - before
    part = np.clip((rank - before) / np.where(inside > 0, inside, 1.0), 0.0, 1 - 2.0**-30)
    position = cell + part
    low, high = _ends(tree, smoothed, q, (sd, quantile))
    return position, low.astype(np.float64), np.asarray(high + 1 - 2.0**-30, np.float64)


def _ends(
    tree: Tree, smoothed: Sequence[_Smoothed], q: float, noise: tuple[float, float]
) -> tuple[Int64, Int64]:
    """(groups,) first and last cell that may have a quantile."""
    sd, quantile = noise
    groups = sum(len(part.groups) for part in smoothed)
    low, high = np.zeros(groups, np.int64), np.zeros(groups, np.int64)
    for curves in smoothed:
        margins = []
        for variance, with_total in zip(*curves.windows[1:], strict=True):
            spread = variance - 2 * q * with_total + q * q * tree.factor[-1, -1]
            margins.append(quantile * sd * np.sqrt(np.maximum(spread, 0)))
        total, last = q * curves.total[:, None], curves.ahead.shape[1] - 1
        left = curves.ahead - total >= -margins[0]
        low[curves.groups] = np.where(left.any(axis=1), left.argmax(axis=1), last)
        left = curves.behind - total < margins[1]
        left[:, 0] = True  # nothing is before it
        high[curves.groups] = last - np.argmax(left[:, ::-1], axis=1)
    return low, high


def _smoothed(tree: Tree, prefixes: Float64, sd: float) -> list[_Smoothed]:
    """Means over a power of two of prefixes, at most a quarter of them."""
    cells, smoothed = len(tree.factor), []
    most = sd * float(np.sqrt(tree.factor.diagonal().max()))
    wanted = most / 2 * cells / np.maximum(prefixes[:, -1], 1.0)
    sizes = 1 << np.floor(np.log2(np.clip(wanted, 1, max(1, cells // 4)))).astype(np.int64)
    for size in np.unique(sizes):
        windows, mine = windows_of(cells, int(size)), np.flatnonzero(sizes == size)
        ahead, behind = (prefixes[mine] @ means.T for means in windows.means)
        smoothed.append(_Smoothed(mine, windows, prefixes[mine, -1], ahead, behind))
    return smoothed
