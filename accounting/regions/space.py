"""A space: its dimensions in order, one or two of them initial budgets.

**Dimensions** say how the values of a column become whole coordinates.  A dimension has ``values``
coordinates 0, 1, ..., one for each value (integers, categories) or for each step of a public grid
(reals, timestamps, initial budgets), all fixed before the first record.  Records keep their
coordinates from the day they are written, and queries are asked in coordinates: a query and the
account of what was spent then compare the same integers, so that no rounding can put a record into
a box that the query was not charged for.

What is null or outside of the range is, by the dimension's ``missing``, at a coordinate of its
own behind all others (``point``), or refused (``refuse``): the record is not usable, and its owner
learns so from the load.  An initial budget has no such choice: a record without one has 0, which
no query can use.
"""

import math
from abc import ABCMeta, abstractmethod
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from dpstream.accounting import limits
from dpstream.accounting.arrays import Bool, Int64
from dpstream.accounting.errors import UsageError, closest
from dpstream.accounting.regions.amounts import Number, charge_of, exact, initial_of, initials_of

#: Multiples of a real grid stay whole as floats.
_MOST_EXACT = 1 << 53
#: Bounds of integers and instants: differences stay far from 2^63.
_FAR = 1 << 61


class Coordinates(NamedTuple):
    """The coordinates of records in one dimension.

    Attributes:
        at: (n,) int64 in 0 .. size - 1; 0 where not usable.
        usable: (n,) bool, False for what the dimension refuses.
    """

    at: Int64
    usable: Bool


class _AbstractStruct(msgspec.StructMeta, ABCMeta):
    """The metaclass of a struct with abstract members."""


#: Of which initial budget a record has an amount.
BudgetKind = Literal["epsilon", "rho"]


class Dimension(msgspec.Struct, frozen=True, kw_only=True, metaclass=_AbstractStruct):
    """The interface of all dimensions.

    Attributes:
        name: the column's, public.
        grid: coordinates of one cell of the public grid that queries are snapped to.
        missing: what null and values outside of the range are.
    """

    name: str
    grid: int = 1
    missing: Literal["point", "refuse"] = "refuse"

    @property
    @abstractmethod
    def values(self) -> int:
        """The number of coordinates that stand for values."""

    @property
    def size(self) -> int:
        """All coordinates, that of missing values included."""
        return self.values + (self.missing == "point")

    def check(self) -> None:
        """Refuse a dimension without meaning.

        Raises:
            UsageError: its range is empty or too long, or its grid is no number of coordinates.
        """
        if not self.name:
            raise UsageError("dimension", "has no name", "name the column")
        if not 0 < self.values <= limits.MAX_COORDINATES:
            raise UsageError(
                self.name,
                f"must have 1 to {limits.MAX_COORDINATES:,} coordinates",
                "put low below high, or use a wider step",
            )
        if not 0 < self.grid <= self.size:
            raise UsageError(
                self.name, f"must have a grid of 1 to {self.size:,}", "use a cell in that range"
            )

    def coordinates(self, values: Any, null: Bool | None = None) -> Coordinates:
        """Return the coordinates of values.

        Args:
            values: (n,) array of the column.
            null: (n,) bool, which are null (beside NaN, NaT and None, which always are).

        Raises:
            UsageError: if the array's type cannot hold the column's values.
        """
        at, inside = self._coordinates_of(np.asarray(values))
        if null is not None:
            inside = inside & ~null
        there = np.int64(self.values if self.missing == "point" else 0)
        at = np.where(inside, at, there).astype(np.int64, copy=False)
        return Coordinates(at, np.ones_like(inside) if self.missing == "point" else inside)

    @abstractmethod
    def edge(self, value: Any) -> int:
        """Return the first coordinate at or above a value of a predicate, from 0 to ``values``.

        ``low <= x < high`` is the half-open range from ``edge(low)`` to ``edge(high)``.

        Raises:
            UsageError: if the value lies between two grid lines: records on its two sides have
                one coordinate; or if it is no value of the column.
        """

    @abstractmethod
    def _coordinates_of(self, values: Any) -> tuple[Int64, Bool]:
        """Coordinates, and which values have one."""

    def _clipped(self, steps: Fraction) -> int:
        """A number of steps as an edge."""
        if steps <= 0:
            return 0
        if steps >= self.values:
            return self.values
        if steps.denominator != 1:
            raise UsageError(
                self.name, "is cut between two lines of its grid", "use a multiple of its step"
            )
        return int(steps)

    def _wrong_type(self, wanted: str) -> UsageError:
        return UsageError(self.name, f"must be a column of {wanted}", f"convert it to {wanted}")


def _integers(values: Any, low: int, high: int) -> tuple[Int64, Bool]:
    """Whole numbers in [low, high) as int64 (low elsewhere), and which they are."""
    inside = (values >= low) & (values < high)
    if values.dtype.kind == "f":
        inside &= np.floor(values) == values
    safe = np.full(len(values), low, np.int64)
    safe[inside] = values[inside].astype(np.int64)
    return safe, inside


class Integer(Dimension, frozen=True, kw_only=True, tag="integer"):
    """Whole numbers from ``low`` to before ``high``, a coordinate each."""

    low: int
    high: int

    @property
    def values(self) -> int:
        """The number of values: high - low."""
        return self.high - self.low if max(abs(self.low), abs(self.high)) <= _FAR else 0

    def edge(self, value: Any) -> int:
        """Return the coordinate of a number, rounded up: x >= 2.5 is x >= 3."""
        above = exact(value, self.name).__ceil__()
        return self._clipped(Fraction(above - self.low))

    def _coordinates_of(self, values: Any) -> tuple[Int64, Bool]:
        if values.dtype.kind not in "iuf":
            raise self._wrong_type("whole numbers")
        safe, inside = _integers(values, self.low, self.high)
        return safe - self.low, inside


class Timestamp(Dimension, frozen=True, kw_only=True, tag="timestamp"):
    """Instants in microseconds from ``low`` to before ``high``, by steps."""

    low: int
    high: int
    step: int = limits.MICROS_PER_SECOND

    @property
    def values(self) -> int:
        """The number of steps; the last one may be shorter."""
        if max(abs(self.low), abs(self.high)) > _FAR or self.step < 1:
            return 0
        return -((self.low - self.high) // self.step)

    def edge(self, value: Any) -> int:
        """Return the first coordinate at or above a time in microseconds."""
        instant = exact(value, self.name)
        return (
            self.values if instant >= self.high else self._clipped((instant - self.low) / self.step)
        )

    def _coordinates_of(self, values: Any) -> tuple[Int64, Bool]:
        if values.dtype == np.dtype("datetime64[us]"):
            values = values.astype(np.int64)  # NaT is the least int64, which is outside
        if values.dtype.kind not in "iu":
            raise self._wrong_type("microseconds or datetime64[us]")
        safe, inside = _integers(values, self.low, self.high)
        return (safe - self.low) // self.step, inside


class Real(Dimension, frozen=True, kw_only=True, tag="real"):
    """Real numbers from ``low`` to before ``high``, by steps of a public grid.

    The three are read by `amounts.exact`, and ``high - low`` is a whole number of steps.  A line
    of the grid is the float nearest to its number, so that 0.3 is on the third line of step 0.1,
    wherever 0.3 / 0.1 falls.
    """

    low: float
    high: float
    step: float

    @property
    def values(self) -> int:
        """The number of steps from low to high."""
        if self.step <= 0:
            return 0
        low, high, step = self.range
        return int((high - low) / step)

    @property
    def range(self) -> tuple[Fraction, Fraction, Fraction]:
        """Low, high and step."""
        low, high, step = (exact(v, self.name, self.step) for v in (self.low, self.high, self.step))
        return low, high, step

    def check(self) -> None:
        """Check also that the grid ends at ``high`` and that floats distinguish its lines."""
        super().check()
        low, step, scale = self.lines()
        if low + step * self.values != self.range[1] * scale:
            raise UsageError(
                self.name, "must be a whole number of steps long", "move high to a multiple of step"
            )
        if max(abs(low), abs(low + step * self.values), scale) >= _MOST_EXACT or (
            np.spacing(max(abs(self.low), abs(self.high))) >= self.step / 2
        ):
            raise UsageError(
                self.name, "has a grid finer than floats are", "use fewer digits or a wider step"
            )

    def edge(self, value: Any) -> int:
        """Return the coordinate of a multiple of the step; below and above the range, its ends."""
        low, _, step = self.range
        return self._clipped((exact(value, self.name, self.step) - low) / step)

    def lines(self) -> tuple[int, int, int]:
        """Return (low, step, scale), whole numbers: line k is (low + k step) / scale."""
        low, _, step = self.range
        scale = math.lcm(low.denominator, step.denominator)
        return int(low * scale), int(step * scale), scale

    def _coordinates_of(self, values: Any) -> tuple[Int64, Bool]:
        if values.dtype.kind not in "iuf":
            raise self._wrong_type("numbers")
        value = values.astype(np.float64)
        inside = (value >= self.low) & (value < self.high)
        value = np.where(inside, value, self.low)
        low, step, scale = self.lines()
        at = np.floor((value - self.low) / self.step)
        at -= (low + at * step) / scale > value
        at += (low + (at + 1) * step) / scale <= value
        return at.astype(np.int64), inside


class Category(Dimension, frozen=True, kw_only=True, tag="category"):
    """One of a public list of texts, in its order."""

    codes: tuple[str, ...]

    @property
    def values(self) -> int:
        """The number of codes."""
        return len(self.codes)

    def check(self) -> None:
        """Check also that codes are distinct and that numpy's texts can hold them."""
        super().check()
        if len(set(self.codes)) < len(self.codes) or any("\0" in code for code in self.codes):
            raise UsageError(
                self.name, "must have codes that differ, without NUL", "list each code once"
            )

    def edge(self, value: Any) -> int:
        """Return the coordinate of a code: it alone is the range from there to the next."""
        if value not in self.codes:
            raise UsageError(self.name, "has no such code", closest(str(value), self.codes))
        return self.codes.index(value)

    def _coordinates_of(self, values: Any) -> tuple[Int64, Bool]:
        given = np.ones(len(values), np.bool_)
        if values.dtype.kind == "O":
            given = np.fromiter((isinstance(v, str) for v in values), np.bool_, len(values))
            values = np.where(given, values, "").astype(np.str_)
        if values.dtype.kind not in "UT":
            raise self._wrong_type("texts")
        codes = np.asarray(self.codes)
        order = np.argsort(codes, kind="stable")
        near = np.minimum(np.searchsorted(codes[order], values), len(codes) - 1)
        at = order[near]
        return at, given & (codes[at] == values)


class Budget(Dimension, frozen=True, kw_only=True, tag="budget"):
    """The initial budget of a record: 0 to ``most``, in steps of millionths, rounded down.

    Coordinate c stands for an initial budget of c x step; what a record has above that is not
    used.  A record without a budget (null, NaN, negative) is at 0 and not usable; one above
    ``most`` is there.
    """

    kind: BudgetKind = "epsilon"
    most: float | str
    step: int = 1

    @property
    def values(self) -> int:
        """The number of budgets 0, step, ..., most."""
        return initial_of(self.most, self.name) // self.step + 1 if self.step > 0 else 0

    def check(self) -> None:
        """Check also that there is no code point for missing budgets, which do not exist."""
        super().check()
        if self.missing != "refuse":
            raise UsageError(
                self.name, "cannot have a point for missing budgets", 'use missing = "refuse"'
            )

    def edge(self, value: Number) -> int:
        """Return the least initial budget that is not below a number."""
        if exact(value, self.name) <= 0:
            return 0
        return min(-(-charge_of(value, self.name) // self.step), self.values)

    def _coordinates_of(self, values: Any) -> tuple[Int64, Bool]:
        """Of budgets as numbers (1.5 is a million and a half millionths)."""
        if values.dtype.kind not in "iuf":
            raise self._wrong_type("numbers")
        micro, given = initials_of(values.astype(np.float64))
        return np.minimum(micro // self.step, self.values - 1), given


@dataclass(frozen=True)
class Space:
    """Every point that a record can be at; public, fixed before the first record.

    Attributes:
        dimensions: of different names; of each kind of budget at most one, and one at least.

    Raises:
        UsageError: for any other.
    """

    dimensions: tuple[Dimension, ...]

    def __post_init__(self) -> None:
        for dimension in self.dimensions:
            dimension.check()
        names = [dimension.name for dimension in self.dimensions]
        if len(set(names)) < len(names) or len(names) > limits.MAX_DIMENSIONS:
            raise UsageError(
                "dimensions",
                f"must be at most {limits.MAX_DIMENSIONS} of different names",
                "leave out those that no query selects by",
            )
        kinds = [d.kind for d in self.dimensions if isinstance(d, Budget)]
        if not kinds or len(set(kinds)) < len(kinds):
            raise UsageError(
                "dimensions",
                "must have one initial budget, or one of epsilon and one of rho",
                "declare the column of initial budgets",
            )

    @cached_property
    def sizes(self) -> Int64:
        """(d,) coordinates of each dimension."""
        return np.array([d.size for d in self.dimensions], np.int64)

    @cached_property
    def values(self) -> Int64:
        """(d,) coordinates that stand for values."""
        return np.array([d.values for d in self.dimensions], np.int64)

    @cached_property
    def grids(self) -> Int64:
        """(d,) coordinates of a cell of the public grid."""
        return np.array([d.grid for d in self.dimensions], np.int64)

    @cached_property
    def everything(self) -> Int64:
        """(1, d, 2) the box of everything."""
        return np.stack([np.zeros_like(self.sizes), self.sizes], axis=1)[None]

    @cached_property
    def without_budget(self) -> Int64:
        """The (1, d, 2) box of the points without an initial budget of any kind: nobody can read
        them.
        """
        box = self.everything.copy()
        for place, dimension in enumerate(self.dimensions):
            if isinstance(dimension, Budget):
                box[:, place, 1] = 1
        return box

    def place(self, name: str) -> int:
        """Return the number of a dimension.

        Raises:
            UsageError: if there is none of that name.
        """
        for place, dimension in enumerate(self.dimensions):
            if dimension.name == name:
                return place
        fix = closest(name, (dimension.name for dimension in self.dimensions))
        raise UsageError("dimension", f"no dimension {name!r} in the table", fix)

    def budget_place(self, kind: str) -> int:
        """Return the number of the initial budget of a kind.

        Raises:
            UsageError: if records have none of that kind.
        """
        for place, dimension in enumerate(self.dimensions):
            if isinstance(dimension, Budget) and dimension.kind == kind:
                return place
        kinds = " or ".join(d.kind for d in self.dimensions if isinstance(d, Budget))
        raise UsageError("budget", "is of a kind that records do not have", f"use {kinds}")

    def box(self, **ranges: tuple[Any, Any]) -> Int64:
        """Return (1, d, 2) the box low <= x < high in values, with all of each dimension not named.

        ``None`` for low or high is no bound; without both, missing values are in the box too.

        Raises:
            UsageError: see ``Dimension.edge``, and for a name that is no dimension.
        """
        box = self.everything.copy()
        for name, (low, high) in ranges.items():
            place = self.place(name)
            dimension = self.dimensions[place]
            if low is None and high is None:
                continue
            box[0, place] = (
                0 if low is None else dimension.edge(low),
                dimension.values if high is None else dimension.edge(high),
            )
        return box

    def coordinates(self, columns: dict[str, Any]) -> tuple[Int64, Bool]:
        """Return (n, d) coordinates of records and (n,) whether each is usable.

        Raises:
            UsageError: if a dimension has no column, or one of the wrong type.
        """
        absent = [d.name for d in self.dimensions if d.name not in columns]
        if absent:
            raise UsageError(absent[0], "has no column", "give the table a column of that name")
        parts = [d.coordinates(columns[d.name]) for d in self.dimensions]
        usable = np.logical_and.reduce([part.usable for part in parts])
        return np.stack([part.at for part in parts], axis=1), usable
