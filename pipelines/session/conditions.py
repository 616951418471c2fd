"""Conditions on points, and the disjoint boxes where they are true.

A condition is represented by the points where it is TRUE: negation is moved into comparisons before
(`predicates`), so that SQL's third value needs no representation.  A condition on consumption is a
function of what was spent, which is given when its boxes are computed: under the lock of the
charge.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import numpy as np

from dpstream.accounting import limits
from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import UsageError, required
from dpstream.accounting.regions.boxes import club, cut, overlapped, stacked, taken, without
from dpstream.accounting.regions.space import Space
from dpstream.accounting.regions.spent import Spent

Kind = Literal["epsilon", "rho"]
#: Whole numbers from low to before high; together in order, with gaps between them.
Ranges = tuple[tuple[int, int], ...]
#: Boxes of a condition on the way to its answer, and the most that one of two sides may have where
#: they are compared with each other.
MAX_PARTS, MAX_SIDE = 1 << 17, limits.MAX_QUERY_BOXES
#: Beyond every amount.
FAR = 1 << 62


class Views(Protocol):
    """Views of what was spent, which resolve conditions on consumption
    (`state.ledger.regions.Views`).
    """

    def spent(self, kind: Kind) -> Spent:
        """Return what every point has spent."""


class Within(NamedTuple):
    """The coordinate of a dimension is in some ranges."""

    place: int
    ranges: Ranges


class Level(NamedTuple):
    """What a point has spent, or has left of its initial budget and never below 0, is in some
    ranges of millionths."""

    kind: Kind
    left: bool
    ranges: Ranges


class AllOf(NamedTuple):
    """All parts are true; without parts the condition is always true."""

    parts: tuple["Condition", ...]


class AnyOf(NamedTuple):
    """At least one part is true; without parts the condition is never true."""

    parts: tuple["Condition", ...]


Condition = Within | Level | AllOf | AnyOf


def kinds_in(condition: Condition) -> frozenset[Kind]:
    """Return the kinds of budget whose consumption a condition depends on."""
    if isinstance(condition, Level):
        return frozenset({condition.kind})
    if isinstance(condition, Within):
        return frozenset()
    return frozenset[Kind]().union(*map(kinds_in, condition.parts))


def boxes_where(condition: Condition, space: Space, views: Views | None) -> Int64:
    """Return (m, d, 2) the points where a condition is true, as disjoint, merged boxes.

    Raises:
        UsageError: the condition has too many parts.
    """
    boxes = _boxes(condition, space, views)
    return club(boxes, np.zeros(len(boxes), np.int64))[0] if len(boxes) > 1 else boxes


def _boxes(condition: Condition, space: Space, views: Views | None) -> Int64:
    match condition:
        case Within(place=place, ranges=ranges):
            return _ranged(space, place, ranges)
        case Level():
            views = required(views, "consumption needs what was spent")
            return _levelled(condition, views.spent(condition.kind))
        case AllOf(parts=parts):
            parts = tuple(_merged(parts, met=True))
            sides = [_boxes(part, space, views) for part in parts]
            boxes = stacked([space.everything])
            for side in sorted(sides, key=len):
                boxes = _met(boxes, side)
            return boxes
        case AnyOf(parts=parts):
            sides = [_boxes(part, space, views) for part in _merged(parts, met=False)]
            boxes = space.everything[:0]
            for side in sorted(sides, key=len):
                boxes = _either(boxes, side)
            return boxes


def _merged(parts: Sequence[Condition], met: bool) -> list[Condition]:
    """Combine comparisons of one dimension into one condition."""
    within: dict[int, list[Ranges]] = {}
    others = list[Condition]()
    for part in parts:
        if isinstance(part, Within):
            within.setdefault(part.place, []).append(part.ranges)
        else:
            others.append(part)
    merge = shared if met else joined
    return [*(Within(place, merge(ranges)) for place, ranges in within.items()), *others]


def joined(range_lists: Sequence[Ranges]) -> Ranges:
    """Return the numbers that are in at least one of several ranges."""
    merged = list[tuple[int, int]]()
    for low, high in sorted(part for ranges in range_lists for part in ranges if part[0] < part[1]):
        if merged and low <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], high)
        else:
            merged.append((low, high))
    return tuple(merged)


def apart(ranges: Ranges, low: int, high: int) -> Ranges:
    """Return the numbers from low to before high that are in none of the ranges."""
    gaps, at = list[tuple[int, int]](), low
    for begin, end in joined([ranges]):
        gaps.append((at, min(begin, high)))
        at = max(at, end)
    return tuple(part for part in [*gaps, (at, high)] if part[0] < part[1])


def shared(range_lists: Sequence[Ranges]) -> Ranges:
    """Return the numbers that are in all of several ranges."""
    outside = [apart(ranges, -FAR, FAR) for ranges in range_lists]
    return apart(joined(outside), -FAR, FAR)


def _ranged(space: Space, place: int, ranges: Ranges) -> Int64:
    size = int(space.sizes[place])
    inside = [(max(low, 0), min(high, size)) for low, high in joined([ranges])]
    inside = [part for part in inside if part[0] < part[1]]
    boxes = np.repeat(space.everything, len(inside), axis=0)
    if inside:
        boxes[:, place] = inside
    return stacked([boxes])


def _levelled(level: Level, spent: Spent) -> Int64:
    """Return regions by what they spent; for the remaining budget, cut by initial budgets."""
    if not level.left:
        good = np.zeros(len(spent.amounts), np.bool_)
        for low, high in level.ranges:
            good |= (spent.amounts >= low) & (spent.amounts < high)
        return _few(taken(spent.boxes, good))
    parts = [spent.boxes[:0]]
    for low, high in level.ranges:
        if high <= 0:
            continue  # nothing is left below 0
        boxes = stacked([spent.boxes])
        edges = boxes[:, spent.place]
        if low > 0:  # what is overdrawn has 0 left
            edges[:, 0] = np.maximum(edges[:, 0], -(-(spent.amounts + low) // spent.step))
        edges[:, 1] = np.minimum(edges[:, 1], -(-(spent.amounts + high) // spent.step))
        boxes[:, spent.place] = edges
        parts.append(taken(boxes, edges[:, 0] < edges[:, 1]))
    return _few(stacked(parts))


def _met(one: Int64, other: Int64) -> Int64:
    """Return the disjoint boxes of the points that both have; each argument is disjoint."""
    small, large = sorted((one, other), key=len)
    _side(small)
    parts, count = [large[:0]], 0
    for box in small:
        parts.append(cut(taken(large, overlapped(large, box)), box))
        count += len(parts[-1])
        if count > MAX_PARTS:
            raise too_many()
    return stacked(parts)


def _either(one: Int64, other: Int64) -> Int64:
    """Return the disjoint boxes of the points that either has."""
    small, large = sorted((one, other), key=len)
    if not len(small):
        return large
    _side(small)
    return _few(stacked([without(large, small), small]))


def _few(boxes: Int64) -> Int64:
    if len(boxes) > MAX_PARTS:
        raise too_many()
    return boxes


def _side(boxes: Int64) -> None:
    if len(boxes) > MAX_SIDE:
        raise too_many()


def too_many() -> UsageError:
    """Return the error for a condition that needs too many boxes."""
    return UsageError(
        "where",
        f"is made of more boxes than a query may have ({limits.MAX_QUERY_BOXES:,})",
        "ask for fewer, larger ranges at once, or in several queries",
    )
