"""Exact sums of each cell, from records that are whole coordinates; private.

A record counts where it is usable and in one of the boxes that the query reads.  A record without
a value in a column (at the point of missing values) counts, and adds nothing to that column.
Sums are of integers: no order of records, and no division of them over workers, shows.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from dpstream.accounting.arrays import Bool, Int64
from dpstream.accounting.regions.space import Space
from dpstream.accounting.sessions.aggregates import Cells, Needs

#: Below this a float is a whole number exactly.
_EXACT = 1 << 53


class ColumnTotals(NamedTuple):
    """(cells,) int64: how many records have a value in a column, and the sum of coordinates."""

    records: Int64
    total: Int64


class Totals(NamedTuple):
    """PRIVATE exact sums of each cell, for `measured` only.

    Attributes:
        records: (cells,) int64 how many.
        columns: of each column that is summed.
        leaves: (cells, leaves) int64 histograms by column.
    """

    records: Int64
    columns: dict[str, ColumnTotals]
    leaves: dict[str, Int64]

    def plus(self, other: "Totals") -> "Totals":
        """Return the totals of the records of both."""
        columns = {
            name: ColumnTotals(
                column.records + other.columns[name].records,
                column.total + other.columns[name].total,
            )
            for name, column in self.columns.items()
        }
        leaves = {name: counts + other.leaves[name] for name, counts in self.leaves.items()}
        return Totals(self.records + other.records, columns, leaves)


def nothing(cells: int, needs: Needs) -> Totals:
    """Return the totals of no record."""

    def none(*shape: int) -> Int64:
        return np.zeros(shape, np.int64)

    columns = {name: ColumnTotals(none(cells), none(cells)) for name in needs.columns}
    return Totals(
        none(cells), columns, {leaves.column: none(cells, leaves.size) for leaves in needs.leaves}
    )


def tallied(
    space: Space,
    boxes: Int64,
    cells: Cells,
    needs: Needs,
    coordinates: Mapping[str, Int64],
    usable: Bool,
) -> Totals:
    """Return totals of records, in numpy, as workers compute them and a database's scan must.

    Args:
        boxes: (m, d, 2) that are read, disjoint.
        coordinates: (n,) of each dimension of `columns_of`.
        usable: (n,).
    """
    at = np.flatnonzero(usable & _are_in_boxes(space, boxes, coordinates, len(usable)))
    number = numbers(cells, {axis.name: coordinates[axis.name][at] for axis in cells.axes}, len(at))
    at, number = at[number >= 0], number[number >= 0]
    tally = nothing(cells.count, needs)
    columns = {}
    for name in needs.columns:
        value, has = _values(space, name, coordinates[name][at])
        columns[name] = ColumnTotals(
            _sums(number[has], None, cells.count), _sums(number[has], value[has], cells.count)
        )
    leaves = {}
    for tree in needs.leaves:
        value, has = _values(space, tree.column, coordinates[tree.column][at])
        leaf = (value[has] - tree.low) * tree.size // tree.width
        leaves[tree.column] = _sums(
            number[has] * tree.size + leaf, None, cells.count * tree.size
        ).reshape(-1, tree.size)
    return tally._replace(records=_sums(number, None, cells.count), columns=columns, leaves=leaves)


def numbers(cells: Cells, coordinates: Mapping[str, Int64], size: int) -> Int64:
    """Return (size,) int64: the cell of each record, -1 if it is in none."""
    cell_numbers, outside = np.zeros(size, np.int64), np.zeros(size, np.bool_)
    for axis in cells.axes:
        edges = np.array(axis.edges, np.int64)
        place = np.searchsorted(edges, coordinates[axis.name], side="right") - 1
        outside |= (place < 0) | (place >= axis.count)
        cell_numbers = cell_numbers * axis.count + place
    return np.where(outside, -1, cell_numbers)


def columns_of(space: Space, boxes: Int64, cells: Cells, needs: Needs) -> tuple[str, ...]:
    """Return the dimensions whose coordinates `tallied` reads; others can be left out."""
    bounded = (boxes[:, :, 0] > 0) | (boxes[:, :, 1] < space.sizes)
    used = {space.dimensions[place].name for place in np.flatnonzero(bounded.any(axis=0))}
    used |= {axis.name for axis in cells.axes}
    used |= {*needs.columns, *(leaves.column for leaves in needs.leaves)}
    return tuple(d.name for d in space.dimensions if d.name in used)


def _are_in_boxes(space: Space, boxes: Int64, coordinates: Mapping[str, Int64], size: int) -> Bool:
    """(n,) which records are in one of the boxes."""
    mask = np.zeros(size, np.bool_)
    for box in boxes:
        inside = np.ones(size, np.bool_)
        for place, (low, high) in enumerate(box.tolist()):
            dimension = space.dimensions[place]
            if low > 0:
                inside &= coordinates[dimension.name] >= low
            if high < dimension.size:
                inside &= coordinates[dimension.name] < high
        mask |= inside
    return mask


def _values(space: Space, name: str, coordinates: Int64) -> tuple[Int64, Bool]:
    return coordinates, coordinates < space.dimensions[space.place(name)].values


def _sums(number: Int64, values: Int64 | None, size: int) -> Int64:
    """(size,) how many there are of each number, or exact sums of their values."""
    if values is None:
        return np.bincount(number, minlength=size).astype(np.int64, copy=False)
    if int(values.max(initial=0)) * len(values) < _EXACT:
        return np.bincount(number, values, minlength=size).astype(np.int64)
    sums = np.zeros(size, np.int64)
    np.add.at(sums, number, values)
    return sums
