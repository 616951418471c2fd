"""Counts and sums of a union of disjoint boxes, from answers that were given before: free.

Both add up over parts that share no point, and whoever has the answers can add them: it is
post-processing of what was released.  Nothing is charged and no record is looked at.

**Which answers.**  A cell of an answer stands for the points that were read and are in it.  Cells
that lie within what is asked are taken as long as they share no point, in several orders (the
largest first, the least noise for its size first, those of one answer first), and an order that
fills all of it is used, the one with the least noise.  Of cells of the same points the one with the
least noise is looked at alone.  Finding a partition among many overlapping answers is a search
without end in general, so that one may exist that is not found.

**Error.**  Noise of different answers, and of different cells of one, is independent: squares of
the sds add up.  Half widths of 95% intervals are added as squares too: exact for Gaussian noise and
for a single answer, and too wide for several of geometric noise, whose sums have lighter tails than
each.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import PolicyError, UsageError, required
from dpstream.accounting.figures import human
from dpstream.accounting.regions.boxes import (
    BoxIndex,
    cut,
    overlapped,
    points,
    stacked,
    taken,
    without,
)
from dpstream.accounting.regions.conditions import nonempty
from dpstream.accounting.regions.space import Space
from dpstream.accounting.sessions.aggregates import PARTS, Aggregate, Cells
from dpstream.pipelines.formats.receipt import header_of, table_of
from dpstream.pipelines.render.layout import value_text
from dpstream.pipelines.session import sentences
from dpstream.pipelines.session.open_table import OpenTable
from dpstream.pipelines.sql.receipt import Header
from dpstream.state.ledger.events import RegionCharge

if TYPE_CHECKING:
    import pyarrow as pa

#: Answers whose cells are tried first, those that fill most of what is asked.
_ANSWERS = 16


class Part(NamedTuple):
    """A figure of some points.

    Attributes:
        boxes: (m, d, 2) the points; size: their number.
        value, sd, half: the figure, the sd of its noise, and half of its 95% interval.
        answered: when it was answered.
        run_id: the run id of the answer.
    """

    boxes: Int64
    size: int
    value: float
    sd: float
    half: float
    answered: str
    run_id: str


class Union(NamedTuple):
    """A figure that is combined from several answers.

    Attributes:
        value, sd, low, high: the figure, its sd, and the ends of its 95% interval.
        parts: number of cells.
        run_ids: the answers' run ids.
        first, last: when the oldest and the newest of them were given.
    """

    value: float
    sd: float
    low: float
    high: float
    parts: int
    run_ids: tuple[str, ...]
    first: str
    last: str

    @property
    def table(self) -> "pa.Table":
        """Return the figure as a table of one row."""
        import pyarrow as pa

        return pa.table({name: [getattr(self, name)] for name in ("value", "sd", "low", "high")})

    @property
    def text(self) -> str:
        """The figure in words."""
        half = (self.high - self.low) / 2
        dates = self.first if self.first == self.last else f"{self.first} to {self.last}"
        value = value_text(self.value)
        return f"{value} ±{human(half)}, of {self.parts:,} parts answered {dates}"


def assembled(open_table: OpenTable, boxes: Int64, figure: Aggregate) -> Union:
    """Return a count or sum of some boxes from the answers in the account.

    Args:
        boxes: (m, d, 2) disjoint.

    Raises:
        UsageError: the figure does not add up, or there is no box.
        PolicyError: the answers do not cover the boxes; the error names what they leave.
    """
    if figure.what not in ("count", "sum"):
        raise UsageError("union", "is for counts and sums", "ask the points themselves")
    figure.check(open_table.space)
    boxes = nonempty(without(boxes, open_table.space.without_budget))  # no question asks the rest
    parts = list(_parts(open_table, boxes, figure))
    if not parts:
        raise _uncovered(open_table.space, boxes, parts)
    parts = _least_noisy(parts)
    conflicts, wanted = _Conflicts(parts), points(boxes)
    covers = [
        cover for order in _orders(parts) if (cover := _disjoint(order, parts, conflicts, wanted))
    ]
    if not covers:
        raise _uncovered(open_table.space, boxes, parts)
    return joined(min(covers, key=lambda cover: sum(part.sd**2 for part in cover)))


def joined(parts: Sequence[Part]) -> Union:
    """Return the union of disjoint parts: their sum, and the sd of independent noise."""
    value = float(np.sum([part.value for part in parts]))
    sd, half = (
        float(np.sqrt(np.sum(np.square(errors))))
        for errors in ([p.sd for p in parts], [p.half for p in parts])
    )
    dates = sorted(part.answered for part in parts)
    run_ids = tuple(dict.fromkeys(part.run_id for part in parts))
    return Union(value, sd, value - half, value + half, len(parts), run_ids, dates[0], dates[-1])


def _parts(open_table: OpenTable, boxes: Int64, figure: Aggregate) -> Iterator[Part]:
    """Yield every cell of every answer to the same figure that lies within the boxes.

    Only answers that read one of the points are looked up.
    """
    for run_id, charge in open_table.account.history():
        if charge.budget == "closed":
            continue
        read = charge.read
        if not any(len(overlapped(read, box)) for box in boxes):
            continue
        committed = open_table.answers.read(run_id)
        header = None if committed is None else header_of(committed.receipt, Header)
        if committed is None or header is None or not header.points or header.points.name:
            continue
        if header.points.table != open_table.table.digest:  # of a space that was widened since
            continue
        names = [
            a.name
            for a in header.points.question.aggregates
            if (a.what, a.column) == (figure.what, figure.column)
        ]
        if names:
            table = table_of(committed.receipt)
            yield from _cells(open_table.space, boxes, header, table, charge, names[0])


def _cells(
    space: Space, boxes: Int64, header: Header, table: "pa.Table", charge: RegionCharge, name: str
) -> Iterator[Part]:
    question = required(header.points or None, "an answer of points").question
    columns = [table[name + part].to_numpy() for part in ("", *PARTS)]
    value, sd, low, high = (np.asarray(column, np.float64) for column in columns)
    half = np.maximum(high - value, value - low)
    around = np.stack([boxes[:, :, 0].min(axis=0), boxes[:, :, 1].max(axis=0)], 1)
    numbers, hulls = _hulls(space, question.cells, around)
    read = charge.read
    if len(read) == 1:  # as most answers are: all cells at once
        inner = cut(hulls, read[0])
        at = np.flatnonzero((inner[:, :, 0] < inner[:, :, 1]).all(axis=1))
        inside = [inner[k : k + 1] for k in at.tolist()]
        within = _in_one(taken(inner, at), boxes).tolist()
        numbers = numbers[at]
    else:
        inside = [_in(read, hull) for hull in hulls]
        within = [False] * len(inside)
    for number, cell, sure in zip(numbers.tolist(), inside, within, strict=True):
        size = points(cell)
        if size and (sure or sum(points(_in(cell, box)) for box in boxes) == size):
            yield Part(
                cell,
                size,
                float(value[number]),
                float(sd[number]),
                float(half[number]),
                header.answered,
                header.run_id,
            )


def _hulls(space: Space, cells: Cells, around: Int64) -> tuple[Int64, Int64]:
    """Return (k,) number and (k, d, 2) range of every cell that can lie within a box."""
    number, hulls = np.zeros(1, np.int64), space.everything[:1]
    for axis in cells.axes:
        place, edges = space.place(axis.name), np.asarray(axis.edges, np.int64)
        low, high = edges[:-1], edges[1:]
        near = np.flatnonzero((low < around[place, 1]) & (high > around[place, 0]))
        number = np.add.outer(number * axis.count, near).ravel()
        hulls = np.repeat(hulls, len(near), axis=0)
        hulls[:, place, 0] = np.tile(low[near], len(hulls) // max(len(near), 1))
        hulls[:, place, 1] = np.tile(high[near], len(hulls) // max(len(near), 1))
    return number, hulls


def _in(boxes: Int64, hull: Int64) -> Int64:
    return cut(taken(boxes, overlapped(boxes, hull)), hull)


def _in_one(cells: Int64, boxes: Int64) -> npt.NDArray[np.bool_]:
    """Return which cells lie within a single one of the boxes."""
    within = np.zeros(len(cells), np.bool_)
    for box in boxes:
        within |= ((cells[:, :, 0] >= box[:, 0]) & (cells[:, :, 1] <= box[:, 1])).all(axis=1)
    return within


def _least_noisy(parts: list[Part]) -> list[Part]:
    """Keep, of parts with the same points, the one with the least noise; sort by noise."""
    by_points = dict[bytes, Part]()
    for part in sorted(parts, key=lambda part: part.sd):
        by_points.setdefault(np.ascontiguousarray(part.boxes).tobytes(), part)
    return list(by_points.values())


def _orders(parts: list[Part]) -> Iterator[list[int]]:
    """Yield orders of the parts, which are sorted by noise: of equal ones, less noise first."""
    numbers = range(len(parts))
    by_size = sorted(numbers, key=lambda k: -parts[k].size)
    yield by_size
    yield sorted(numbers, key=lambda k: parts[k].sd ** 2 / parts[k].size)
    yield by_size[::-1]
    filled = dict[str, int]()
    for part in parts:
        filled[part.run_id] = filled.get(part.run_id, 0) + part.size
    for run_id in sorted(filled, key=lambda run_id: -filled[run_id])[:_ANSWERS]:
        yield sorted(by_size, key=lambda k: parts[k].run_id != run_id)


class _Conflicts:
    """An index of the parts that share a point with a part."""

    def __init__(self, parts: list[Part]) -> None:
        self._parts, self._of = parts, dict[int, Int64]()
        self._owner = np.repeat(np.arange(len(parts)), [len(part.boxes) for part in parts])
        self._index = BoxIndex(stacked([part.boxes for part in parts]))

    def of(self, number: int) -> Int64:
        """Return the numbers of the parts that share a point with a part, including itself."""
        if number not in self._of:
            met = [self._index.overlapped(box) for box in self._parts[number].boxes]
            self._of[number] = self._owner[np.concatenate(met)]
        return self._of[number]


def _disjoint(
    order: list[int], parts: list[Part], conflicts: _Conflicts, wanted: int
) -> list[Part]:
    """Return parts in their order that share no point, if they fill all points; else none."""
    chosen, filled, blocked = list[Part](), 0, np.zeros(len(parts), np.bool_)
    for number in order:
        part = parts[number]
        if not blocked[number] and filled + part.size <= wanted:
            blocked[conflicts.of(number)] = True
            chosen.append(part)
            filled += part.size
            if filled == wanted:
                return chosen
    return []


def _uncovered(space: Space, boxes: Int64, parts: list[Part]) -> PolicyError:
    covered = stacked([part.boxes for part in parts]) if parts else boxes[:0]
    left = sentences.boxes(space, without(boxes, covered), 3)
    detail = f"; nothing is known of: {'; '.join(left)}" if left else ""
    return PolicyError(
        "union",
        f"is not made of disjoint parts that were answered{detail}",
        "ask them first, or ask the points themselves",
    )
