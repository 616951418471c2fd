"""The plan of a checked statement's query, its cost, and the SQL of stage 1.

The plan has its grids, which are those of ``accounting.query.grids``.

**Columns.**  A column of the plan has the name of its function.  Quantile functions with the same
argument, bounds and norm share a column, so that one noisy tree answers all of them.

**Stage 1** is one DuckDB query that gives a row per (unit, group) with whole-number partials.

**What a row has**: ``unit``; ``group_0``, ``group_1``, ... (its groups, in order); and
for each function i, in order of `PrivateSelect.functions`:

* count: ``value_i``, its rows (or not-NULL arguments) clamped to the grid's bounds;
* sum: ``value_i``, in grid steps, clamped to the bounds; where they hold per row, to r times the
  bounds, r = max_rows_contributed;
* mean: ``value_i`` and ``count_i``, the sum of (x - middle) and the number of x, with middle =
  ``Grid.middle``; both scaled down where the unit has more than r rows: (sum r) div count and r,
  with r = 1 where bounds hold for a group (the unit adds its own mean), else max_rows_contributed;
* var, stddev and quantiles: ``rows_i``, the unit's values in grid steps, clamped and sorted; the
  caller takes at most r of them by a keyed function of the unit's own rows.  Behind a join, of more
  than ``MAX_ROWS`` those with the smallest hashes of (unit, group, value): joins that multiply a
  unit's rows do not fill the memory.  This choice is no secret and need not be: it
  is a function of that unit's rows in that group, so that others' stay as they are, and r bounds
  what the unit adds whatever is chosen from.  Equal values have equal hashes, so that no order of
  rows decides; that some values come with all their rows and others with none evens out over units;
* distinct: ``value_i``, how many different values the unit has, clamped; and ``rows_i``, 63 bits of
  a hash of each, of which the caller takes at most m by a keyed function of unit, group and value;
* units: nothing: each row is one.

**Absent.**  GoogleSQL ignores NULL inputs, so a unit whose arguments in a group are all NULL (or
not usable) has no partial of that function there: ``value_i`` of a count or a sum is NULL,
``count_i`` is 0, ``rows_i`` is empty.  It adds nothing, whatever the bounds; clamping a sum of
nothing would add the bound nearest to 0.

**Order-free and exact.**  Each argument becomes a whole number of grid steps before anything is
grouped: per row, by a function of the row.  With bounds per row it is clamped there.  With bounds
per group each row is limited to 2^62 steps (far beyond any bound), rows are added with 128 bits
(what SUM does with BIGINT), which cannot overflow below 2^64 rows, and the sum is clamped.  Whole
numbers add up to the same in any order, so threads, files, shards and other units' rows cannot
move a partial; a sum of floats can, and in DuckDB does.  Where a subquery sums per unit, its values
are sorted first.

**No error depends on a row.**  Expressions run under TRY, CAST is TRY_CAST and x / 0 is NULL; what
fails, and NaN and infinity, is NULL: left out of functions, not passed by WHERE, one group of its
own in GROUP BY.  TRY alone is not enough: `engine` turns off the optimizers that take expressions
out of it, and `exact` keeps from DuckDB what TRY does not catch.  Computed columns are cast to the
types that the validator found, so that a type it did not foresee cannot make a float of a group,
nor two decimals fail where they meet.  Texts that are put together and lists of values are bounded;
how many groups one unit has, and how long a query runs, are not.

**What the caller relies on** to register: tables under their catalog names with columns of the
catalog's types; time zone UTC.
"""

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from sqlglot import exp

from dpstream.accounting.places import COLUMNAR
from dpstream.accounting.query.accuracy import by_epsilon, least
from dpstream.accounting.query.calibration import cost_of
from dpstream.accounting.query.families import Families, families_of
from dpstream.accounting.query.grids import Gridded, grid_of
from dpstream.accounting.query.plan import Family, Mechanism, QueryColumn, QueryPlan
from dpstream.pipelines.statements.canonical import (
    canonical_form,
    function_text,
    group_text,
    sql,
)
from dpstream.pipelines.statements.errors import refusal
from dpstream.pipelines.statements.exact import (
    one_of_equals,
    safe_query,
    tables_by_unit,
    tried,
)
from dpstream.pipelines.statements.forms import FLOATS, duckdb, type_of
from dpstream.pipelines.statements.functions import Function, Options
from dpstream.pipelines.statements.statement import PrivateSelect, Statement, statement_of
from dpstream.pipelines.tables.catalog import Catalog
from dpstream.state.ledger.events import Charge, ChargeKind


class Output(NamedTuple):
    """The place of a function's answer: a column of the plan, and positions among its quantiles."""

    column: str
    places: tuple[int, ...] = ()


class Question(NamedTuple):
    """A statement with every parameter that is fixed before a row is read; public.

    Attributes:
        statement: the checked statement, with its labels and its outer query.
        select: its private part in canonical form, which the digest covers.
        names: the canonical name of a group or function by each label of the statement.
        per_column: ``select`` with one function for each column.
        families: the question's plan in each family of noise that it can use.
        gridded: the plan in the family that is used; after a charge, in the charge's family.
        outputs: by canonical name of the functions.
        digest: covers ``select``, the tables that it reads and ``families``: what identifies the
            question, and names its noise.
        parts: where the statement has several private SELECTs, the question of each.
    """

    statement: Statement
    select: PrivateSelect
    names: dict[str, str]
    per_column: PrivateSelect
    families: Families
    gridded: Gridded
    outputs: dict[str, Output]
    digest: str
    parts: tuple["Question", ...] = ()

    @property
    def singles(self) -> tuple["Question", ...]:
        """The questions that are charged and drawn: of each private SELECT."""
        return self.parts or (self,)

    @property
    def plan(self) -> QueryPlan:
        """The plan; the query may choose its bounds."""
        return self.gridded.plan

    def taking(self, gridded: Gridded) -> "Question":
        """Return the same question with the plan of one of its families."""
        return self._replace(gridded=gridded)

    @property
    def kind(self) -> ChargeKind:
        """The kind of its charge: a question of keys alone, or of figures."""
        return "sql" if self.plan.columns else "keys"

    @property
    def columns(self) -> dict[str, list[str]]:
        """The labels of each column of the plan, in the statement's order."""
        labels: dict[str, list[str]] = {}
        for function in self.statement.functions:
            column = self.outputs[self.names[function.name]].column
            labels.setdefault(column, []).append(function.name)
        return labels

    def by_epsilon(self, catalog: Catalog) -> Sequence[dict[str, Any]]:
        """Return the errors of its columns at other epsilons (`query.accuracy.by_epsilon`)."""
        at = functools.partial(_families, self.per_column, _declares_types(self.select, catalog))
        mechanism: Family = self.plan.mechanism if self.plan.mechanism != "auto" else "gaussian"
        return by_epsilon(at, self.plan.epsilon, mechanism)

    def charge(self, catalog: Catalog, run_id: str) -> Charge:
        """Return the charge of one run."""
        cost = cost_of(self.plan)
        figures = (cost.epsilon, cost.delta, cost.mu, cost.threshold_delta)
        tables = ", ".join(sorted(named_tables([self.select.source], catalog)))
        unit = catalog.unit.text
        return Charge(run_id, self.digest, unit, *figures, kind=self.kind, label=tables)


def question_of(text: str, catalog: Catalog) -> Question:
    """Return the question that a statement asks; reads no data.

    Raises:
        DpstreamError: it cannot be used, is not private, or its noise cannot be drawn.
    """
    statement = statement_of(text, catalog)
    if statement.parts:
        parts = tuple(_question(part, catalog) for part in statement.parts)
        return parts[0]._replace(statement=statement, parts=parts)
    return _question(statement, catalog)


def _question(statement: Statement, catalog: Catalog) -> Question:
    select, names = canonical_form(statement)
    distinct, outputs = _shared(select)
    typed = _declares_types(select, catalog)
    at = functools.partial(_families, distinct, typed)
    options = _exact_enough(statement, names, at)
    select, distinct = (msgspec.structs.replace(one, options=options) for one in (select, distinct))
    families = at(options.epsilon, options.mechanism)
    tables = catalog.digest(tables_read(select, catalog))
    parts = [canonical(select), tables, families.digest]
    named = hashlib.blake2b("\0".join(parts).encode(), digest_size=16, person=b"dpstream-sql-ask")
    parts_of_question = statement, select, names, distinct, families, families.taken(), outputs
    return Question(*parts_of_question, named.hexdigest())


def _exact_enough(
    statement: Statement, names: Mapping[str, str], at: Callable[[float], Families]
) -> Options:
    """Return a statement's options with the epsilon that its largest intervals determine.

    Raises:
        DpstreamError: no epsilon reaches them.
    """
    options, limits = statement.options, dict[str, float]()
    for function in statement.functions:
        counts = function.kind in ("count", "units")
        within = function.within or (options.within if counts else None)
        if within is not None:
            name = names[function.name]
            limits[name] = min(within, limits.get(name, within))
    if not limits:
        return options
    exactness = least(at, limits)
    if exactness is None:
        raise refusal("within-reach")
    epsilon, mechanism = exactness
    return msgspec.structs.replace(options, epsilon=epsilon, mechanism=mechanism)


def _families(
    select: PrivateSelect, typed: bool, epsilon: float, mechanism: Mechanism | None = None
) -> Families:
    """Return a private part with an epsilon in each of its families."""
    options = select.options
    options = msgspec.structs.replace(
        options, epsilon=epsilon, mechanism=mechanism or options.mechanism
    )
    stated = msgspec.structs.replace(select, options=options)
    return families_of(lambda bits: _plan(stated, bits, typed), options.optimise)


def canonical(select: PrivateSelect) -> str:
    """Return the text of a private part in canonical form: all that is computed, nothing else."""
    options = select.options
    parts = [
        {  # by names that never change; `unit_column` is checked, and changes nothing
            "epsilon": options.epsilon,
            "delta": options.delta,
            "groups": options.groups,
            "rows": options.rows,
            "norm": options.norm,
            "mechanism": options.mechanism,
            "optimise": options.optimise,
            "selection": options.selection,
            "min_units": options.min_units,
        },
        sql(select.source),
        sql(select.unit),
        [(g.name, group_text(g)) for g in select.groups],
        [(f.name, function_text(f)) for f in select.functions],
        sql(select.public),
    ]
    return msgspec.json.encode(parts).decode()


def _declares_types(select: PrivateSelect, catalog: Catalog) -> bool:
    """Return whether the project file declares the types of all private columns that are read.

    Those of Parquet may depend on a row (pandas writes whole numbers as DOUBLE where one is
    missing), and whether steps are whole shows in every figure.
    """
    tables = [catalog.tables[name] for name in named_tables([select.source], catalog)]
    return all(t.unit is None or t.kind not in COLUMNAR or bool(t.fields) for t in tables)


def _plan(select: PrivateSelect, bits: int, typed: bool) -> QueryPlan:
    options = select.options
    return QueryPlan(
        epsilon=options.epsilon,
        delta=options.delta,
        groups=options.groups,
        norm=options.norm,
        mechanism=options.mechanism,
        selects=bool(select.groups) and options.selection == "thresholds",
        min_units=options.min_units,
        columns=tuple(_column(f, options.rows, bits, typed) for f in select.functions),
    )


def _column(function: Function, rows: int, bits: int, typed: bool) -> QueryColumn:
    column = QueryColumn(
        function.name,
        "count" if function.kind == "distinct" else function.kind,
        function.low,
        function.high,
        per=function.per,
        rows=rows,
        at=function.at,
        norm=function.norm,
        distinct=function.kind == "distinct",
    )
    argument = function.argument
    integer = typed and argument is not None and type_of(argument) == exp.DType.BIGINT
    return msgspec.structs.replace(column, grid=grid_of(column, integer, bits))


def _shared(select: PrivateSelect) -> tuple[PrivateSelect, dict[str, Output]]:
    """Combine quantile functions of one column."""
    columns: dict[Any, Function] = {}
    keys = dict[str, Any]()
    for function in select.functions:
        key: Any = function.name
        if function.kind == "quantiles":
            key = function.argument, function.low, function.high, function.norm
        keys[function.name] = key
        first = columns.get(key, function)
        at = tuple(sorted({*first.at, *function.at}))
        columns[key] = msgspec.structs.replace(first, at=at)
    outputs = dict[str, Output]()
    for function in select.functions:
        column = columns[keys[function.name]]
        outputs[function.name] = Output(column.name, tuple(map(column.at.index, function.at)))
    return msgspec.structs.replace(select, functions=tuple(columns.values())), outputs


def tables_read(select: PrivateSelect, catalog: Catalog) -> set[str]:
    """Return the tables that are read before the noise is drawn."""
    return named_tables([select.source, select.public], catalog)


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


#: Grid steps that a row is limited to before it is added.
MAX_STEPS = 1 << 62
#: Rows of a unit in a group that a list holds; far above r.
MAX_ROWS = 65_536


class Grid(NamedTuple):
    """The public grid of a column: sizes of steps, and bounds in whole steps."""

    step: float
    low: int
    high: int

    @property
    def middle(self) -> int:
        """The number of steps that a mean subtracts from each value."""
        return (self.low + self.high) // 2


def stage_one(
    select: PrivateSelect, catalog: Catalog, grids: Mapping[str, tuple[float, int, int]]
) -> exp.Select:
    """Return the DuckDB query of the partials (``.sql("duckdb")`` is its text).

    Args:
        select: the private part of a checked statement.
        catalog: the catalog of its tables.
        grids: (step, low, high) of every function but units, by name; bounds in whole steps.
    """
    source = safe_query(select.source)
    keys = [f"group_{i}" for i in range(len(select.groups))]
    rows = [
        exp.alias_(select.unit.copy(), "unit", quoted=True),
        *(
            exp.alias_(tried(group.expression.copy(), group.type), key, quoted=True)
            for key, group in zip(keys, select.groups, strict=True)
        ),
    ]
    partials: list[exp.Expr] = []
    listed = _listed(source, ["unit", *keys])
    for i, function in enumerate(select.functions):
        if function.kind == "units":
            continue
        grid = Grid(*grids[function.name])
        rows.append(exp.alias_(_per_row(function, grid), f"x_{i}", quoted=True))
        partials += _partials(i, function, grid, select.options.rows, listed)
    source.set("expressions", rows)
    inner = exp.Subquery(this=source, alias=exp.TableAlias(this=exp.to_identifier("rows_of_units")))
    by = [exp.column(name, quoted=True) for name in ("unit", *keys)]
    query = exp.Select(
        expressions=[*(column.copy() for column in by), *partials],
        from_=exp.From(this=inner),
        group=exp.Group(expressions=by),
    )
    return tables_by_unit(query, catalog)


def _per_row(function: Function, grid: Grid) -> exp.Expr:
    """Return the whole number that a row adds: 1 or NULL for a count, grid steps for the others."""
    if function.argument is None:
        return exp.Literal.number(1)
    value = tried(function.argument.copy())
    if function.kind == "count":
        return duckdb("CASE WHEN NOT :v IS NULL THEN 1 END", v=value)
    if function.kind == "distinct":
        kind = type_of(function.argument)
        value = tried(function.argument.copy(), kind)
        value = one_of_equals(value) if kind in FLOATS else value
        return duckdb("CASE WHEN NOT :v IS NULL THEN CAST(HASH(:v) >> 1 AS BIGINT) END", v=value)
    grouped = function.per == "group"
    low, high = (-MAX_STEPS, MAX_STEPS) if grouped else (grid.low, grid.high)
    return duckdb(
        f"TRY(CAST(CASE WHEN ISFINITE(TRY_CAST(:v AS DOUBLE)) THEN LEAST(GREATEST(ROUND("
        f"TRY_CAST(:v AS DOUBLE) / CAST('{grid.step!r}' AS DOUBLE)), CAST({low} AS DOUBLE)), "
        f"CAST({high} AS DOUBLE)) END AS BIGINT))",
        v=value,
    )


def _listed(source: exp.Select, by: list[str]) -> str:
    """Return the aggregate that collects a column's values in a list."""
    if source.find(exp.Join) is None:  # as many as a file has
        return "LIST(CAST({x} AS BIGINT))"
    key = ", ".join(f'"{name}"' for name in by)
    return f"ARG_MIN(CAST({{x}} AS BIGINT), HASH({key}, {{x}}), {MAX_ROWS})"


def _partials(i: int, function: Function, grid: Grid, rows: int, listed: str) -> list[exp.Expr]:
    x, low, high = f'"x_{i}"', grid.low, grid.high
    if function.kind in ("var", "stddev", "quantiles"):
        values = f"LIST_SORT({listed.format(x=x)} FILTER(WHERE NOT {x} IS NULL))"
        texts = {f"rows_{i}": f"COALESCE({values}, CAST([] AS BIGINT[]))"}
    elif function.kind == "mean":
        n, most = f"COUNT({x})", 1 if function.per == "group" else rows
        # In a group's sum a value beyond the bounds counts with its own size, as in its mean.
        add = f"COALESCE(SUM({x} - CAST({grid.middle} AS HUGEINT)), 0)"
        scaled = f"CASE WHEN {n} > {most} THEN ({add} * {most}) // {n} ELSE {add} END"
        bound = f"LEAST({n}, {most})"
        texts = {
            f"value_{i}": f"CAST(LEAST(GREATEST({scaled}, {bound} * ({low - grid.middle})), "
            f"{bound} * ({high - grid.middle})) AS BIGINT)",
            f"count_{i}": f"CAST({bound} AS BIGINT)",
        }
    else:
        calls = {"count": f"COUNT({x})", "distinct": f"COUNT(DISTINCT {x})"}
        total = calls.get(function.kind, f"SUM({x})")
        if function.kind == "sum" and function.per == "row":
            low, high = min(low, 0) * rows, max(high, 0) * rows
        # LEAST and GREATEST skip a NULL: without the CASE nothing would become a bound.
        texts = {
            f"value_{i}": f"CASE WHEN COUNT({x}) > 0 THEN "
            f"CAST(LEAST(GREATEST({total}, {low}), {high}) AS BIGINT) END"
        }
    if function.kind == "distinct":
        values = f"LIST_DISTINCT({listed.format(x=x)} FILTER(WHERE NOT {x} IS NULL))"
        texts[f"rows_{i}"] = f"COALESCE(LIST_SORT({values}), CAST([] AS BIGINT[]))"
    return [exp.alias_(duckdb(text), name, quoted=True) for name, text in texts.items()]
