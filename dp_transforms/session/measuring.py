"""Noise on the totals of cells: what comes out is public, and all else is made from it.

A draw's name is (run id, digest of the question, digest of the totals of all cells, aggregate,
part, number of the cell, node): any worker that has a cell's totals and the digest draws the same
noise for it, alone or among others.

**What is measured** are whole numbers: records, sums in units of the column's lattice, centred sums
and counts of coordinates, nodes of trees (``accounting.sessions.aggregates`` has their
sensitivity); with whole noise they stay whole, so that no float of an exact sum is ever seen.

**Batches** carry exact sums to the shard of their cells, and noisy ones to the release.  A shard is
a run of cells, which ``shards_of`` divides.  Exact sums are PRIVATE: rows (cell, records, of each
column records and total, of each tree its leaves), only of cells with a record.  Measured
sums are public: a row for each cell of the shard.  Both are integers, so that the order of arrival
has no effect.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from dpstream.accounting.arrays import Ids, Int64
from dpstream.accounting.errors import InvariantError
from dpstream.accounting.query.calibration import PartNoise
from dpstream.accounting.query.parts import middle_of
from dpstream.accounting.query.tree import cells_of, tree_of
from dpstream.accounting.regions.space import Space
from dpstream.accounting.sessions.aggregates import Needs, Question, canonical
from dpstream.accounting.sessions.calibration import Measure, Measures, calibrated
from dpstream.dp_transforms.batches import numbers, split_by_shard
from dpstream.dp_transforms.noise.inputs import InputDigest
from dpstream.dp_transforms.noise.oneshot import numbered
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.one_shot.answers import Noise
from dpstream.dp_transforms.session.totals import Totals, nothing

#: Noisy parts by aggregate: (cells,) int64 of each sum, (cells, nodes) of a tree.
Noisy = tuple[tuple[Int64, ...], ...]


def measured(
    space: Space,
    question: Question,
    boxes: Int64,
    totals: Totals,
    keys: KeyRing,
    run_id: str,
    inputs: bytes,
    first: int = 0,
) -> Noisy:
    """Draw the noise of a question's cells, or of those of a shard.

    Args:
        boxes: (m, d, 2) that were read, those of the charge.
        totals: of the cells ``first``, ``first + 1`` and so on.
        run_id: of the charge; inputs: digest of the totals of all cells (`inputs_of`).
    """
    name = hashlib.blake2b(canonical(question, boxes), digest_size=16).digest()
    noise = Noise(keys, (b"session", bytes.fromhex(run_id), name), inputs)
    cells = slice(first, first + len(totals.records))
    items = numbered(len(totals.records), first)
    return tuple(
        _measured(measures, totals, measures.of[cells], items, noise)
        for measures in calibrated(space, question, boxes)
    )


def inputs_of(totals: Totals, keys: KeyRing, first: int = 0) -> bytes:
    """Digest of the totals of cells (`noise.inputs`); those of shards add up by its ``combined``.

    Args:
        totals: of the cells ``first``, ``first + 1`` and so on.
    """
    items = numbered(len(totals.records), first)
    digest = InputDigest(keys).add("records", items, totals.records)
    for name, of in sorted(totals.columns.items()):
        digest.add(f"column {name}", items, of.records, of.total)
    for name, leaves in sorted(totals.leaves.items()):
        digest.add(f"leaves {name}", items, leaves)
    return digest.value


def _measured(
    measures: Measures, totals: Totals, of: Int64, items: Ids, noise: Noise
) -> tuple[Int64, ...]:
    """Of one aggregate: cells of one range together."""
    sums: list[Int64] = []
    for number, measure in enumerate(measures.each):
        at = np.flatnonzero(of == number)
        exact = _exact(measure, totals, at)
        if not sums:
            sums = [np.zeros((len(of), *part.shape[1:]), np.int64) for part in exact]
        for into, part, drawn in zip(sums, exact, measure.noises, strict=True):
            into[at] = part + _drawn(noise, drawn, items[at], part.shape)
    return tuple(sums)


def _drawn(noise: Noise, part: PartNoise, items: Ids, shape: Sequence[int]) -> Int64:
    """Noise of a sum of each cell, or of each node of its tree."""
    if len(shape) == 2:
        nodes = shape[1]
        items = np.repeat(items, nodes, axis=0)
        items[:, 1] ^= np.tile(np.arange(nodes, dtype=np.uint64) << np.uint64(40), shape[0])
    return noise.part(part, items).reshape(shape)


def _exact(measure: Measure, totals: Totals, at: Int64) -> list[Int64]:
    """The exact sums of some cells; private."""
    aggregate = measure.aggregate
    if aggregate.what == "count":
        return [totals.records[at]]
    if aggregate.what == "quantiles":
        leaves = totals.leaves[aggregate.column][at]
        return [np.asarray(leaves @ tree_of(cells_of(measure.column)).matrix.T, np.int64)]
    if measure.line is None:
        raise InvariantError("measure.line is not None")
    records, total = (part[at] for part in totals.columns[aggregate.column])
    if aggregate.what == "sum":
        return [measure.line.first * records + measure.line.by * total]
    return [total - middle_of(measure.column) * records, records]


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
    for name, of in totals.columns.items():
        columns[f"records {name}"] = _array(of.records[cell])
        columns[f"total {name}"] = _array(of.total[cell])
    for name, leaves in totals.leaves.items():
        columns[f"leaves {name}"] = _array(leaves[cell])
    return pa.RecordBatch.from_pydict(columns)


def gathered(batches: Iterable[pa.RecordBatch], first: int, last: int, needs: Needs) -> Totals:
    """Return the totals of cells ``first`` to before ``last``, from the rows of all workers."""
    totals = nothing(last - first, needs)
    for batch in batches:
        at = _numbers(batch, "cell") - first
        totals.records[at] += _numbers(batch, "records")  # a cell is in a batch once
        for name, of in totals.columns.items():
            of.records[at] += _numbers(batch, f"records {name}")
            of.total[at] += _numbers(batch, f"total {name}")
        for name, leaves in totals.leaves.items():
            leaves[at] += _numbers(batch, f"leaves {name}")
    return totals


def packed(noisy: Noisy) -> pa.RecordBatch:
    """Return measured sums as columns, in their order; public."""
    parts = [part for of in noisy for part in of]
    names = [f"{number}" for number in range(len(parts))]
    return pa.RecordBatch.from_arrays([_array(part) for part in parts], names)


def joined(shards: Iterable[tuple[int, pa.RecordBatch]], parts: Sequence[int]) -> Noisy:
    """Measured sums of all cells, from all shards in any order.

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
