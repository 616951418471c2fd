"""The answer of a question: noise on the totals of its cells, and the released table.

**Measured** totals are public, and everything else is made from them alone.  A draw's name is (run
id, digest of the question, digest of the totals of all cells, aggregate, part, number of the cell,
node): any worker that has a cell's totals and the digest draws the same noise for it, alone or
among others.  What is measured are whole numbers: records, sums in units of the column's lattice,
centred sums and counts of coordinates, nodes of trees (``accounting.sessions.aggregates`` has their
sensitivity); with whole noise they stay whole, so that no float of an exact sum is ever seen.

**A question is drawn in its canonical form** (``Question.canonical``), which has no label and no
order of figures and axes that the question chose; whoever shows the answer gives it those.

**The released table** is post-processing of the noisy sums.  It has a row for each cell, in their
order: the cell's range along each axis, and of each aggregate its value, the sd of its noise, and
both ends of a 95% interval (null where noise leaves no records to speak of).  Estimates are made of
all cells at once, wherever their noise was drawn, so that they are the same bytes.  An interval is
that of the records which were read, at the grid's precision: a real value counts as the line of the
grid below it.
"""

import hashlib
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pyarrow as pa

from dpstream.accounting.arrays import Float64, Ids, Int64
from dpstream.accounting.errors import instance, required
from dpstream.accounting.query.calibration import PartNoise, half_width
from dpstream.accounting.query.parts import cells_of, middle_of, tree_of
from dpstream.accounting.regions.amounts import MICRO
from dpstream.accounting.regions.space import (
    Budget,
    Category,
    Dimension,
    Integer,
    Real,
    Space,
    Timestamp,
)
from dpstream.accounting.sessions.aggregates import PARTS, Axis, Cells, Line, Question, canonical
from dpstream.accounting.sessions.calibration import Measure, Measures, calibrated, expected
from dpstream.dp_transforms.noise.inputs import InputDigest
from dpstream.dp_transforms.noise.oneshot import numbered
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.one_shot.answers import Noise
from dpstream.dp_transforms.one_shot.estimates import Estimate, direct, mean, read_off
from dpstream.dp_transforms.session.totals import Noisy, Totals
from dpstream.state.arrow import to_bytes

#: Trees that are read off together: their prefixes stay in a few MiB.
_AT_ONCE = 1_024


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
        _measured(measures, totals, measures.range_numbers[cells], items, noise)
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
    for name, column in sorted(totals.columns.items()):
        digest.add(f"column {name}", items, column.records, column.total)
    for name, leaves in sorted(totals.leaves.items()):
        digest.add(f"leaves {name}", items, leaves)
    return digest.value


def _measured(
    measures: Measures, totals: Totals, range_numbers: Int64, items: Ids, noise: Noise
) -> tuple[Int64, ...]:
    """Of one aggregate: cells of one range together."""
    sums: list[Int64] = []
    for number, measure in enumerate(measures.each):
        at = np.flatnonzero(range_numbers == number)
        exact = _exact(measure, totals, at)
        if not sums:
            sums = [np.zeros((len(range_numbers), *part.shape[1:]), np.int64) for part in exact]
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
    aggregate, line = measure.aggregate, measure.line
    if line is None:
        return [totals.records[at]]
    if aggregate.what == "quantiles":
        leaves = totals.leaves[aggregate.column][at]
        return [np.asarray(leaves @ tree_of(cells_of(measure.column)).matrix.T, np.int64)]
    records, total = (part[at] for part in totals.columns[aggregate.column])
    if aggregate.what == "sum":
        return [line.first * records + line.by * total]
    return [total - middle_of(measure.column) * records, records]


def answered(
    space: Space, question: Question, boxes: Int64, totals: Totals, ring: KeyRing, run_id: str
) -> pa.Table:
    """Return the answer to a question that was charged: draw the noise, then make the table.

    Args:
        boxes: (m, d, 2) that were read, those of the charge.
        totals: of all cells.
        run_id: of the charge, as hexadecimal digits.
    """
    noisy = measured(space, question, boxes, totals, ring, run_id, inputs_of(totals, ring))
    return released(space, question, boxes, noisy)


def encoded(table: pa.Table) -> bytes:
    """Return the bytes of an answer: one batch as an Arrow IPC stream."""
    return to_bytes(table.combine_chunks().to_batches()[0])


def released(space: Space, question: Question, boxes: Int64, noisy: Noisy) -> pa.Table:
    """Return the table of noisy sums, those of all cells."""
    columns = labels(space, question.cells)
    for measures, sums in zip(calibrated(space, question, boxes), noisy, strict=True):
        estimate = estimated(measures, sums)
        for place, name in enumerate(measures.aggregate.outputs):
            for end, part in zip(("", *PARTS), estimate, strict=True):
                figure = part if part.ndim == 1 else part[:, place]
                columns[name + end] = pa.array(figure, from_pandas=True)
    return pa.table(columns)


def errors(space: Space, question: Question, boxes: Int64) -> pa.Table:
    """Return the errors that `released` would show, before anything is charged or read.

    A row for each cell, with its ranges, and of each aggregate ``name_sd`` and ``name_within``, the
    half-width of the interval, in the unit of ``accounting.sessions.calibration.Expected.what``.
    """
    columns = {"cell": pa.array(np.arange(question.cells.count))}
    columns |= labels(space, question.cells)
    for figure in expected(space, question, boxes):
        columns[f"{figure.name}_sd"], columns[f"{figure.name}_within"] = (
            pa.array(figure.sd),
            pa.array(figure.within),
        )
    return pa.table(columns)


def estimated(measures: Measures, sums: tuple[Int64, ...]) -> Estimate:
    """Return an aggregate of every cell: (cells,), or (cells, quantiles)."""
    out: Estimate | None = None
    for number, measure in enumerate(measures.each):
        at = np.flatnonzero(measures.range_numbers == number)
        estimate = _estimate(measure, [part[at] for part in sums])
        if out is None:
            shape = (len(measures.range_numbers), *estimate.value.shape[1:])
            out = Estimate(*(np.zeros(shape) for _ in estimate))
        for into, part in zip(out, estimate, strict=True):
            into[at] = part
    return required(out, "a batch has cells")


def _estimate(measure: Measure, noisy: list[Int64]) -> Estimate:
    column, noises, line = measure.column, list(measure.noises), measure.line
    width = half_width(noises[0].law)
    if line is None:
        return direct(column, noises[0], noisy[0])
    if measure.aggregate.what == "sum":
        return Estimate(*(_times(x, line.unit) for x in direct(column, noises[0], noisy[0])))
    if measure.aggregate.what == "average":
        return _in_values(line, measure.bounds, mean(column, noises, noisy, width))
    tree, parts = tree_of(cells_of(column)), list[Estimate]()
    for begin in range(0, len(noisy[0]), _AT_ONCE):
        prefixes = noisy[0][begin : begin + _AT_ONCE] @ tree.prefixes.T
        parts.append(read_off(column, prefixes, noises[0].sd, width))
    return _in_values(
        line, measure.bounds, Estimate(*map(np.concatenate, zip(*parts, strict=True)))
    )


def _in_values(line: Line, bounds: tuple[int, int], estimate: Estimate) -> Estimate:
    """An estimate of coordinates, in the values of the column and within its range."""
    low, high = bounds

    def value(at: Float64) -> Float64:
        return _times(line.first + line.by * np.clip(at, low, high - 1), line.unit)

    return Estimate(
        value(estimate.value),
        _times(line.by * estimate.sd, line.unit),
        value(estimate.low),
        value(estimate.high),
    )


def _times(value: Float64, unit: Fraction) -> Float64:
    """A product that is rounded once where the unit is a whole part: 3 tenths are 0.3."""
    return np.asarray(value * unit.numerator / unit.denominator)


def labels(space: Space, cells: Cells) -> dict[str, pa.Array]:
    """Return the range of each cell along each axis, in values: ``name`` and ``name_end``,
    half-open.

    Codes and whole numbers that have a range each need no end.  Missing values are null.
    """
    columns, before, after = dict[str, pa.Array](), 1, cells.count
    for axis in cells.axes:
        after //= axis.count
        at = pa.array(np.tile(np.repeat(np.arange(axis.count), after), before))
        for name, values in _ends(space.dimensions[space.place(axis.name)], axis).items():
            columns[name] = values.take(at)
        before *= axis.count
    return columns


def _ends(dimension: Dimension, axis: Axis) -> dict[str, pa.Array]:
    """(ranges,) values at which ranges begin and end."""
    low, high = list(axis.edges[:-1]), list(axis.edges[1:])
    single = isinstance(dimension, Category) or (
        isinstance(dimension, Integer) and all(b == a + 1 for a, b in zip(low, high, strict=True))
    )
    ends = {axis.name: _values(dimension, low, low)}
    if not single:
        ends[f"{axis.name}_end"] = _values(dimension, high, low)
    return ends


def _values(dimension: Dimension, at: list[int], begin: list[int]) -> pa.Array:
    """Values of edges; null where the range is that of missing values."""
    missing = [edge >= dimension.values for edge in begin]

    def array(values: list[object], kind: pa.DataType) -> pa.Array:
        pairs = zip(values, missing, strict=True)
        return pa.array([None if none else value for value, none in pairs], kind)

    if isinstance(dimension, Category):
        codes = (*dimension.codes, None)
        return array([codes[min(edge, len(codes) - 1)] for edge in at], pa.string())
    if isinstance(dimension, Timestamp):
        instants = [min(dimension.low + edge * dimension.step, dimension.high) for edge in at]
        return array(list(instants), pa.timestamp("us", "UTC"))
    if isinstance(dimension, Budget):
        return array([edge * dimension.step / MICRO for edge in at], pa.float64())
    if isinstance(dimension, Integer):
        return array([dimension.low + edge for edge in at], pa.int64())
    low, _, step = instance(dimension, Real).range
    return array([float(low + step * edge) for edge in at], pa.float64())
