"""Queries for tests: raw rows, a slow stage 1 that is written from the definitions, plans."""

import functools
import math
from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dpstream.accounting.query.parts import centre_of, middle_of, parts_of
from dpstream.accounting.query.plan import QueryColumn, QueryPlan
from dpstream.dp_transforms.one_shot.partials import Partials, Rows, stored_parts

Int64 = npt.NDArray[np.int64]
RUN = (b"\x11" * 16, b"question")

COUNT = QueryColumn("n", "count", 0, 1, per="group")
ROWS = QueryColumn("rows", "count", rows=3)
SUM = QueryColumn("s", "sum", -2, 5, per="group", grid=0.5)
ROW_SUM = QueryColumn("rs", "sum", 1, 4, rows=3)
MEAN = QueryColumn("m", "mean", 10, 20, rows=3, grid=0.25)
VAR = QueryColumn("v", "var", 0, 9, rows=2)
STDDEV = QueryColumn("d", "stddev", 0, 9, rows=2, grid=0.5)
UNITS = QueryColumn("u", "units")
QUANTILES = QueryColumn("q", "quantiles", 0, 15, rows=2, at=(0.0, 0.25, 0.5, 0.75, 1.0))
ALL = (COUNT, ROWS, SUM, ROW_SUM, MEAN, VAR, STDDEV, UNITS, QUANTILES)


def query(*columns: QueryColumn, **settings: Any) -> QueryPlan:
    """A plan of these columns."""
    given: dict[str, Any] = {
        "epsilon": 1.0, "delta": 1e-6, "groups": 4, "norm": None,
        "mechanism": "gaussian", "selects": True, "columns": columns,
    }  # fmt: skip
    return QueryPlan(**(given | settings))


class Raw(NamedTuple):
    """Rows (unit, group, value); the value is in the columns' units, the same for all columns, NaN
    where the row has none."""

    unit: Int64
    group: Int64
    value: npt.NDArray[np.float64]

    def without(self, unit: int) -> "Raw":
        return Raw(*(part[self.unit != unit] for part in self))

    def plus(self, other: "Raw") -> "Raw":
        return Raw(*(np.concatenate(both) for both in zip(self, other, strict=True)))


def raw(rows: list[tuple[int, int, float]]) -> Raw:
    parts = np.array(rows, np.float64).reshape(-1, 3).T
    return Raw(parts[0].astype(np.int64), parts[1].astype(np.int64), parts[2])


def generated(seed: int, units: int = 40, groups: int = 12, rows: int = 400) -> Raw:
    random = np.random.default_rng(seed)
    unit = (units * random.random(rows) ** 2).astype(np.int64)
    group = (groups * random.random(rows) ** 1.5).astype(np.int64)
    return Raw(unit, group, np.round(random.normal(8, 6, rows) * 4) / 4)


@functools.cache
def ids(codes: int, salt: int) -> npt.NDArray[np.uint64]:
    """128-bit ids of the codes 0, 1, ..; a code's own, whatever else there is."""
    rows = [np.random.default_rng((salt, code)).integers(0, 1 << 62, 2) for code in range(codes)]
    return np.array(rows, np.uint64).reshape(-1, 2)


def on_grid(column: QueryColumn, value: float) -> int:
    lo, hi = column.grid_bounds()
    return min(max(round(value / column.grid), lo), hi)


def partial(column: QueryColumn, what: str, values: list[float]) -> int:
    """A unit's partial in one group, from its values there (at most r); 0 of none."""
    if not values:
        return 0
    if column.kind == "count":
        lo, hi = (0, column.rows) if column.per == "row" else column.grid_bounds()
        return min(max(len(values), lo), hi)
    if column.kind == "sum" and column.per == "group":
        return on_grid(column, sum(values))
    if column.kind == "sum":
        return sum(on_grid(column, v) for v in values)
    centred = [on_grid(column, v) - middle_of(column) for v in values]
    if what == "count":
        return len(centred)
    if what == "square":
        return sum(v * v - centre_of(column) for v in centred)
    return sum(centred)


def stage_one(plan: QueryPlan, rows: Raw, units: int = 64, groups: int = 64) -> Partials:
    """Partials of raw rows; of more than r rows of a (unit, group) the smallest are taken."""
    group_values: dict[tuple[int, int], list[float]] = defaultdict(list)
    for u, g, v in zip(*(part.tolist() for part in rows), strict=True):
        group_values[u, g] += [] if math.isnan(v) else [v]
    parts, columns = parts_of(plan), {column.name: column for column in plan.columns}
    sums = []
    for index in stored_parts(plan):
        column, what = columns[parts[index].column], parts[index].what
        each = column.per == "row"
        chosen = [sorted(v)[: column.rows] if each else v for v in group_values.values()]
        sums.append(np.array([partial(column, what, values) for values in chosen], np.int64))
    pairs = np.array(list(group_values), np.int64).reshape(-1, 2)
    tables = {}
    for column in plan.columns:
        if column.kind == "quantiles":
            there = ~np.isnan(rows.value)
            value = np.rint(rows.value[there] / column.grid).astype(np.int64)
            tables[column.name] = Rows(rows.unit[there], rows.group[there], value)
    unit, group = pairs[:, 0].copy(), pairs[:, 1].copy()
    return Partials(unit, group, ids(units, 1), ids(groups, 2), tuple(sums), tables)
