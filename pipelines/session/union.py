"""Counts and sums of a union of disjoint boxes, from answers that were given before: free.

Both add up over parts that share no point, and whoever has the answers can add them: it is
post-processing of what was released.  Nothing is charged and no record is looked at.

**Which answers.**  A cell of an answer stands for the points that were read and are in it.  Cells
that lie within what is asked are taken as long as they share no point, in several orders (the
largest first, the least noise for its size first), and an order that fills all of it is used, the
one with the least noise.  Finding a partition among many overlapping answers is a search without
end in general, so that one may exist that is not found.

**Error.**  Noise of different answers, and of different cells of one, is independent: squares of
the sds add up.  Half widths of 95% intervals are added as squares too: exact for Gaussian noise and
for a single answer, and too wide for several of Laplace noise, whose sums have lighter tails than
each.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.regions.boxes import cut, overlapped, points, stacked, taken, without
from dpstream.accounting.regions.space import Space
from dpstream.accounting.sessions.aggregates import PARTS, Aggregate
from dpstream.accounting.sessions.cells import Cells
from dpstream.pipelines.session import words
from dpstream.pipelines.session.desk import Desk
from dpstream.pipelines.session.receipt import Answer, decoded, ticket_name
from dpstream.state.ledger.region_charge import RegionCharge


class Part(NamedTuple):
    """A figure of some points.

    Attributes:
        boxes: (m, d, 2) the points; size: how many they are.
        value, sd, half: the figure, and half of its 95% interval.
        answered: when; run_id: of which answer.
    """

    boxes: Int64
    size: int
    value: float
    sd: float
    half: float
    answered: str
    run_id: str


class Union(NamedTuple):
    """A figure that was put together.

    Attributes:
        value, sd, low, high: with the ends of a 95% interval.
        parts: how many cells; run_ids: of which answers.
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
    def table(self) -> pa.Table:
        """As a row."""
        return pa.table({name: [getattr(self, name)] for name in ("value", "sd", "low", "high")})


def assembled(desk: Desk, boxes: Int64, figure: Aggregate) -> Union:
    """A count or sum of some boxes from the answers in the ledger.

    Args:
        boxes: (m, d, 2) disjoint.

    Raises:
        UsageError: the figure does not add up, or there is no box.
        PolicyError: the answers do not cover the boxes; says what they leave.
    """
    if figure.what not in ("count", "sum"):
        raise UsageError("union", "is for counts and sums", "ask the points themselves")
    figure.check(desk.space)
    if not len(boxes):
        raise UsageError("where", "is true nowhere", "name at least one point")
    parts = list(_parts(desk, boxes, figure))
    if not parts:
        raise _uncovered(desk.space, boxes, parts)
    wanted = points(boxes)
    covers = [found for order in _orders(parts) if (found := _disjoint(order, wanted))]
    if not covers:
        raise _uncovered(desk.space, boxes, parts)
    best = min(covers, key=lambda some: sum(part.sd**2 for part in some))
    return _together(best)


def _together(parts: Sequence[Part]) -> Union:
    value = float(np.sum([part.value for part in parts]))
    sd, half = (float(np.sqrt(np.sum(np.square(of))))
                for of in ([p.sd for p in parts], [p.half for p in parts]))  # fmt: skip
    dates = sorted(part.answered for part in parts)
    run_ids = tuple(dict.fromkeys(part.run_id for part in parts))
    return Union(value, sd, value - half, value + half, len(parts), run_ids, dates[0], dates[-1])


def _parts(desk: Desk, boxes: Int64, figure: Aggregate) -> Iterator[Part]:
    """Every cell of every answer to the same figure that lies within the boxes.

    Only answers that read one of their points are looked up.
    """
    for run_id, charge in desk.account.history():
        if charge.budget == "closed":
            continue
        read = charge.read
        if not any(len(overlapped(read, box)) for box in boxes):
            continue
        committed = desk.register.read(run_id)
        if committed is None or ticket_name(committed.receipt) is not None:
            continue
        answer = decoded(committed, desk.insecure)
        names = [
            a.name for a in answer.header.question.aggregates
            if (a.what, a.column) == (figure.what, figure.column)
        ]  # fmt: skip
        if names:
            yield from _cells(desk.space, boxes, answer, charge, names[0])


def _cells(
    space: Space, boxes: Int64, answer: Answer, charge: RegionCharge, name: str
) -> Iterator[Part]:
    columns = [answer.table[name + part].to_numpy() for part in ("", *PARTS)]
    value, sd, low, high = (np.asarray(column, np.float64) for column in columns)
    half = np.maximum(high - value, value - low)
    read, around = (
        charge.read,
        np.stack([boxes[:, :, 0].min(axis=0), boxes[:, :, 1].max(axis=0)], 1),
    )
    for number, hull in _hulls(space, answer.header.question.cells, around):
        inside = _in(read, hull)
        size = points(inside)
        if size and _within(inside, boxes, size):
            yield Part(inside, size, float(value[number]), float(sd[number]), float(half[number]),
                       answer.header.answered, answer.header.run_id)  # fmt: skip


def _hulls(space: Space, cells: Cells, around: Int64) -> Iterator[tuple[int, Int64]]:
    """Number and (d, 2) range of every cell that can lie within a box."""
    places = [space.place(axis.name) for axis in cells.axes]
    ranges = [
        [(number, side) for number, side in enumerate(itertools.pairwise(axis.edges))
         if around[place, 0] < side[1] and side[0] < around[place, 1]]
        for axis, place in zip(cells.axes, places, strict=True)
    ]  # fmt: skip
    for chosen in itertools.product(*ranges):
        hull, at = space.whole[0].copy(), 0
        for axis, place, (number, side) in zip(cells.axes, places, chosen, strict=True):
            hull[place], at = side, at * axis.count + number
        yield at, hull


def _in(boxes: Int64, hull: Int64) -> Int64:
    return cut(taken(boxes, overlapped(boxes, hull)), hull)


def _within(some: Int64, boxes: Int64, size: int) -> bool:
    """Whether all points of some boxes, so many, are in others."""
    return sum(points(_in(some, box)) for box in boxes) == size


def _orders(parts: list[Part]) -> Iterator[list[Part]]:
    """Ways to go through the parts; of equal points the one with the least noise comes first."""
    by_sd = sorted(parts, key=lambda part: part.sd)
    yield sorted(by_sd, key=lambda part: -part.size)
    yield sorted(by_sd, key=lambda part: part.sd**2 / part.size)
    yield sorted(by_sd, key=lambda part: part.size)
    for run_id in dict.fromkeys(part.run_id for part in parts):
        yield sorted(by_sd, key=lambda part: (part.run_id != run_id, -part.size))


def _disjoint(order: list[Part], wanted: int) -> list[Part]:
    """Parts in their order that share no point, if they fill so many; else none."""
    chosen, filled, used = list[Part](), 0, 0
    held = stacked([part.boxes for part in order])
    for part in order:
        fits = filled + part.size <= wanted
        if fits and not any(len(overlapped(held[:used], box)) for box in part.boxes):
            held[used : used + len(part.boxes)] = part.boxes
            chosen.append(part)
            used += len(part.boxes)
            filled += part.size
    return chosen if filled == wanted else []


def _uncovered(space: Space, boxes: Int64, parts: list[Part]) -> PolicyError:
    found = stacked([part.boxes for part in parts]) if parts else boxes[:0]
    left = words.boxes(space, without(boxes, found), 3)
    said = f"; nothing is known of: {'; '.join(left)}" if left else ""
    return PolicyError(
        "union", f"is not made of disjoint parts that were answered{said}",
        "ask them first, or ask the points themselves",
    )  # fmt: skip
