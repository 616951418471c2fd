"""Calibration of a question's amount to the noise of every cell: exact, in whole millionths.

A cell's amount a is divided over the aggregates by their shares, and of an average over its two
sums as SQL's AVG is (``accounting.query.parts``): part j has a_j, sum a_j = a exactly.

**Epsilon.**  Two-sided geometric noise of scale >= L_j / a_j, L_j in L1: a shift of the part by L_j
costs L_j / scale <= a_j, and the parts of a cell add up to a at most.
**Rho.**  Rounded Gaussian noise of sd >= D_j / sqrt(2 a_j), D_j in L2: rounding is post-processing
of a Gaussian, which is D_j^2 / (2 sd^2) <= a_j zCDP (mu^2 / 2 of Gaussian DP).

Both are compared as fractions, and the float is the next one above where it is not: nothing that
is charged in integers is spent in floats.  There is no delta in either.

One record is in one cell (``aggregates``), so that a is also what the whole batch costs it.  Cells
have the range of a column that their own boxes have, so noise may differ from cell to cell.

**How exact an answer will be** is known before anything is charged or read.  Noise is fixed by the
question alone, so that its size is public.  Of a count or a sum that is the whole error.  An
average's error falls with the number of records, and a quantile's is one of rank: so many records
it may be off by, whatever their values are.
"""

import functools
import math
from fractions import Fraction
from typing import Literal, NamedTuple

import numpy as np

from dpstream.accounting import limits
from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.errors import UsageError
from dpstream.accounting.query.calibration import PartNoise, half_width
from dpstream.accounting.query.parts import QueryPart, half_of, parts_of, rank_factor
from dpstream.accounting.query.plan import QueryColumn, QueryPlan
from dpstream.accounting.regions.amounts import MICRO
from dpstream.accounting.regions.space import BudgetKind, Space
from dpstream.accounting.sessions.aggregates import (
    Aggregate,
    Cells,
    Line,
    Question,
    Ranges,
    line_of,
    tree_column,
)

#: Least scale of exact draws.
_LEAST = 2.0**-10


class Measure(NamedTuple):
    """The measure of an aggregate in cells of one range of its column.

    Attributes:
        column: as a query's, in coordinates (a sum: in units of its lattice).
        noises: of its sums, in the order of ``query.parts``.
        line: of the column's values, ``None`` for a count.
        bounds: (low, high) coordinates of the column, half-open; (0, 1) for a count.
    """

    aggregate: Aggregate
    column: QueryColumn
    noises: tuple[PartNoise, ...]
    line: Line | None
    bounds: tuple[int, int]


class Measures(NamedTuple):
    """The measures of an aggregate in every cell.

    Attributes:
        each: by range; range_numbers: (cells,) int64, the one of ``each`` that each cell has.
    """

    aggregate: Aggregate
    each: tuple[Measure, ...]
    range_numbers: Int64


def calibrated(space: Space, question: Question, boxes: Int64) -> tuple[Measures, ...]:
    """Return the measures of a question's aggregates, in their order.

    Args:
        boxes: (m, d, 2) that the query reads.

    Raises:
        UsageError: the question is refused, or its noise leaves the range of exact draws.
    """
    question.check(space)
    total = sum(Fraction(aggregate.share) for aggregate in question.aggregates)
    measures = []
    for aggregate in question.aggregates:
        amount = Fraction(question.amount, MICRO) * Fraction(aggregate.share) / total
        ranges = _ranges(space, question.cells, boxes, aggregate)
        line = (
            line_of(space.dimensions[space.place(aggregate.column)]) if aggregate.column else None
        )
        each = [
            _measure(aggregate, line, (low, high), question.kind, amount)
            for low, high in ranges.bounds.tolist()
        ]
        measures.append(Measures(aggregate, tuple(each), ranges.range_numbers))
    return tuple(measures)


def _ranges(space: Space, cells: Cells, boxes: Int64, aggregate: Aggregate) -> Ranges:
    """A tree has the range of all cells together, a count has none."""
    if aggregate.what == "count":
        return Ranges(np.array([[0, 1]], np.int64), np.zeros(cells.count, np.int64))
    if aggregate.what == "quantiles":
        bounds = Cells().ranges(space, boxes, aggregate.column).bounds
        return Ranges(bounds, np.zeros(cells.count, np.int64))
    return cells.ranges(space, boxes, aggregate.column)


@functools.lru_cache(maxsize=4096)  # every question is calibrated several times
def _measure(
    aggregate: Aggregate,
    line: Line | None,
    bounds: tuple[int, int],
    kind: BudgetKind,
    amount: Fraction,
) -> Measure:
    column = _column(aggregate, line, *bounds)
    # Budget and mechanism of this plan are not used: only its parts are.
    plan = QueryPlan(1.0, 0.0, 1, None, "geometric", False, columns=(column,))
    parts = parts_of(plan)
    total = sum(Fraction(part.share) for part in parts)
    noises = []
    for part in parts:
        share = Fraction(part.share) / total
        scale = scale_of(kind, part, amount * share)
        if not _LEAST <= scale <= limits.MAX_REAL_SIGMA:
            raise UsageError(
                "budget",
                f"gives '{aggregate.name}' noise outside the range of exact draws",
                "use another budget, or a narrower range of the column",
            )
        law, sensitivity = (
            ("geometric", part.most * part.nodes)
            if kind == "epsilon"
            else ("gaussian", math.sqrt(part.most**2 * part.nodes))
        )
        noises.append(PartNoise(part, law, float(share), float(sensitivity), scale))
    return Measure(aggregate, column, tuple(noises), line, bounds)


def _column(aggregate: Aggregate, line: Line | None, low: int, high: int) -> QueryColumn:
    name = aggregate.name
    if line is None:
        return QueryColumn(name, "count", rows=1)
    if aggregate.what == "sum":
        ends = line.at(low), line.at(high - 1)
        # 0 within the bounds leaves the sensitivity, and lets them differ.
        most = max(*ends, 0)
        least = min(*ends, 0)
        return QueryColumn(name, "sum", least, max(most, least + 1), rows=1)
    if aggregate.what == "average":
        return QueryColumn(name, "mean", low, max(high - 1, low + 1), rows=1)
    return tree_column(name, low, high, aggregate.at)


def scale_of(kind: BudgetKind, part: QueryPart, amount: Fraction) -> float:
    """Return the scale of geometric noise, or sd of Gaussian noise, that costs at most ``amount``.

    Args:
        part: of one record's group; amount: epsilon or rho, exactly.
    """
    if kind == "epsilon":
        least = part.most * part.nodes / amount
        scale = float(least)
        return scale if Fraction(scale) >= least else math.nextafter(scale, math.inf)
    square = part.most**2 * part.nodes / (2 * amount)
    sd = math.sqrt(square)
    while Fraction(sd) ** 2 < square:
        sd = math.nextafter(sd, math.inf)
    return sd


class Expected(NamedTuple):
    """The error of an aggregate.

    Attributes:
        name: the aggregate's.
        what: ``value``; ``value times records``: to be divided by the records of the cell, for
            values at the ends of the range (the worst case); ``rank``: in records.
        sd: (cells,) of the noise; within: (cells,) half-width of the 95% interval.
    """

    name: str
    what: Literal["value", "value times records", "rank"]
    sd: Float64
    within: Float64

    @property
    def most(self) -> float:
        """The half-width of the interval in the cell where it is largest."""
        return float(self.within.max())


def expected(space: Space, question: Question, boxes: Int64) -> list[Expected]:
    """Return the errors of a question's aggregates, in their order.

    Args:
        boxes: (m, d, 2) that the query would read.

    Raises:
        UsageError: as for `calibrated`.
    """
    errors = []
    for measures in calibrated(space, question, boxes):
        what = _WHAT[measures.aggregate.what]
        sd, within = np.array([_expected(measure) for measure in measures.each]).T
        errors.append(
            Expected(
                measures.aggregate.name,
                what,
                sd[measures.range_numbers],
                within[measures.range_numbers],
            )
        )
    return errors


_WHAT: dict[str, Literal["value", "value times records", "rank"]] = {
    "count": "value",
    "sum": "value",
    "average": "value times records",
    "quantiles": "rank",
}


def _expected(measure: Measure) -> tuple[float, float]:
    """(sd, half-width) in cells of one range."""
    line, noises = measure.line, measure.noises
    width = half_width(noises[0].law)
    if line is None:
        return noises[0].sd, float(noises[0].margin)
    if measure.aggregate.what == "sum":
        unit = float(line.unit)
        return noises[0].sd * unit, noises[0].margin * unit
    if measure.aggregate.what == "average":
        total, records = noises
        sd = float(np.hypot(total.sd, half_of(measure.column) * records.sd)) * line.step
        return sd, width * sd
    sd = noises[0].sd * rank_factor(measure.column)
    return sd, width * sd
