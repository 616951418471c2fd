"""From a checked statement to the plan of a query with its grids, and what the query costs.

**Grid.**  A value is counted in whole steps, a power of two, fixed by public parts only.  With
bounds (low, high) and most = max(|low|, |high|, high - low) it is the largest step with most /
step > 2^(bits - 1): bits = 24, less where r rows of a unit would leave 2^32 (and 16 with var,
stddev and quantiles, which square values, or read 256 cells).  Rounding then moves a row by at
most 2^-24 of its bounds, and the sum of a million rows by less than 1 / 16 of what one unit may
add, which noise that hides a unit dominates.  SUM of whole numbers within whole bounds has steps
of at least 1, counts have 1.  Where the budget is so small that noise would leave the sampler's
range, all bits are four less, and so on.

Bounds that the query chooses are looked for in steps of 1 for whole numbers and counts, else of
2^-8 (2^-5 where values are squared); once chosen they have the grid that they would have had.

**Columns.**  A column of the plan is named as its function.  Quantile functions of one argument,
bounds and norm share a column, so that one noisy tree answers all of them.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from sqlglot import exp

from dpstream.accounting.errors import UsageError
from dpstream.accounting.query.bounds import BoundsDesign, design_bounds
from dpstream.accounting.query.calibration import QueryBudget, allocate_query, mu_of_query
from dpstream.accounting.query.plan import QueryColumn, QueryPlan
from dpstream.pipelines.sql.catalog import Catalog
from dpstream.pipelines.sql.functions import Function
from dpstream.pipelines.sql.ownership import type_of
from dpstream.pipelines.sql.statement import Statement, statement_of
from dpstream.state.ledger.charges import Charge

#: log2 of the steps that bounds are cut into.
BITS, FEW_BITS, LEAST_BITS = 24, 16, 8
_VALUE_BITS = 32
#: Bounds for estimates of columns whose bounds are the query's to choose.
ASSUMED = (0.0, 1.0)
_AUTOMATIC, _AUTOMATIC_SQUARED = 2.0**-8, 2.0**-5
_FEW = ("var", "stddev", "quantiles")
_SQUARED = ("var", "stddev")


class Output(NamedTuple):
    """Where a function's answer is: a column of the plan and places among its quantiles."""

    column: str
    places: tuple[int, ...] = ()


class Question(NamedTuple):
    """A statement with all that is fixed before a row is read; public.

    Attributes:
        statement: as it was checked; asked: the same with one function for each column.
        plan: bounds may be left to the query; design: of these bounds, ``None`` if all are given.
        outputs: by label of the statement's functions.
        bits: of grids, less than BITS where noise is large.
        digest: of everything here and of the catalog.
    """

    statement: Statement
    asked: Statement
    plan: QueryPlan
    design: BoundsDesign | None
    outputs: dict[str, Output]
    bits: int
    digest: str

    def charge(self, catalog: Catalog, run_id: str) -> Charge:
        """What one run of it costs."""
        plan = self.plan
        mu, threshold = mu_of_query(plan) if plan.mechanism == "gaussian" else (None, 0.0)
        delta = plan.delta if plan.selects or mu is not None else 0.0
        words = f"{catalog.unit.name} over the whole stream"
        figures = (plan.epsilon, delta, mu, threshold)
        return Charge(run_id, self.digest, words, *figures, kind="sql", identity=catalog.unit.text)

    def budget(self, plan: QueryPlan) -> QueryBudget:
        """Noise and thresholds of the plan with its bounds."""
        return allocate_query(plan, {} if self.design is None else self.design.reserved)

    def sketched(self) -> QueryPlan:
        """The plan with bounds (0, 1) where they are the query's to choose: for estimates."""
        return regridded(self.plan, _placed(self.plan), self.bits)


def question_of(text: str, catalog: Catalog) -> Question:
    """The question that a statement asks; reads no data.

    Raises:
        DpstreamError: it is not usable, not private, or its noise cannot be drawn.
    """
    statement = statement_of(text, catalog)
    asked, outputs = _shared(statement)
    for bits in range(BITS, LEAST_BITS - 1, -4):
        plan = _plan(asked, bits)
        design = design_bounds(plan)
        found = Question(statement, asked, plan, design, outputs, bits, "")
        try:
            found.budget(found.sketched())
        except UsageError:
            if bits == LEAST_BITS or bits - 4 < LEAST_BITS:
                raise
            continue
        break
    parts = [canonical(statement), catalog.digest, plan.digest, str(bits)]
    named = hashlib.blake2b("\0".join(parts).encode(), digest_size=16, person=b"dpstream-sql-ask")
    return found._replace(digest=named.hexdigest())


def canonical(statement: Statement) -> str:
    """A statement in one spelling: names resolved, without comments and white space."""
    sql: Any = lambda node: None if node is None else node.sql("bigquery", comments=False)  # noqa: E731
    parts = [
        msgspec.to_builtins(statement.options),
        sql(statement.source),
        sql(statement.unit),
        [(g.name, sql(g.expression), g.type.value) for g in statement.groups],
        [
            (f.name, f.kind, sql(f.argument), f.low, f.high, f.per, f.report, f.at, f.norm, f.many)
            for f in statement.functions
        ],
        sql(statement.outer),
        sql(statement.public),
    ]
    return msgspec.json.encode(parts).decode()


def grids_of(plan: QueryPlan) -> dict[str, tuple[float, int, int]]:
    """(step, low, high) of every column but units, for stage 1."""
    out = {}
    for column in plan.columns:
        if column.kind != "units":
            out[column.name] = (column.grid, *column.grid_bounds())
    return out


def regridded(plan: QueryPlan, bounds: dict[str, tuple[float, float]], bits: int) -> QueryPlan:
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


def _placed(plan: QueryPlan) -> dict[str, tuple[float, float]]:
    return {column.name: ASSUMED for column in plan.columns if column.automatic}


def _plan(statement: Statement, bits: int) -> QueryPlan:
    asked = statement.options
    return QueryPlan(
        epsilon=asked.epsilon,
        delta=asked.delta,
        groups=asked.groups,
        norm=asked.norm,
        mechanism=asked.mechanism,
        selects=bool(statement.groups) and asked.selection == "thresholds",
        min_units=asked.min_units,
        columns=tuple(_column(f, asked.rows, bits) for f in statement.functions),
    )


def _column(function: Function, rows: int, bits: int) -> QueryColumn:
    whole = function.argument is not None and type_of(function.argument) == exp.DType.BIGINT
    step = 1.0
    if function.kind not in ("count", "units"):
        most_rows = rows if function.per == "row" else 1
        if function.low is not None and function.high is not None:
            whole = whole and function.kind == "sum"
            step = _step(function.kind, function.low, function.high, most_rows, bits, whole)
        elif not whole:
            step = _AUTOMATIC_SQUARED if function.kind in _SQUARED else _AUTOMATIC
    return QueryColumn(
        function.name,
        function.kind,
        function.low,
        function.high,
        per=function.per,
        rows=rows,
        grid=step,
        at=function.at,
        norm=function.norm,
    )


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


def _shared(statement: Statement) -> tuple[Statement, dict[str, Output]]:
    """Quantile functions of one column together."""
    columns: dict[Any, Function] = {}
    outputs: dict[str, Output] = {}
    for function in statement.functions:
        if function.kind != "quantiles":
            columns[function.name] = function
            outputs[function.name] = Output(function.name)
            continue
        key = (function.argument, function.low, function.high, function.norm)
        first = columns.get(key, msgspec.structs.replace(function, at=()))
        at = first.at + tuple(q for q in dict.fromkeys(function.at) if q not in first.at)
        columns[key] = msgspec.structs.replace(first, at=at)
        outputs[function.name] = Output(first.name, tuple(at.index(q) for q in function.at))
    asked = msgspec.structs.replace(statement, functions=tuple(columns.values()))
    return asked, outputs


def named_tables(nodes: Sequence[exp.Expr | None], catalog: Catalog) -> set[str]:
    """Tables of the catalog that queries read, and those that own their rows."""
    found = set[str]()
    for node in nodes:
        for table in () if node is None else node.find_all(exp.Table):
            at = catalog.tables.get(table.name)
            while at is not None:
                found.add(at.name)
                at = None if at.via is None else catalog.tables[at.via.table]
    return found
