"""Grids of a query's columns: whole steps that values are counted in, from public parts only.

A step is a power of two.  With bounds (low, high) and most = max(|low|, |high|, high - low) it is
the largest step with most / step > 2^(bits - 1): bits = 24, less where r rows of a unit would leave
2^32 (and 16 with var, stddev and quantiles, which square values, or read 256 cells).  Rounding then
moves a row by at most 2^-24 of its bounds, and the sum of a million rows by less than 1 / 16 of
what one unit may add, which noise that hides a unit dominates.  SUM of whole numbers within whole
bounds has steps of at least 1, counts have 1.  Where the budget is so small that noise would leave
the sampler's range, all bits are four less, and so on (`finest`).

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
ASSUMED = (0.0, 1.0)
_AUTOMATIC = 2.0**-8
_FEW = ("var", "stddev", "quantiles")


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
        """The plan with bounds (0, 1), and the most rows and groups, where they are the query's to
        choose: for estimates, and because what can be drawn for it can be for all it may choose."""
        plan = self.plan
        open_ = {c.name: ASSUMED for c in plan.columns if c.automatic}
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
        """Noise and thresholds of the plan with its bounds."""
        return allocate_query(plan, {} if self.design is None else self.design.reserved)


def finest(plan_of: Callable[[int], QueryPlan]) -> Gridded:
    """The plan with the most bits whose noise can be drawn.

    Args:
        plan_of: the plan of so many bits.

    Raises:
        UsageError: the plan is refused, or no grid is coarse enough.
    """
    for bits in range(BITS, LEAST_BITS - 1, -4):
        plan = plan_of(bits)
        found = Gridded(plan, design_bounds(plan), bits)
        try:
            found.budget(found.sketched())
        except UsageError:
            if bits - 4 < LEAST_BITS:
                raise
            continue
        break
    return found


def grid_of(column: QueryColumn, whole: bool, bits: int) -> float:
    """The step of a column, its bounds given or not.

    Args:
        whole: its values are whole numbers.
    """
    if column.kind in ("count", "units"):
        return 1.0
    if column.low is None or column.high is None:
        return 1.0 if whole else _AUTOMATIC
    whole = whole and column.kind == "sum"
    return _step(column.kind, column.low, column.high, column.most_rows, bits, whole)


def grids_of(plan: QueryPlan) -> dict[str, tuple[float, int, int]]:
    """(step, low, high) of every column but units, for stage 1."""
    out = {}
    for column in plan.columns:
        if column.kind != "units":
            out[column.name] = (column.grid, *column.grid_bounds())
    return out


def regridded(plan: QueryPlan, bounds: Mapping[str, tuple[float, float]], bits: int) -> QueryPlan:
    """The plan with bounds for its automatic columns, each on its own grid."""
    columns = tuple(
        _bounded(column, *bounds[column.name], bits) if column.name in bounds else column
        for column in plan.columns
    )
    return msgspec.structs.replace(plan, columns=columns)


def _bounded(column: QueryColumn, low: float, high: float, bits: int) -> QueryColumn:
    step, whole = column.grid, column.kind == "sum" and column.grid >= 1
    if column.kind != "count":
        step = _step(column.kind, low, high, column.most_rows, bits, whole)
    return msgspec.structs.replace(column, low=low, high=high, grid=step)


def _step(kind: str, low: float, high: float, rows: int, bits: int, whole: bool) -> float:
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
    return max(1.0, step) if whole and low == int(low) and high == int(high) else step
