"""Exact sums of each cell, from records that are whole coordinates; private.

A record counts where it is usable and in one of the boxes that the query reads.  A record without
a value in a column (at the point of missing values) counts, and adds nothing to that column.
Sums are of integers: no order of records, and no division of them over workers, shows.

**Batches between workers** are exact sums for the shard of their cells, and noisy ones for the
release.  A shard is a run of cells, which `shards_of` divides.  Exact sums are PRIVATE: rows (cell,
records, of each column records and total, of each tree its leaves), only of cells with a record.
Measured sums are public: a row for each cell of the shard.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from dpstream.accounting.arrays import Bool, Int64
from dpstream.accounting.regions.space import Space
from dpstream.accounting.sessions.aggregates import Cells, Needs
from dpstream.dp_transforms.one_shot.partials import per_group

#: Noisy parts by aggregate: (cells,) int64 of each sum, (cells, nodes) of a tree.
Noisy = tuple[tuple[Int64, ...], ...]


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
    number = cell_numbers(
        cells, {axis.name: coordinates[axis.name][at] for axis in cells.axes}, len(at)
    )
    at, number = at[number >= 0], number[number >= 0]
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
    return Totals(_sums(number, None, cells.count), columns, leaves)


def cell_numbers(cells: Cells, coordinates: Mapping[str, Int64], size: int) -> Int64:
    """Return (size,) int64: the cell of each record, -1 if it is in none."""
    number, outside = np.zeros(size, np.int64), np.zeros(size, np.bool_)
    for axis in cells.axes:
        edges = np.array(axis.edges, np.int64)
        place = np.searchsorted(edges, coordinates[axis.name], side="right") - 1
        outside |= (place < 0) | (place >= axis.count)
        number = number * axis.count + place
    return np.where(outside, -1, number)


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
    return per_group(number, values, size)


def shards_of(cells: int, shards: int) -> Int64:
    """Return (shards + 1,) int64: where the cells of each shard begin, and the end of all."""
    return np.arange(shards + 1, dtype=np.int64) * cells // shards


def routed(totals: Totals, shards: int) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield (shard, rows) of the cells with a record."""
    from dpstream.dp_transforms.batches import split_by_shard  # loads Beam, which has batches

    cell = np.flatnonzero(totals.records)
    begins = shards_of(len(totals.records), shards)
    shard = np.searchsorted(begins, cell, side="right") - 1
    yield from split_by_shard(_rows(totals, cell), shard, shards)


def empty(needs: Needs) -> pa.RecordBatch:
    """Return the rows of no cell."""
    return _rows(nothing(0, needs), np.zeros(0, np.int64))


def merged(
    batches: Iterable[pa.RecordBatch], first: int, last: int, needs: Needs
) -> pa.RecordBatch:
    """Return the rows of cells ``first`` to before ``last``, from all workers, as one batch."""
    totals = gathered(batches, first, last, needs)
    return _rows(totals, np.flatnonzero(totals.records), first)


def _rows(totals: Totals, cell: Int64, first: int = 0) -> pa.RecordBatch:
    columns = {"cell": _array(cell + first), "records": _array(totals.records[cell])}
    for name, column in totals.columns.items():
        columns[f"records {name}"] = _array(column.records[cell])
        columns[f"total {name}"] = _array(column.total[cell])
    for name, leaves in totals.leaves.items():
        columns[f"leaves {name}"] = _array(leaves[cell])
    return pa.RecordBatch.from_pydict(columns)


def gathered(batches: Iterable[pa.RecordBatch], first: int, last: int, needs: Needs) -> Totals:
    """Return the totals of cells ``first`` to before ``last``, from the rows of all workers."""
    totals = nothing(last - first, needs)
    for batch in batches:
        at = _numbers(batch, "cell") - first
        totals.records[at] += _numbers(batch, "records")  # a cell is in a batch once
        for name, column in totals.columns.items():
            column.records[at] += _numbers(batch, f"records {name}")
            column.total[at] += _numbers(batch, f"total {name}")
        for name, leaves in totals.leaves.items():
            leaves[at] += _numbers(batch, f"leaves {name}")
    return totals


def packed(noisy: Noisy) -> pa.RecordBatch:
    """Return measured sums as columns, in their order; public."""
    parts = [part for sums in noisy for part in sums]
    names = [f"{number}" for number in range(len(parts))]
    return pa.RecordBatch.from_arrays([_array(part) for part in parts], names)


def joined(shards: Iterable[tuple[int, pa.RecordBatch]], parts: Sequence[int]) -> Noisy:
    """Return the measured sums of all cells, from all shards in any order.

    Args:
        parts: how many each aggregate has.
    """
    batches = [batch for _, batch in sorted(shards, key=lambda pair: pair[0])]
    ends = np.cumsum(parts).tolist()
    arrays = [np.concatenate([_numbers(b, str(k)) for b in batches]) for k in range(ends[-1])]
    return tuple(tuple(arrays[end - n : end]) for n, end in zip(parts, ends, strict=True))


def _array(values: Int64) -> pa.Array:
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    return flat if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, values.shape[1])


def _numbers(batch: pa.RecordBatch, name: str) -> Int64:
    """A column as (n,) or (n, k) int64."""
    column = batch.column(name)
    if not pa.types.is_fixed_size_list(column.type):
        return np.asarray(column.to_numpy(), np.int64)
    return np.asarray(column.flatten().to_numpy(), np.int64).reshape(-1, column.type.list_size)
