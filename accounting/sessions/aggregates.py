"""A question of a session: its cells, its aggregates of their records, and one record's effect.

**Cells** are the public partition of what a batch asks, a row of the answer for each: ranges
between public edges along some dimensions, and all of them together with one another.  They share
no point, so that a record is in one cell at most: a batch of however many cells costs a point one
charge, and one record changes one cell's sums.

| aggregate | integer sums per cell |
| --- | --- |
| ``count`` | records |
| ``sum`` | of the column's values, as whole numbers of a lattice |
| ``average`` | of coordinates less their middle, and how many have a value |
| ``quantiles`` (``median``) | nodes of a binary tree over the column's range |

**Sensitivity.**  Neighbours differ in one record at one point.  Cells are disjoint and a query
reads each box once, so that the record is in one cell or in none, and changes its sums alone.
[low, high) is the range of the column in that cell, fixed by the query's boxes, not by data; a
record in the cell has its coordinate in it or is at the point of missing values, where it adds
nothing to a sum, an average or a tree.  So it moves

    a count by 1;
    a sum by at most max(|value(low)|, |value(high - 1)|), values being monotone in coordinates;
    a centred sum by at most h = max(high - 1 - middle, middle - low), its count by 1;
    a tree by 1 in one node of each level: by its levels in L1, by their square root in L2.

A record that changes is one removed and one added, each at a point of its own, which pay each.
A narrower range of the column has less noise: restricting the query to where values matter is how
outliers are handled, never bounds that nobody sees.

**Columns as numbers.**  Whole coordinates are values on a lattice, so that sums are whole numbers.
A real value counts as the line of its grid at or below it: that is what its coordinate says.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from dpstream.accounting import figures, limits
from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import UsageError, instance
from dpstream.accounting.query.parts import LEAVES, cells_of
from dpstream.accounting.query.plan import MAX_QUANTILES, QueryColumn
from dpstream.accounting.regions.amounts import check_amount
from dpstream.accounting.regions.boxes import cut, overlapped, taken
from dpstream.accounting.regions.space import BudgetKind, Category, Dimension, Integer, Real, Space


class Axis(msgspec.Struct, frozen=True):
    """Ranges along one dimension.

    Attributes:
        name: the dimension's.
        edges: coordinates, rising; range i is ``edges[i] <= x < edges[i + 1]``.
    """

    name: str
    edges: tuple[int, ...]

    @property
    def count(self) -> int:
        """The number of ranges."""
        return len(self.edges) - 1


class Cells(msgspec.Struct, frozen=True):
    """The cells of a batch: of no axes there is one, all that is asked.

    Cell number n of axes of k1, k2, .. ranges is (.. (i1 k2 + i2) k3 ..), i the ranges it is in:
    the order of the answer's rows.

    Attributes:
        axes: of different dimensions.
    """

    axes: tuple[Axis, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of ranges along each axis."""
        return tuple(axis.count for axis in self.axes)

    @property
    def count(self) -> int:
        """The number of cells."""
        product = 1
        for axis in self.axes:
            product *= axis.count
        return product

    def check(self, space: Space) -> None:
        """Refuse what is no partition.

        Raises:
            UsageError: an axis is no dimension or there twice, its edges do not rise or leave the
                dimension, or there are too many cells.
        """
        names = [axis.name for axis in self.axes]
        if len(set(names)) < len(names):
            raise UsageError("cells", "must be along different dimensions", "name each once")
        for axis in self.axes:
            _check_axis(axis, space.dimensions[space.place(axis.name)])
        if self.count > limits.MAX_CELLS:
            raise UsageError(
                "cells", f"must be at most {limits.MAX_CELLS:,}", "use fewer or wider ranges"
            )

    def inside(self, space: Space, boxes: Int64) -> Int64:
        """Return (k, d, 2) the parts of boxes that are in a cell: what the batch reads and pays
        for.
        """
        hull = space.everything[0].copy()
        for axis in self.axes:
            hull[space.place(axis.name)] = axis.edges[0], axis.edges[-1]
        return cut(taken(boxes, overlapped(boxes, hull)), hull)

    def ranges(self, space: Space, boxes: Int64, name: str) -> "Ranges":
        """Return the coordinates of a column in which the values of each cell are.

        Args:
            boxes: (m, d, 2) that the query reads, one or more; name: a dimension's.
        """
        place = space.place(name)
        values = space.dimensions[place].values
        low = int(boxes[:, place, 0].min(initial=values)) if len(boxes) else 0
        high = int(boxes[:, place, 1].max(initial=0)) if len(boxes) else values
        bounds = np.array([[low, high]], np.int64)
        which = np.zeros(self.count, np.int64)
        for number, axis in enumerate(self.axes):
            if axis.name == name:
                edges = np.clip(np.array(axis.edges, np.int64), low, high)
                bounds = np.stack([edges[:-1], edges[1:]], axis=1)
                after = int(np.prod(self.shape[number + 1 :], dtype=np.int64))
                which = np.arange(self.count) // after % axis.count
        # The point of missing values is no value; a cell without any has a range all the same.
        bounds = np.minimum(bounds, values)
        bounds[:, 0] = np.minimum(bounds[:, 0], values - 1)
        bounds[:, 1] = np.maximum(bounds[:, 1], bounds[:, 0] + 1)
        distinct, range_numbers = np.unique(bounds, axis=0, return_inverse=True)
        return Ranges(distinct, range_numbers.reshape(-1)[which])


def _check_axis(axis: Axis, dimension: Dimension) -> None:
    edges = np.array(axis.edges, np.int64)
    widths = np.diff(edges)
    for wrong, rule, fix in (
        (len(edges) < 2 or (widths < 1).any(), "must have 2 edges or more that rise", "sort them"),
        (
            len(edges) and (edges[0] < 0 or edges[-1] > dimension.size),
            "reaches out of its dimension",
            "stay within its range",
        ),
        (
            len(edges) > 1 and edges[-2] < dimension.values < edges[-1],
            "has missing values and others in one cell",
            "give missing values a cell of their own",
        ),
        (
            isinstance(dimension, Category) and (widths > 1).any(),
            "has more than one code in a cell",
            "give each code its own cell",
        ),
    ):
        if wrong:
            raise UsageError(f"cells.{axis.name}", rule, fix)


class Ranges(NamedTuple):
    """Ranges of one column in the cells of a batch.

    Attributes:
        bounds: (k, 2) int64, different ones: (low, high) coordinates, half-open, not empty.
        range_numbers: (cells,) int64, the row of ``bounds`` that each cell has.
    """

    bounds: Int64
    range_numbers: Int64


def along(space: Space, name: str, edges: Sequence[Any] | None = None) -> Axis:
    """Return an axis from edges in values (``Dimension.edge``); the last one is excluded.

    Without edges: every value has a range, that of missing values too if there is one.  A
    category's ranges are single codes, so that it has no edges.

    Raises:
        UsageError: an edge is no value, or between two lines of the grid.
    """
    dimension = space.dimensions[space.place(name)]
    if edges is None:
        if dimension.size > limits.MAX_CELLS:
            raise UsageError(f"cells.{name}", "has too many values for a cell each", "give edges")
        return Axis(name, tuple(range(dimension.size + 1)))
    if isinstance(dimension, Category):
        raise UsageError(f"cells.{name}", "has codes, which have no order", "leave out the edges")
    return Axis(name, tuple(dimension.edge(value) for value in edges))


class Line(NamedTuple):
    """Values of a column: coordinate c has the value unit (first + by c).

    Attributes:
        unit: of the lattice that sums are whole numbers of.
        first, by: whole numbers without a common divisor.
    """

    unit: Fraction
    first: int
    by: int

    def at(self, coordinate: int) -> int:
        """Return the value of a coordinate, in units."""
        return self.first + self.by * coordinate

    @property
    def low(self) -> float:
        """The value of coordinate 0."""
        return float(self.unit * self.first)

    @property
    def step(self) -> float:
        """The distance of two neighbouring coordinates' values."""
        return float(self.unit * self.by)


def line_of(dimension: Dimension) -> Line:
    """Return a dimension's coordinates as numbers; a real value counts as the grid line below it.

    Raises:
        UsageError: they are too many to be summed.
    """
    if isinstance(dimension, Integer):
        first, by, scale = dimension.low, 1, 1
    else:
        first, by, scale = instance(dimension, Real).lines()
    common = math.gcd(first, by)
    line = Line(Fraction(common, scale), first // common, by // common)
    most = max(abs(line.at(0)), abs(line.at(dimension.values - 1)), dimension.values)
    if most > limits.MAX_GRID_VALUE or dimension.values > limits.MAX_SUMMED:
        raise UsageError(
            dimension.name, "has too many steps to be summed", "declare it with a wider step"
        )
    return line


What = Literal["count", "sum", "average", "quantiles"]
#: What stands behind a figure's name for its sd and the ends of its interval.
PARTS = ("_sd", "_low", "_high")


#: Begins the labels of canonical figures: no dimension has such a name.
_MARK = "\x1f"


class Aggregate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One figure of each cell; see the module.

    Attributes:
        what: is asked; column: of which dimension, empty for a count.
        at: the quantiles, each in [0, 1].
        share: weight in the division of the query's amount over its aggregates.
        label: its name in the answer, by default what is asked and the column.
    """

    what: What
    column: str = ""
    at: tuple[float, ...] = ()
    share: float = 1.0
    label: str = ""

    @property
    def name(self) -> str:
        """Name of its column in the answer."""
        return self.label or "_".join(filter(None, (self.what, self.column)))

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of its figures in the answer.

        Quantiles have one name each, unless there is only one and it has a label.
        """
        if self.what != "quantiles" or (self.label and len(self.at) == 1):
            return (self.name,)
        return tuple(f"{self.name}_{figures.exact(q)}" for q in self.at)

    @property
    def bare(self) -> "Aggregate":
        """The same figure without its label, and with its quantiles in order."""
        return msgspec.structs.replace(self, at=tuple(sorted(self.at)), label="")

    def check(self, space: Space) -> None:
        """Refuse an aggregate without meaning.

        Raises:
            UsageError: see above; the column is no whole or real number, or has too many values.
        """
        if not 0 < self.share < 1e9:
            raise UsageError("aggregate.share", "must be a positive number", "write e.g. 1.0")
        if (self.what == "count") == bool(self.column):
            raise UsageError(
                "aggregate.column", "is for all but a count", "name the column, or ask a count"
            )
        if self.what == "quantiles":
            fine = all(0 <= q <= 1 for q in self.at) and len(set(self.at)) == len(self.at)
            if not fine or not 1 <= len(self.at) <= MAX_QUANTILES:
                raise UsageError(
                    "aggregate.at",
                    f"must be 1 to {MAX_QUANTILES} different numbers from 0 to 1",
                    "write e.g. 0.5",
                )
        elif self.at:
            raise UsageError("aggregate.at", "is for quantiles only", "omit it")
        if self.column:
            dimension = space.dimensions[space.place(self.column)]
            if not isinstance(dimension, Integer | Real):
                numbers = [d.name for d in space.dimensions if isinstance(d, Integer | Real)]
                fix = f"use a column of whole or real numbers: {', '.join(numbers) or 'none'}"
                raise UsageError(dimension.name, "cannot be aggregated", fix)
            line_of(dimension)


COUNT = Aggregate("count")


class Leaves(NamedTuple):
    """The leaves of a column's tree: coordinate c is in leaf (c - low) * size // width.

    Attributes:
        column: a dimension's name.
        low, high: half-open range of the coordinates that have a leaf; no other is in the boxes.
        width: coordinates that the leaves share, at least ``size``.
        size: how many leaves.
    """

    column: str
    low: int
    high: int
    width: int
    size: int


class Needs(NamedTuple):
    """The figures that a scan must compute for each cell, beside the number of records.

    Attributes:
        columns: the columns whose coordinates are summed.
        leaves: the trees whose histograms of leaves are needed.
    """

    columns: tuple[str, ...]
    leaves: tuple[Leaves, ...]


class Question(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A query without its boxes; public.

    Attributes:
        kind: of the budget it pays with; amount: in millionths.
        aggregates: what is asked of each cell; cells: the partition, one cell by default.
    """

    kind: BudgetKind
    amount: int
    aggregates: tuple[Aggregate, ...] = (COUNT,)
    cells: Cells = Cells()

    @property
    def canonical(self) -> "Question":
        """The question without its presentation: labels, the order of figures, of quantiles and of
        axes, and repeated figures.

        Its answer is drawn and stored.
        """
        figures = sorted({a.bare for a in self.aggregates}, key=msgspec.json.encode)
        named = (
            msgspec.structs.replace(figure, label=f"{_MARK}{rank}")
            for rank, figure in enumerate(figures)
        )
        axes = sorted(self.cells.axes, key=lambda axis: axis.name)
        return msgspec.structs.replace(self, aggregates=tuple(named), cells=Cells(tuple(axes)))

    def check(self, space: Space) -> None:
        """Refuse what has no meaning.

        Raises:
            UsageError: see `Aggregate.check`, `Cells.check` and ``amounts.check_amount``.
        """
        space.budget_place(self.kind)
        check_amount(self.amount)
        for aggregate in self.aggregates:
            aggregate.check(space)
        self.cells.check(space)
        trees = [
            space.dimensions[space.place(aggregate.column)].values
            for aggregate in self.aggregates
            if aggregate.what == "quantiles"
        ]
        if self.cells.count * sum(min(LEAVES, 2 * size) for size in trees) > limits.MAX_LEAVES:
            raise UsageError(
                "cells", "are too many for a tree of quantiles in each", "use fewer or wider ranges"
            )
        names = [f"{axis.name}{end}" for axis in self.cells.axes for end in ("", "_end")]
        for aggregate in self.aggregates:
            names += [f"{n}{part}" for n in aggregate.outputs for part in ("", *PARTS)]
        several = 1 <= len(self.aggregates) <= limits.MAX_AGGREGATES
        # Noise is named by the aggregate's name: two trees of one name would have the same.
        named = {aggregate.name for aggregate in self.aggregates}
        if not several or len(set(names)) < len(names) or len(named) < len(self.aggregates):
            raise UsageError(
                "aggregates",
                f"must be 1 to {limits.MAX_AGGREGATES} that have names of their own",
                "ask for fewer at once, put quantiles of a column together, or give one a label",
            )

    def needs(self, space: Space, boxes: Int64) -> Needs:
        """Return the figures that a scan of the boxes must compute."""
        columns = [a.column for a in self.aggregates if a.what in ("sum", "average")]
        trees = dict.fromkeys(a.column for a in self.aggregates if a.what == "quantiles")
        return Needs(
            tuple(dict.fromkeys(columns)),
            tuple(leaves_of(space, boxes, column) for column in trees),
        )


def leaves_of(space: Space, boxes: Int64, column: str) -> Leaves:
    """Return the leaves of a column's tree: over its range in all boxes, for any cells."""
    low, high = Cells().ranges(space, boxes, column).bounds[0].tolist()
    size = cells_of(tree_column("", low, high, (0.5,)))
    return Leaves(column, low, high, max(high - low, size), size)


def tree_column(name: str, low: int, high: int, at: Sequence[float]) -> QueryColumn:
    """Return a column of quantiles of coordinates in [low, high)."""
    last = max(high - 1, low + 1)  # a range of one coordinate has a second one, of nobody
    return QueryColumn(name, "quantiles", low, last, rows=1, at=tuple(at))


def canonical(question: Question, boxes: Any) -> bytes:
    """Return the text of a canonical question, which never changes and names its noise with the
    run id.
    """
    aggregates = [
        [a.what, a.column, [float(q) for q in a.at], float(a.share), a.name]
        for a in question.aggregates
    ]
    axes = [[axis.name, list(axis.edges)] for axis in question.cells.axes]
    lines = ["dpstream session question/1", question.kind, question.amount, aggregates, axes]
    return msgspec.json.encode([*lines, boxes.tolist()])
