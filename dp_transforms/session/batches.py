"""Batches between workers: exact sums for the shard of their cells, noisy ones for the release.

A shard is a run of cells, which ``shards_of`` divides.  Exact sums are PRIVATE: rows (cell,
records,
of each column records and total, of each tree its leaves), only of cells with a record.  Measured
sums are public: a row for each cell of the shard.  Both are integers, so that the order of arrival
has no effect.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from dpstream.accounting.arrays import Int64
from dpstream.accounting.sessions.aggregates import Needs
from dpstream.dp_transforms.batches import numbers, split_by_shard
from dpstream.dp_transforms.session.release import Noisy
from dpstream.dp_transforms.session.totals import Totals, nothing


def shards_of(cells: int, shards: int) -> Int64:
    """Return (shards + 1,) int64: where the cells of each shard begin, and the end of all."""
    return np.arange(shards + 1, dtype=np.int64) * cells // shards


def routed(totals: Totals, shards: int) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield (shard, rows) of the cells with a record."""
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
        return np.asarray(numbers(column), np.int64)
    return np.asarray(numbers(column.flatten()), np.int64).reshape(-1, column.type.list_size)
