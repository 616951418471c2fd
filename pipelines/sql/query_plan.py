"""From a checked statement to the plan of a query with its grids, and the query's cost.

Grids are those of ``accounting.query.grids``.

**Columns.**  A column of the plan has the name of its function.  Quantile functions with the same
argument, bounds and norm share a column, so that one noisy tree answers all of them.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from sqlglot import exp

from dpstream.accounting.query.bounds import BoundsDesign
from dpstream.accounting.query.calibration import QueryBudget, cost_of
from dpstream.accounting.query.families import Families, families_of
from dpstream.accounting.query.grids import Gridded, grid_of
from dpstream.accounting.query.plan import QueryColumn, QueryPlan
from dpstream.pipelines.statements.functions import Function
from dpstream.pipelines.statements.options import Options
from dpstream.pipelines.statements.ownership import type_of
from dpstream.pipelines.statements.statement import Statement, statement_of
from dpstream.pipelines.tables.catalog import Catalog
from dpstream.state.ledger.events import Charge, ChargeKind


class Output(NamedTuple):
    """Where a function's answer is: a column of the plan, and positions among its quantiles."""

    column: str
    places: tuple[int, ...] = ()


class Question(NamedTuple):
    """A statement with everything that is fixed before a row is read; public.

    Attributes:
        statement: the checked statement.
        per_column: the same with one function for each column.
        families: its plan in each family of noise that it can use.
        gridded: the plan in the family that is used; after a charge, in the charge's family.
        outputs: by label of the statement's functions.
        digest: covers everything here except the family that is used, and the catalog.
    """

    statement: Statement
    per_column: Statement
    families: Families
    gridded: Gridded
    outputs: dict[str, Output]
    digest: str

    @property
    def plan(self) -> QueryPlan:
        """The plan; the query may choose its bounds."""
        return self.gridded.plan

    @property
    def design(self) -> BoundsDesign | None:
        """The design of the bounds that the query chooses; ``None`` if all are given."""
        return self.gridded.design

    @property
    def bits(self) -> int:
        """The number of bits of the grids, fewer than BITS if noise is large."""
        return self.gridded.bits

    def taking(self, gridded: Gridded) -> "Question":
        """Return the same question with the plan of one of its families."""
        return self._replace(gridded=gridded)

    @property
    def kind(self) -> ChargeKind:
        """The kind of its charge: a question of keys alone, or of figures."""
        return "sql" if self.plan.columns else "keys"

    def charge(self, catalog: Catalog, run_id: str) -> Charge:
        """Return the charge of one run."""
        cost = cost_of(self.plan)
        figures = (cost.epsilon, cost.delta, cost.mu, cost.threshold_delta)
        return Charge(run_id, self.digest, catalog.unit.text, *figures, kind=self.kind)

    def budget(self, plan: QueryPlan) -> QueryBudget:
        """Return noise and thresholds of the plan with its bounds."""
        return self.gridded.budget(plan)

    def sketched(self) -> QueryPlan:
        """The plan with bounds (0, 1) for those that the query chooses: for estimates."""
        return self.gridded.sketched()


def question_of(text: str, catalog: Catalog) -> Question:
    """Return the question that a statement asks; reads no data.

    Raises:
        DpstreamError: it cannot be used, is not private, or its noise cannot be drawn.
    """
    statement = statement_of(text, catalog)
    distinct, outputs = _shared(statement)
    families = families_of(lambda bits: _plan(distinct, bits), statement.options.optimise)
    parts = [canonical(statement), catalog.digest, families.digest]
    named = hashlib.blake2b("\0".join(parts).encode(), digest_size=16, person=b"dpstream-sql-ask")
    return Question(statement, distinct, families, families.taken(), outputs, named.hexdigest())


def canonical(statement: Statement) -> str:
    """Return a statement's canonical text: names resolved, without comments and white space."""
    sql: Any = lambda node: None if node is None else node.sql("bigquery", comments=False)  # noqa: E731
    parts = [
        _canonical_options(statement.options),
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


def _canonical_options(options: Options) -> dict[str, Any]:
    """Return the options of a statement by names that never change."""
    return {
        "epsilon": options.epsilon,
        "delta": options.delta,
        "groups": options.groups,
        "rows": options.rows,
        "unit_column": options.unit_column,
        "norm": options.norm,
        "mechanism": options.mechanism,
        "optimise": options.optimise,
        "selection": options.selection,
        "min_units": options.min_units,
    }


def _plan(statement: Statement, bits: int) -> QueryPlan:
    options = statement.options
    return QueryPlan(
        epsilon=options.epsilon,
        delta=options.delta,
        groups=options.groups,
        norm=options.norm,
        mechanism=options.mechanism,
        selects=bool(statement.groups) and options.selection == "thresholds",
        min_units=options.min_units,
        columns=tuple(_column(f, options.rows, bits) for f in statement.functions),
    )


def _column(function: Function, rows: int, bits: int) -> QueryColumn:
    column = QueryColumn(
        function.name,
        function.kind,
        function.low,
        function.high,
        per=function.per,
        rows=rows,
        at=function.at,
        norm=function.norm,
    )
    integer = function.argument is not None and type_of(function.argument) == exp.DType.BIGINT
    return msgspec.structs.replace(column, grid=grid_of(column, integer, bits))


def _shared(statement: Statement) -> tuple[Statement, dict[str, Output]]:
    """Combine quantile functions of one column."""
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
    distinct = msgspec.structs.replace(statement, functions=tuple(columns.values()))
    return distinct, outputs


def named_tables(nodes: Sequence[exp.Expr | None], catalog: Catalog) -> set[str]:
    """Return the tables of the catalog that queries read, and those that own their rows."""
    names = set[str]()
    for node in nodes:
        for table in () if node is None else node.find_all(exp.Table):
            at = catalog.tables.get(table.name)
            while at is not None:
                names.add(at.name)
                at = None if at.via is None else catalog.tables[at.via.table]
    return names
