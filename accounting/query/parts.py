"""Parts of a query's columns: the integer sums behind them, and what one unit adds to a group.

| kind | parts | a unit's partial in a group |
| --- | --- | --- |
| ``units`` | count | 1 |
| ``count`` | count | its rows, at most r; or its count within the bounds |
| ``count``, distinct | distinct | a table of at most m rows of (group, value), see below |
| ``sum`` | sum | sum of at most r clamped rows; or its sum, clamped |
| ``mean`` | sum, count | sum of (x - middle) over at most r rows, and how many; or its average |
| ``var``, ``stddev`` | sum, square, count | the same, and sum of (x - middle)^2 - centre |
| ``quantiles`` | tree | a table of at most r rows of (group, unit, value) |

x is a whole number of grid units within the bounds (lo, hi), middle = floor((lo + hi) / 2) and
h = max(hi - middle, middle - lo), so that a centred sum moves by h a row, not by max(|lo|, |hi|).
A square lies in [0, h^2] and is taken from its own middle, centre = floor(h^2 / 2).

**Absent partials.**  A unit may be in a group without a value of a column (its values are NULL).
Its partial is then absent and adds 0 to every part: not the bound that is nearest to 0, and
neither (0 - middle) nor (0 - centre).  A partial of bounds (lo, hi) per group is therefore 0 or in
[lo, hi], and the range that stage 2 holds it within is [min(lo, 0), max(hi, 0)]: 0 is in the range
of every part, so that no bounds can turn an absent partial into a value.  Stage 1, which knows what
is absent, clamps the others to [lo, hi].

**Sensitivity.**  One unit more or less changes the sums of a part in at most n <= kappa groups, in
each by its partial there: by at most L = max(|low|, |high|), which is max(|lo|, |hi|) for bounds
per group, also where both have one sign, because the partial comes or goes as a whole and does not
move within [lo, hi] (r sqrt(levels) for a tree in L2, r levels in L1).  So the whole vector moves
by at most sqrt(n) L in L2 and n L in L1.  With a norm R it moves by at most
min(sqrt(n) L, R') in L2, R' = R times what one row adds, and by at most min(n L, sqrt(n) R') in L1
(Cauchy and Schwarz: at most n entries are not 0).  The unit's vectors of all parts of a column are
multiplied by one factor f <= 1 with f |counts| <= R (|sums| for a sum), then rounded towards 0,
which makes no entry larger; and |sum of (x - middle)| <= h count entry by entry, so that the sums'
norm is at most h R.  Scaled entries are whole numbers of a finer lattice, 2^-refine.

**Distinct values.**  The figure of a group is the number of different values that the units' tables
have there: the size of a union of sets.  A unit's set is a function of its own rows (``bounded``),
so that those of others stay as they are when it comes or goes.  The union then changes by values of
its own set alone, by 0 to m of them, in at most n <= kappa groups: L = m.  A value that the tables
leave out everywhere is not counted, so that the figure without noise is at most the true number.

**The tree** that all quantiles of a column come from.  A column's range on the grid is cut into at
most ``LEAVES`` cells (powers of two).  A group's histogram x over the cells is noised as A x + z, A
the 0/1 matrix of a binary tree over the cells (``accounting.tuning.question.encoder_matrix``), z
one Gaussian (or geometric) for each node.  One value is in one node of each level, so that r values
of a unit move A x by at most r sqrt(levels) in L2 (|A v| is convex in v >= 0 with sum r: largest
with all r in one cell; so it is r times the root of the levels, and not the root of r levels) and r
levels in L1.  The estimate of the histogram is least squares: the pseudo-inverse of A, the same for
all groups and all columns of as many cells.

Binary was measured against wider trees: sd of a prefix less its target at 256 cells, in units of
r / mu: 2 children 3.0, 4 children 3.1, 8 children 3.4, 16 children 3.9.
"""

import functools
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.query.plan import QueryColumn, QueryPlan
from dpstream.accounting.tuning.question import encoder_matrix

#: Most cells of a range: quantiles are exact to 1/256 of it, and straight within a cell.
LEAVES = 256


class Tree(NamedTuple):
    """A binary tree over so many cells, read-only.

    Attributes:
        matrix: (nodes, cells) A; levels: nodes that a cell is in.
        prefixes: (cells, nodes) least squares of the histogram's prefixes.
        factor: (cells, cells) covariance of the prefixes for node noise of sd 1.
    """

    matrix: Int64
    levels: int
    prefixes: Float64
    factor: Float64


class Windows(NamedTuple):
    """Means of ``size`` neighbouring prefixes, from each cell on and before each cell.

    Attributes:
        means: two (cells, cells) matrices over prefixes; a prefix before the first is 0, and those
            behind the last are the last.
        variances: two (cells,), of the means; totals: two (cells,), covariances with the last
            prefix; all for node noise of sd 1.
    """

    means: tuple[Float64, Float64]
    variances: tuple[Float64, Float64]
    totals: tuple[Float64, Float64]


@functools.lru_cache(maxsize=16)
def windows_of(cells: int, size: int) -> Windows:
    """Return the windows of a tree's prefixes."""
    factor = tree_of(cells).factor
    start, offset = np.divmod(np.arange(cells * size), size)
    ahead, behind = np.zeros((cells, cells)), np.zeros((cells, cells))
    np.add.at(ahead, (start, np.minimum(start + offset, cells - 1)), 1 / size)
    there = start - 1 - offset >= 0
    np.add.at(behind, (start[there], (start - 1 - offset)[there]), 1 / size)
    both = ahead, behind
    variances = [((w @ factor) * w).sum(axis=1) for w in both]
    totals = [w @ factor[:, -1] for w in both]
    for part in (*both, *variances, *totals):
        part.setflags(write=False)
    return Windows(both, (variances[0], variances[1]), (totals[0], totals[1]))


@functools.lru_cache(maxsize=16)
def tree_of(cells: int) -> Tree:
    """Return the tree over ``cells`` cells."""
    matrix = encoder_matrix(cells)
    sums = np.tril(np.ones((cells, cells)))
    prefixes = sums @ np.linalg.pinv(matrix.astype(np.float64))
    factor = prefixes @ prefixes.T
    prefixes.setflags(write=False)
    factor.setflags(write=False)
    return Tree(matrix, int(matrix.sum(axis=0).max()), prefixes, factor)


def cells_of(column: QueryColumn) -> int:
    """Return the number of cells of a column's range: a power of two, at most ``LEAVES``."""
    lo, hi = column.grid_bounds()
    return int(min(LEAVES, 1 << (hi - lo).bit_length()))


def levels_of(column: QueryColumn) -> int:
    """Return the number of levels of its tree, without making it."""
    return cells_of(column).bit_length()


def rank_factor(column: QueryColumn) -> float:
    """Return the largest sd of a prefix less half of the total, for node noise of sd 1."""
    factor = tree_of(cells_of(column)).factor
    variance = factor.diagonal() - factor[:, -1] + factor[-1, -1] / 4
    return float(np.sqrt(variance.max()))


def cell_at(column: QueryColumn, values: Int64) -> Int64:
    """Return (n,) cell of values in grid units, which are clamped."""
    lo, hi = column.grid_bounds()
    return np.asarray((np.clip(values, lo, hi) - lo) * cells_of(column) // _width(column))


def value_at(column: QueryColumn, position: Float64) -> Float64:
    """Return values at positions in cells (2.5: the middle of the third), on the grid and in
    bounds.
    """
    lo, hi = column.grid_bounds()
    steps = np.floor(position * (_width(column) / cells_of(column)))
    return np.asarray(np.clip(lo + steps, lo, hi) * column.grid)


def _width(column: QueryColumn) -> int:
    """Grid values that the cells share: where there are fewer, each has a cell of its own."""
    lo, hi = column.grid_bounds()
    return max(hi - lo + 1, cells_of(column))


What = Literal["count", "sum", "square", "tree", "distinct"]
#: Lattice bits of scaled vectors whose grid is coarser than 2^-16 of the bounds.
_REFINED = 16
#: Relative error allowed for a root and a product.
_SLACK = 1e-12
#: How a column's budget is divided.  A quotient's error is that of its sum and (offset / h) of its
#: count's, so the sum gets more.
_DIVIDED: dict[str, tuple[tuple[What, float], ...]] = {
    "units": (("count", 1.0),),
    "count": (("count", 1.0),),
    "sum": (("sum", 1.0),),
    "mean": (("sum", 2 / 3), ("count", 1 / 3)),
    "var": (("sum", 0.3), ("square", 0.5), ("count", 0.2)),
    "stddev": (("sum", 0.3), ("square", 0.5), ("count", 0.2)),
    "quantiles": (("tree", 1.0),),
    "distinct": (("distinct", 1.0),),
}


class QueryPart(msgspec.Struct, frozen=True):
    """One sum (or tree of sums) per group.

    Attributes:
        column: name of its column, empty for a count that only thresholds need.
        what: see the module.
        low, high: of a partial, in grid units, low <= 0 <= high; a partial outside is clamped.
        nodes: levels of a tree, 1 for a sum.
        norm: R' in grid units, ``None`` where groups are sampled.
        refine: partials are whole numbers of 2^-refine grid units once they are scaled.
        share: part of the columns' budget; all shares add up to 1.
    """

    column: str
    what: What
    low: int
    high: int
    nodes: int
    norm: float | None
    refine: int
    share: float

    @property
    def most(self) -> int:
        """L: the most that one partial is, in grid units, without its nodes."""
        return max(abs(self.low), abs(self.high))

    @property
    def unit(self) -> int:
        """Lattice points of a grid unit."""
        return 1 << self.refine

    def l2_squared(self, groups: int) -> float:
        """Return the largest squared L2 effect of a unit in ``groups`` groups, in grid units."""
        square = float(groups * self.most**2)
        if self.norm is not None:
            square = min(square, self.norm**2)
        return square * self.nodes

    def l1(self, groups: int) -> float:
        """Return the largest L1 effect of a unit in ``groups`` groups, in grid units, rounded
        up.
        """
        most = float(groups * self.most)
        if self.norm is not None:
            most = min(most, math.sqrt(groups) * self.norm * (1 + _SLACK))
        return most * self.nodes

    @property
    def alone(self) -> float:
        """The most that one unit adds to one group's sum, in lattice units."""
        most = float(self.most)
        return (most if self.norm is None else min(most, self.norm)) * self.unit


def parts_of(plan: QueryPlan) -> tuple[QueryPart, ...]:
    """Return the parts of all columns, in their order; automatic bounds must have been filled
    in.
    """
    total = math.fsum(column.share for column in plan.columns)
    columns = plan.columns
    return tuple(part for c in columns for part in _parts(plan, c, c.share / total))


def parts_by_column(plan: QueryPlan, parts: Sequence[QueryPart]) -> dict[str, list[int]]:
    """Return the numbers of each column's parts."""
    return {
        column.name: [index for index, part in enumerate(parts) if part.column == column.name]
        for column in plan.columns
    }


def middle_of(column: QueryColumn) -> int:
    """Return the number that is subtracted from each value of a mean or a variance, in grid
    units.
    """
    lo, hi = column.grid_bounds()
    return (lo + hi) // 2


def half_of(column: QueryColumn) -> int:
    """Return h: the largest magnitude of a centred value, in grid units."""
    lo, hi = column.grid_bounds()
    return max(hi - middle_of(column), middle_of(column) - lo)


def centre_of(column: QueryColumn) -> int:
    """Return the number that is subtracted from each square, in squared grid units."""
    return half_of(column) ** 2 // 2


def _parts(plan: QueryPlan, column: QueryColumn, share: float) -> list[QueryPart]:
    norm, parts = plan.norm_of(column), []
    for what, weight in _DIVIDED["distinct" if column.distinct else column.kind]:
        low, high, row = _range(column, what)
        nodes = levels_of(column) if what == "tree" else 1
        most = max(abs(low), abs(high))
        refine = 0 if norm is None or most >= 1 << _REFINED else _REFINED
        scaled = None if norm is None else norm * row
        parts.append(QueryPart(column.name, what, low, high, nodes, scaled, refine, share * weight))
    return parts


def _range(column: QueryColumn, what: What) -> tuple[int, int, float]:
    """Bounds of a partial, and what one row (for a sum: one unit of value) adds at most."""
    rows = column.most_rows
    if what == "sum" and column.kind == "sum":
        lo, hi = column.grid_bounds()
        if column.per == "group":
            return min(lo, 0), max(hi, 0), 1 / column.grid
        return min(lo, 0) * rows, max(hi, 0) * rows, 1 / column.grid
    if what == "sum":
        lo, hi = column.grid_bounds()
        middle = middle_of(column)
        return (lo - middle) * rows, (hi - middle) * rows, half_of(column)
    if what == "square":
        centre, square = centre_of(column), half_of(column) ** 2
        return -centre * rows, (square - centre) * rows, max(centre, square - centre)
    if column.kind == "units":
        return 0, 1, 1
    if column.kind == "count" and column.per == "group":
        return 0, column.grid_bounds()[1], 1
    return 0, rows, 1
