"""Grids of a query's columns: whole steps that values are counted in, from public parts only.

A step is a power of two.  With bounds (low, high) and most = max(|low|, |high|, high - low) it is
the largest step with most / step > 2^(bits - 1): bits = 24, less where r rows of a unit would leave
2^32 (and 16 with var, stddev and quantiles, which square values, or read 256 cells).  Rounding then
moves a row by at most 2^-24 of its bounds, and the sum of a million rows by less than 1 / 16 of
what one unit may add, which noise that hides a unit dominates.  SUM of whole numbers within whole
bounds has steps of at least 1, counts have 1.  Where the budget is so small that noise would leave
the sampler's range, all bits are four less, and so on (`finest`).

A staircase of an sd near 1 is coarse on steps of 1: its sd falls by up to 8% on steps of 1/2 to
1/16 (`finer_sums`).  Whole numbers are whole numbers of such steps, so that nothing is rounded, and
L is as many times larger.  Steps depend on the plan alone, and the sensitivity argument of
`accounting.geometric` holds for any L: epsilon stays as it is.

Bounds that the query chooses are looked for in steps of 1 for whole numbers and counts, else of
2^-8; once chosen they have the grid that they would have had.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from dpstream.accounting.errors import UsageError
from dpstream.accounting.query.bounds import MOST_GROUPS, BoundsDesign, design_bounds
from dpstream.accounting.query.calibration import QueryBudget, allocate_query
from dpstream.accounting.query.plan import MAX_ROWS, QueryColumn, QueryPlan

#: log2 of the steps that bounds are cut into.
BITS, FEW_BITS, LEAST_BITS = 24, 16, 8
_VALUE_BITS = 32
#: Bounds for estimates of columns whose bounds are the query's to choose.
ASSUMED, COUNTED = (0.0, 1.0), (0.0, 16.0)
_AUTOMATIC = 2.0**-8
_FEW = ("var", "stddev", "quantiles")
#: Sums of whole numbers keep steps of 1 where their sd is at least this, because finer steps gain
#: less than 1.5% there; and log2 of how much finer their steps may be.
_COARSE, _FINER = 2.0, range(1, 5)


class Gridded(NamedTuple):
    """A plan on the finest grid that its noise can be drawn on.

    Attributes:
        plan: bounds may be left to the query; design: of these bounds, ``None`` if all are given.
        bits: of grids, less than BITS where noise is large.
    """

    plan: QueryPlan
    design: BoundsDesign | None
    bits: int

    def sketched(self) -> QueryPlan:
        """The plan with placeholders for automatic settings: bounds (0, 1), of a count (0, 16),
        the most rows and groups.

        It is for estimates.  What can be drawn for it can be drawn for every choice.  A count of
        one row of each unit is one of units: it joins the test of groups, which leaves more of the
        budget for the other columns, and so is not assumed.
        """
        plan = self.plan
        open_ = assumed_bounds(plan)
        columns = []
        for column in plan.columns:
            rows = MAX_ROWS if column.automatic_rows else column.rows
            columns.append(msgspec.structs.replace(column, rows=rows))
            if column.automatic_rows and column.low is not None and column.high is not None:
                open_[column.name] = column.low, column.high  # r decides the grid too
        groups = MOST_GROUPS if plan.automatic_groups else plan.groups
        worst = msgspec.structs.replace(plan, columns=tuple(columns), groups=groups)
        return regridded(worst, open_, self.bits)

    def budget(self, plan: QueryPlan) -> QueryBudget:
        """Return the noise and thresholds of the plan with its bounds."""
        return allocate_query(plan, {} if self.design is None else self.design.reserved)


def assumed_bounds(plan: QueryPlan) -> dict[str, tuple[float, float]]:
    """Return bounds for estimates of the columns whose bounds are the query's to choose."""
    return {c.name: COUNTED if c.kind == "count" else ASSUMED for c in plan.columns if c.automatic}


def finest(plan_of: Callable[[int], QueryPlan]) -> Gridded:
    """Return the plan with the most bits whose noise can be drawn.

    Args:
        plan_of: the plan of so many bits.

    Raises:
        UsageError: the plan is refused, or no grid is coarse enough.
    """
    for bits in range(BITS, LEAST_BITS - 1, -4):
        plan = plan_of(bits)
        gridded = Gridded(plan, design_bounds(plan), bits)
        try:
            gridded.budget(gridded.sketched())
        except UsageError:
            if bits - 4 < LEAST_BITS:
                raise
            continue
        break
    return gridded


def finer_sums(plan: QueryPlan, bits: int) -> QueryPlan:
    """Return a geometric plan with finer steps for sums of whole numbers where these lower their
    sd.

    The sd of a sum is then the least of a few, each of which does not rise with epsilon, nor when
    kappa or a bound falls.  Only the sd on steps of 1 decides whether it is, so that the sd of the
    answer does not rise either.

    Args:
        plan: a plan whose family is chosen.
        bits: see `Gridded`.

    Returns:
        The plan itself where kappa, bounds or rows of a unit are the query's to choose.
    """
    names = [column.name for column in plan.columns if _coarse(plan, column)]
    if plan.mechanism != "geometric" or plan.automatic_groups or not names:
        return plan
    try:
        least = _sds(plan, bits)
        names = [name for name in names if least[name] < _COARSE]
        steps = dict.fromkeys(names, 1.0)
        for finer in _FINER if names else ():
            sds = _sds(_stepped(plan, dict.fromkeys(names, 2.0**-finer)), bits)
            for name in names:
                if sds[name] < least[name]:
                    least[name], steps[name] = sds[name], 2.0**-finer
    except UsageError:  # `finest` asks again, on coarser grids of the other columns
        return plan
    return _stepped(plan, steps)


def _coarse(plan: QueryPlan, column: QueryColumn) -> bool:
    """Whether it is a sum on steps of 1 that can have staircase noise."""
    given = column.kind == "sum" and column.low is not None and not column.automatic_rows
    return given and column.grid == 1 and plan.norm_of(column) is None


def _sds(plan: QueryPlan, bits: int) -> dict[str, float]:
    """sd of the sum of each column that has one, in the column's units."""
    gridded = Gridded(plan, design_bounds(plan), bits)
    sketch = gridded.sketched()
    grids = {column.name: column.grid for column in sketch.columns}
    sums = (noise for noise in gridded.budget(sketch).parts if noise.part.what == "sum")
    return {n.part.column: n.sd * grids[n.part.column] / n.part.unit for n in sums}


def _stepped(plan: QueryPlan, steps: Mapping[str, float]) -> QueryPlan:
    columns = tuple(
        msgspec.structs.replace(column, grid=steps.get(column.name, column.grid))
        for column in plan.columns
    )
    return msgspec.structs.replace(plan, columns=columns)


def grid_of(column: QueryColumn, integral: bool, bits: int) -> float:
    """Return the step of a column, its bounds given or not.

    Args:
        integral: its values are declared to be whole numbers.  A type that a row can change, e.g.
            of a DataFrame's column, is no declaration: the step shows in every figure.
    """
    if column.kind in ("count", "units"):
        return 1.0
    if column.low is None or column.high is None:
        return 1.0 if integral else _AUTOMATIC
    integral = integral and column.kind == "sum"
    return _step(column.kind, column.low, column.high, column.most_rows, bits, integral)


def grids_of(plan: QueryPlan) -> dict[str, tuple[float, int, int]]:
    """Return (step, low, high) of every column but units, for stage 1."""
    return {
        column.name: (column.grid, *column.grid_bounds())
        for column in plan.columns
        if column.kind != "units"
    }


def regridded(plan: QueryPlan, bounds: Mapping[str, tuple[float, float]], bits: int) -> QueryPlan:
    """Return the plan with bounds for its automatic columns, each on its own grid."""
    columns = tuple(
        _bounded(column, *bounds[column.name], bits) if column.name in bounds else column
        for column in plan.columns
    )
    return msgspec.structs.replace(plan, columns=columns)


def _bounded(column: QueryColumn, low: float, high: float, bits: int) -> QueryColumn:
    step, integral = column.grid, column.kind == "sum" and column.grid >= 1
    if column.kind != "count":
        step = _step(column.kind, low, high, column.most_rows, bits, integral)
    return msgspec.structs.replace(column, low=low, high=high, grid=step)


def _step(kind: str, low: float, high: float, rows: int, bits: int, integral: bool) -> float:
    """The step of bounds; see the module."""
    most = high - low if kind in _FEW else max(abs(low), abs(high), high - low)
    bits = min(bits, FEW_BITS if kind in _FEW else BITS, _VALUE_BITS - (rows - 1).bit_length())
    step = 1.0
    while most / step > 2.0**bits:
        step *= 2
    while most / step <= 2.0 ** (bits - 1):
        step /= 2
    if kind in _FEW:  # far from 0 values themselves must stay in range
        while max(abs(low), abs(high)) * rows / step > 2.0**_VALUE_BITS:
            step *= 2
    return max(1.0, step) if integral and low == int(low) and high == int(high) else step
