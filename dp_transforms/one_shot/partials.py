"""The output of stage 1, a row per (unit, group) of integer partials, and their exact sums.

All of it is private.  Every row belongs to one unit and was made of that unit's rows alone; that
is what the whole guarantee rests on, and stage 1's to keep.  What is checked or made so here:
each (unit, group) is there once, each partial lies in its bounds, centred sums in those that
their counts leave, a group has no more than r of a unit's rows.

Sums over units, per group, are integers, so that no order of rows and no rounding shows.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dpstream.accounting.arrays import Ids, Int64
from dpstream.accounting.errors import RunError
from dpstream.accounting.query.parts import (
    QueryPart,
    cell_at,
    cells_of,
    centre_of,
    half_of,
    parts_by_column,
    parts_of,
)
from dpstream.accounting.query.plan import QueryColumn, QueryPlan

#: Rows of one query: sums of as many partials stay in 64 bits.
MAX_PARTIALS = 1 << 30
#: Below this a float is a whole number exactly, and sums of floats are exact in any order.
_EXACT = 1 << 53


class Rows(NamedTuple):
    """Rows of a quantiles column: (n,) unit, group, and value in grid units; in any order."""

    unit: Int64
    group: Int64
    value: Int64


class Partials(NamedTuple):
    """Partials of one query.

    Attributes:
        unit, group: (n,) slots of units and codes of groups, numbered from 0; in any order.  A
            group below 0 is none of the public ones and is dropped.
        unit_ids, group_ids: (units, 2) and (groups, 2) keyed 128-bit ids of slots and codes
            (``dp_transforms.noise.ids``).
        sums: (n,) int64 of each part of ``stored_parts(plan)``, in that order.
        rows: of each quantiles column, and of each count of distinct values.
    """

    unit: Int64
    group: Int64
    unit_ids: Ids
    group_ids: Ids
    sums: tuple[Int64, ...] = ()
    rows: Mapping[str, Rows] = {}


class Bounded(NamedTuple):
    """Partials within the bounds of the plan, sorted by (unit, group).

    Attributes:
        unit, group: (n,); in_groups: (n,) groups of the row's unit.
        sums: (n,) of every part of the plan but trees, in lattice units.
        rows: of each column that has rows, (rows,) number of the partial, value, and weight in
            lattice units.
    """

    unit: Int64
    group: Int64
    in_groups: Int64
    sums: dict[int, Int64]
    rows: dict[str, tuple[Int64, Int64, Int64]]


def stored_parts(plan: QueryPlan, parts: Sequence[QueryPart] | None = None) -> list[int]:
    """Return the numbers of the parts that a partial holds: all but the units' constant 1 and
    trees.
    """
    units = {column.name for column in plan.columns if column.kind == "units"}
    parts = parts_of(plan) if parts is None else parts
    return [i for i, p in enumerate(parts) if p.what != "tree" and p.column not in units]


def merged(plan: QueryPlan, parts: Sequence[QueryPart], partials: Partials) -> Partials:
    """Return the partials in the order of (unit, group), each once, within their bounds.

    Two rows of one unit and group are added up before they are clamped.

    Raises:
        RunError: columns do not fit together.
    """
    stored = stored_parts(plan, parts)
    _check(plan, stored, partials)
    unit, group, sums = partials.unit, partials.group, partials.sums
    if len(group) and int(group.min()) < 0:
        grouped = np.flatnonzero(group >= 0)
        unit, group, sums = unit[grouped], group[grouped], tuple(s[grouped] for s in sums)
    pair = pairs(unit, group, len(partials.group_ids))
    order = first = None
    if not (pair[1:] > pair[:-1]).all():
        order, pair = sorted_by(pair)
        new = np.ones(len(pair), bool)
        np.not_equal(pair[1:], pair[:-1], out=new[1:])
        first = None if new.all() else np.flatnonzero(new)
    del pair

    def of_each(column: Int64) -> Int64:
        """Return one value of each (unit, group)."""
        return column if order is None else column[order if first is None else order[first]]

    clamped: dict[int, Int64] = {}
    for i, column in zip(stored, sums, strict=True):
        totals = of_each(column) if first is None else np.add.reduceat(column[order], first)
        clamped[i] = np.clip(totals, parts[i].low, parts[i].high)
    _hold_to_counts(plan, parts, clamped)
    unit, group = of_each(unit), of_each(group)
    return partials._replace(unit=unit, group=group, sums=tuple(clamped.values()))


def _hold_to_counts(plan: QueryPlan, parts: Sequence[QueryPart], sums: dict[int, Int64]) -> None:
    """|sum of (x - middle)| <= h count, and squares likewise: what a norm's proof rests on."""
    numbers = parts_by_column(plan, parts)
    for column in plan.columns:
        part_numbers = {parts[i].what: i for i in numbers[column.name]}
        if "count" not in part_numbers or "sum" not in part_numbers:
            continue
        count, half = sums[part_numbers["count"]], half_of(column)
        sums[part_numbers["sum"]] = np.clip(sums[part_numbers["sum"]], -half * count, half * count)
        if "square" in part_numbers:
            centre = centre_of(column)
            low, high = -centre * count, (half**2 - centre) * count
            sums[part_numbers["square"]] = np.clip(sums[part_numbers["square"]], low, high)


def pairs(unit: Int64, group: Int64, groups: int) -> Int64:
    """Return one number for each (unit, group)."""
    return unit * np.int64(max(groups, 1)) + group


def sorted_by(numbers: Int64) -> tuple[Int64, Int64]:
    """Return the order that sorts numbers of at least 0, and the sorted numbers.

    Number and place are sorted as one where they fit: it takes half of the time of ``argsort``.
    """
    bits = len(numbers).bit_length()
    if int(numbers.max(initial=0)) >= 1 << (63 - bits):
        order = np.argsort(numbers)
        return order, numbers[order]
    both = np.sort((numbers << bits) | np.arange(len(numbers)))
    return both & ((1 << bits) - 1), both >> bits


def _numbered(rows: Rows, units: int, groups: int) -> bool:
    """Return whether all rows have an existing unit and group; a group below 0 stands for none."""
    if not len(rows.unit):
        return True
    units_fit = int(rows.unit.min()) >= 0 and int(rows.unit.max()) < units
    return units_fit and int(rows.group.max()) < groups


def _check(plan: QueryPlan, stored: Sequence[int], partials: Partials) -> None:
    size, units, groups = len(partials.unit), len(partials.unit_ids), len(partials.group_ids)
    tables = {column.name for column in plan.columns if column.has_rows}
    fits = len(partials.sums) == len(stored) and set(partials.rows) == tables
    fits &= all(len(column) == size for column in (partials.group, *partials.sums))
    fits &= size <= MAX_PARTIALS and units * max(groups, 1) < 1 << 62
    if fits and size:
        fits &= int(partials.unit.min()) >= 0 and int(partials.unit.max()) < units
        fits &= int(partials.group.max()) < groups
    fits = fits and all(_numbered(rows, units, groups) for rows in partials.rows.values())
    if not fits:
        raise RunError(
            "query.partials",
            "columns of stage 1 are not what the plan asks for",
            "report this: it is a fault of the program, not of the query",
        )


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


def distinct_values(shards: Sequence[Bounded], column: QueryColumn, groups: int) -> Int64:
    """Return (groups,) exact number of different values that the units' rows have in each group.

    Args:
        shards: bounded rows of different units.
        groups: number of groups.
    """
    of_shards = [(rows.group, *rows.rows[column.name]) for rows in shards]
    group = np.concatenate([group[at] for group, at, _, _ in of_shards])
    value = np.concatenate([value for _, _, value, _ in of_shards])
    order = np.lexsort((value, group))
    group, value = group[order], value[order]
    new = np.ones(len(group), bool)
    new[1:] = (group[1:] != group[:-1]) | (value[1:] != value[:-1])
    return np.bincount(group[new], minlength=groups).astype(np.int64)


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
