"""Noise on the totals of cells: its output is public, and everything else is made from it.

A draw's name is (run id, digest of the question, digest of the totals of all cells, aggregate,
part, number of the cell, node): any worker that has a cell's totals and the digest draws the same
noise for it, alone or among others.

**What is measured** are whole numbers: records, sums in units of the column's lattice, centred sums
and counts of coordinates, nodes of trees (``accounting.sessions.aggregates`` has their
sensitivity); with whole noise they stay whole, so that no float of an exact sum is ever seen.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from dpstream.accounting.arrays import Ids, Int64
from dpstream.accounting.errors import InvariantError
from dpstream.accounting.query.calibration import PartNoise
from dpstream.accounting.query.parts import cells_of, middle_of, tree_of
from dpstream.accounting.regions.space import Space
from dpstream.accounting.sessions.aggregates import Question, canonical
from dpstream.accounting.sessions.calibration import Measure, Measures, calibrated
from dpstream.dp_transforms.noise.inputs import InputDigest
from dpstream.dp_transforms.noise.oneshot import numbered
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.one_shot.answers import Noise
from dpstream.dp_transforms.session.totals import Totals

#: Noisy parts by aggregate: (cells,) int64 of each sum, (cells, nodes) of a tree.
Noisy = tuple[tuple[Int64, ...], ...]


def measured(
    space: Space,
    question: Question,
    boxes: Int64,
    totals: Totals,
    ring: KeyRing,
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
    noise = Noise(ring, (b"session", bytes.fromhex(run_id), name), inputs)
    cells = slice(first, first + len(totals.records))
    items = numbered(len(totals.records), first)
    return tuple(
        _measured(measures, totals, measures.of[cells], items, noise)
        for measures in calibrated(space, question, boxes)
    )


def inputs_of(totals: Totals, ring: KeyRing, first: int = 0) -> bytes:
    """Return the digest of cells' totals (`noise.inputs`); digests of shards add up by
    ``combined``.

    Args:
        totals: of the cells ``first``, ``first + 1`` and so on.
    """
    items = numbered(len(totals.records), first)
    digest = InputDigest(ring).add("records", items, totals.records)
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
