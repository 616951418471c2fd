"""Quantiles of selected groups from one noisy tree each: all of a column's, and in order.

Prefixes are least squares over the noisy nodes, made non-decreasing (the mean of the largest so
far and the smallest still to come: both rise, and so does their mean).  The quantile q is where
the prefix reaches q times the total, straight within a cell.  MIN and MAX are no limits of that:
the first cell whose noise is above 0 is mostly the first of all.  Ranks are kept ``_FAR`` sds of a
prefix away from both ends (or in the middle where a group is smaller), so MIN and MAX are values
that are seldom passed, not the extremes of one unit.

The interval of a quantile (Woodruff's) is where prefix - q total is within the noise of 0, cell
by cell: at least 95% for the cell of the bounded rows' quantile, more where cells are full.
"""

from collections.abc import Callable, Sequence

import numpy as np

from dpstream.accounting.arrays import Float64, Ids, Int64
from dpstream.accounting.query.calibration import PartNoise
from dpstream.accounting.query.plan import QueryColumn
from dpstream.accounting.query.tree import Tree, cells_of, tree_of, value_at
from dpstream.dp_transforms.one_shot.aggregation import histograms
from dpstream.dp_transforms.one_shot.estimates import Estimate
from dpstream.dp_transforms.one_shot.partials import Bounded

#: Draws one-shot noise of items: (items, scale) -> integers.
Draw = Callable[[Ids, float], Int64]
_FAR = 2.0
#: Groups that are worked on together: their nodes and cells stay in a few MiB.
_AT_ONCE = 1_024


def quantiles(
    column: QueryColumn,
    noise: PartNoise,
    shards: Sequence[Bounded],
    groups: Int64,
    ids: Ids,
    draw: Draw,
    quantile: float,
) -> Estimate:
    """Quantiles of the groups that are asked for, a row each.

    Args:
        groups: codes of selected (or public) groups; ids: (all, 2) of every group.
        quantile: half-width of a 95% interval in sds.
    """
    shape = len(groups), len(column.at)
    out = Estimate(*(np.full(shape, np.nan) for _ in range(4)))
    for begin in range(0, len(groups), _AT_ONCE):
        some = groups[begin : begin + _AT_ONCE]
        prefixes = noisy_prefixes(column, noise, shards, some, ids, draw)
        found = read_off(column, prefixes, noise.sd / noise.part.unit, quantile)
        for target, part in zip(out, found, strict=True):
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
    """(groups, cells) least-squares prefixes of the noisy trees."""
    tree = tree_of(cells_of(column))
    exact = histograms(shards, column, groups, len(ids)) @ tree.matrix.T
    nodes = exact.shape[1]
    items = np.repeat(ids[groups], nodes, axis=0)
    # Ids are keyed digests; a node changes bits that numbers of public groups do not use.
    items[:, 1] ^= np.tile(np.arange(nodes, dtype=np.uint64) << np.uint64(40), len(groups))
    noisy = exact + draw(items, noise.scale).reshape(exact.shape)
    return np.asarray((noisy / noise.part.unit) @ tree.prefixes.T)


def read_off(column: QueryColumn, prefixes: Float64, sd: float, quantile: float) -> Estimate:
    """(groups, quantiles) from prefixes of trees whose nodes have noise of ``sd``."""
    tree = tree_of(cells_of(column))
    total = prefixes[:, -1]
    rising = np.maximum.accumulate(prefixes, axis=1)
    falling = np.minimum.accumulate(prefixes[:, ::-1], axis=1)[:, ::-1]
    level = (rising + falling) / 2
    far = _FAR * sd * float(np.sqrt(tree.factor.diagonal().max()))
    columns = [_one(column, tree, prefixes, level, q, (sd, quantile, far)) for q in column.at]
    # Two quantiles of one level curve are in order; their intervals are put so.
    order = np.argsort(column.at, kind="stable")
    out = [np.stack(part, axis=1) for part in zip(*columns, strict=True)]
    for part in out:
        part[:, order] = np.maximum.accumulate(part[:, order], axis=1)
    value, low, high = (value_at(column, part) for part in out)
    defined = (total >= 1)[:, None]
    low, high = np.minimum(low, value), np.maximum(high, value)
    found = value, (high - low) / (2 * quantile), low, high
    return Estimate(*(np.where(defined, part, np.nan) for part in found))


def _one(
    column: QueryColumn,
    tree: Tree,
    prefixes: Float64,
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
    # sd of prefix - q total, per cell.
    factor = tree.factor
    spread = factor.diagonal() - 2 * q * factor[:, -1] + q * q * factor[-1, -1]
    far_off = quantile * sd * np.sqrt(np.maximum(spread, 0))
    ahead = prefixes - q * prefixes[:, -1:]
    may_start = ahead >= -far_off
    low = np.where(may_start.any(axis=1), may_start.argmax(axis=1), cells - 1)
    not_over = np.empty_like(may_start)
    not_over[:, 0] = True
    not_over[:, 1:] = ahead[:, :-1] < far_off[:-1]
    high = cells - np.argmax(not_over[:, ::-1], axis=1) - 2.0**-30
    return position, low.astype(np.float64), high
