"""Exact sums over units, per group: integers, so that no order of rows and no rounding shows."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dpstream.accounting.arrays import Int64
from dpstream.accounting.query.parts import cell_at, cells_of
from dpstream.accounting.query.plan import QueryColumn
from dpstream.dp_transforms.one_shot.partials import Bounded

#: Below this a float is a whole number exactly, and sums of floats are exact in any order.
_EXACT = 1 << 53


class Totals(NamedTuple):
    """PRIVATE exact sums of each group, for ``answer`` only.

    Attributes:
        units: (groups,) units; weighted: (groups,) their selection weights, in 2^-WEIGHT_BITS.
        sums: (groups,) of each part but trees, by the part's number.
    """

    units: Int64
    weighted: Int64
    sums: dict[int, Int64]

    def plus(self, other: "Totals") -> "Totals":
        """Return the totals of the units of both.

        Shards of units share codes; a later shard may have further groups.
        """
        sums = {index: _plus(s, other.sums[index]) for index, s in self.sums.items()}
        units, weighted = _plus(self.units, other.units), _plus(self.weighted, other.weighted)
        return Totals(units, weighted, sums)


def _plus(one: Int64, other: Int64) -> Int64:
    longer, shorter = (one, other) if len(one) >= len(other) else (other, one)
    out = longer.copy()
    out[: len(shorter)] += shorter
    return out


def aggregated(rows: Bounded, groups: int, weights: Sequence[int] = ()) -> Totals:
    """Return sums over the units of a shard; ``Totals.plus`` adds shards up.

    Args:
        groups: number of groups.
        weights: of a unit of 1, 2, .. groups (``Selection.weights``).
    """
    units = np.bincount(rows.group, minlength=groups)
    weighted = np.zeros(groups, np.int64)
    if weights:
        table = np.array((0, *weights), np.int64)
        weighted = per_group(rows.group, table[rows.in_groups], groups)
    sums = {index: per_group(rows.group, s, groups) for index, s in rows.sums.items()}
    return Totals(units, weighted, sums)


def per_group(group: Int64, values: Int64, groups: int) -> Int64:
    """Return (groups,) exact sums of int64 values."""
    most = int(np.abs(values).max(initial=0))
    if most * len(values) < _EXACT:
        return np.bincount(group, values, minlength=groups).astype(np.int64)
    out = np.zeros(groups, np.int64)
    np.add.at(out, group, values)
    return out


def histograms(shards: Sequence[Bounded], column: QueryColumn, groups: Int64, size: int) -> Int64:
    """Return (groups, cells) exact histograms of a quantiles column, for some groups.

    Args:
        shards: bounded rows of different units.
        groups: codes of the groups, without duplicates.
        size: number of all groups.
    """
    place = np.full(size, -1, np.int64)
    place[groups] = np.arange(len(groups))
    cells = cells_of(column)
    out = np.zeros(len(groups) * cells, np.int64)
    for rows in shards:
        at, value, weight = rows.rows[column.name]
        mine = place[rows.group[at]]
        there = mine >= 0
        cell = mine[there] * cells + cell_at(column, value[there])
        out += per_group(cell, weight[there], len(out))
    return out.reshape(-1, cells)
