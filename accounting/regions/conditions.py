"""Conditions on points, and the disjoint boxes where they are true.

A condition is represented by the points where it is TRUE.  Whoever reads a condition moves negation
into its comparisons, so that SQL's third value needs no representation.  A condition on consumption
is a function of what was spent, which is given when its boxes are computed: under the lock of the
charge.

A coordinate of an integer, a category or an initial budget stands for one value, so that every
comparison with a value is exact.  One of a real number or an instant stands for a whole step: only
``<`` and ``>=`` at a line of the grid divide records as they divide coordinates, and everything
else is refused, unless the value lies outside the dimension's range.
"""

import functools
import operator
import unicodedata
from collections.abc import Callable, Sequence
from fractions import Fraction
from math import ceil, floor
from typing import NamedTuple, Protocol

import numpy as np

from dpstream.accounting import limits
from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import InvariantError, UsageError, required
from dpstream.accounting.regions.amounts import MICRO
from dpstream.accounting.regions.boxes import club, cut, overlapped, stacked, taken, without
from dpstream.accounting.regions.space import (
    Budget,
    BudgetKind,
    Category,
    Dimension,
    Integer,
    Real,
    Space,
    Timestamp,
)
from dpstream.accounting.regions.spent import Spent

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

    def spent(self, kind: BudgetKind) -> Spent:
        """Return the spent budget of every point."""


class Within(NamedTuple):
    """The condition that the coordinate of a dimension is in some ranges."""

    place: int
    ranges: Ranges


class Level(NamedTuple):
    """The condition that a point's spent or remaining budget is in some ranges of millionths.

    What is left of its initial budget is never below 0.
    """

    kind: BudgetKind
    remaining: bool
    ranges: Ranges


class AllOf(NamedTuple):
    """The condition that all parts are true; without parts it is always true."""

    parts: tuple["Condition", ...]


class AnyOf(NamedTuple):
    """The condition that at least one part is true; without parts it is never true."""

    parts: tuple["Condition", ...]


Condition = Within | Level | AllOf | AnyOf


def kinds_in(condition: Condition) -> frozenset[BudgetKind]:
    """Return the kinds of budget whose consumption a condition depends on."""
    if isinstance(condition, Level):
        return frozenset({condition.kind})
    if isinstance(condition, Within):
        return frozenset()
    return frozenset[BudgetKind]().union(*map(kinds_in, condition.parts))


def canonical(condition: Condition) -> str:
    """Return a text that is the same for conditions which differ in the order of their parts."""
    match condition:
        case Within(place=place, ranges=ranges):
            return f"coordinate {place} in {_text(ranges)}"
        case Level(kind=kind, remaining=remaining, ranges=ranges):
            return f"{kind} {'left' if remaining else 'spent'} in {_text(ranges)}"
        case AllOf(parts=parts):
            return f"all of ({', '.join(sorted(map(canonical, parts)))})"
        case AnyOf(parts=parts):
            return f"any of ({', '.join(sorted(map(canonical, parts)))})"


def _text(ranges: Ranges) -> str:
    return " ".join(f"{low}:{high}" for low, high in ranges)


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
            sides = sorted((_boxes(part, space, views) for part in parts), key=_order)
            return functools.reduce(_met, sides, stacked([space.everything]))
        case AnyOf(parts=parts):
            parts = tuple(_merged(parts, met=False))
            sides = sorted((_boxes(part, space, views) for part in parts), key=_order)
            return functools.reduce(_either, sides, space.everything[:0])


def _order(boxes: Int64) -> tuple[int, bytes]:
    """Few boxes first; the order in which parts are written decides nothing."""
    return len(boxes), np.ascontiguousarray(boxes).tobytes()


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
    if not level.remaining:
        good = np.zeros(len(spent.amounts), np.bool_)
        for low, high in level.ranges:
            good |= (spent.amounts >= low) & (spent.amounts < high)
        return _at_most(MAX_PARTS, taken(spent.boxes, good))
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
    return _at_most(MAX_PARTS, stacked(parts))


def _met(one: Int64, other: Int64) -> Int64:
    """Return the disjoint boxes of the points that both have; each argument is disjoint."""
    small, large = sorted((one, other), key=len)
    _at_most(MAX_SIDE, small)
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
    _at_most(MAX_SIDE, small)
    return _at_most(MAX_PARTS, stacked([without(large, small), small]))


def _at_most(most: int, boxes: Int64) -> Int64:
    if len(boxes) > most:
        raise too_many()
    return boxes


def nonempty(boxes: Int64) -> Int64:
    """Return boxes after a check that there is one.

    Raises:
        UsageError: there is none.
    """
    if not len(boxes):
        raise UsageError("where", "is true nowhere", "name at least one point")
    return boxes


def too_many() -> UsageError:
    """Return the error for a condition that needs too many boxes."""
    return UsageError(
        "where",
        f"is made of more boxes than a query may have ({limits.MAX_QUERY_BOXES:,})",
        "ask for fewer, larger ranges at once, or in several queries",
    )


#: Each comparison, and what it is if it is not true (of a value that is there).
NEGATED = {"=": "<>", "<>": "=", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}
#: And with its sides exchanged.
TURNED = {"=": "=", "<>": "<>", "<": ">", ">": "<", "<=": ">=", ">=": "<="}
_ORDER: dict[str, Callable[[str, str], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
Value = Fraction | str | int


def true_at(dimension: Dimension, sign: str, value: Value) -> Ranges:
    """Return the coordinates for which ``column sign value`` is true, never that of missing values.

    Args:
        value: a number for integers, reals and budgets; microseconds for instants; a text for
            categories.

    Raises:
        UsageError: coordinates cannot decide the comparison, or the value has another type.
    """
    if isinstance(dimension, Category):
        return _of_codes(dimension, sign, str(value))
    if isinstance(value, str):
        raise InvariantError("only a category is compared with a text")
    # A cut that the comparison does not need is not looked for: it may not exist.
    below = _below(dimension, value) if sign not in {"<=", ">"} else 0
    within = _through(dimension, value) if sign not in {"<", ">="} else 0
    return cuts(sign, below, within, 0, dimension.values)


def cuts(sign: str, below: int, through: int, low: int, high: int) -> Ranges:
    """Return the whole numbers from low to before high that a comparison selects.

    Args:
        below: where the numbers that are less end.
        through: where the numbers that are less or equal end.
    """
    parts = {
        "<": ((low, below),),
        ">=": ((below, high),),
        "<=": ((low, through),),
        ">": ((through, high),),
        "=": ((below, through),),
        "<>": ((low, below), (through, high)),
    }[sign]
    return tuple(part for part in parts if part[0] < part[1])


def amounts_at(sign: str, value: Fraction) -> Ranges:
    """Return the amounts in millionths for which ``amount sign value`` is true."""
    micro = max(min(value * MICRO, Fraction(FAR)), Fraction(-FAR))
    return cuts(sign, ceil(micro), floor(micro) + 1, -FAR, FAR)


def _below(dimension: Dimension, value: Fraction | int) -> int:
    """The first coordinate at or above a value."""
    if isinstance(dimension, Budget):
        return _clipped(ceil(value * MICRO / dimension.step), dimension)
    return dimension.edge(value)


def _through(dimension: Dimension, value: Fraction | int) -> int:
    """The first coordinate above a value."""
    if isinstance(dimension, Budget):
        return _clipped(floor(value * MICRO / dimension.step) + 1, dimension)
    if isinstance(dimension, Integer):
        return dimension.edge(floor(value) + 1)
    if not isinstance(dimension, Real | Timestamp):
        raise InvariantError("the dimension is of numbers or instants")
    if isinstance(dimension, Timestamp) and dimension.step == 1:
        return dimension.edge(floor(value) + 1)
    low, high = (
        dimension.range[:2] if isinstance(dimension, Real) else (dimension.low, dimension.high)
    )
    if value < low:
        return 0
    if value >= high:
        return dimension.values
    raise UsageError(
        dimension.name,
        "can only be compared by < and >= there: its records are known by steps",
        "write column >= low AND column < high",
    )


def _clipped(at: int, dimension: Dimension) -> int:
    return min(max(at, 0), dimension.values)


def _of_codes(dimension: Category, sign: str, value: str) -> Ranges:
    """Compare texts by their bytes."""
    value = unicodedata.normalize("NFC", value)
    if sign in ("=", "<>"):
        at = dimension.edge(value)
        ranges: Ranges = ((at, at + 1),)
        return ranges if sign == "=" else apart(ranges, 0, dimension.values)
    true = _ORDER[sign]
    return tuple((at, at + 1) for at, code in enumerate(dimension.codes) if true(code, value))
