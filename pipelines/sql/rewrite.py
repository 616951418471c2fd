"""Stage 1: one DuckDB query that gives a row per (unit, group) with whole-number partials.

**What a row has**: ``unit``; ``group_0``, ``group_1``, ... (the statement's groups, in order); and
for each function i, in order of `Statement.functions`:

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
out of it, and `forms` keeps from DuckDB what TRY does not catch.  Computed columns are cast to the
types that the validator found, so that a type it did not foresee cannot make a float of a group,
nor two decimals fail where they meet.  Texts that are put together and lists of values are bounded;
how many groups one unit has, and how long a query runs, are not.

**What the caller relies on** to register: tables under their catalog names with columns of the
catalog's types; time zone UTC.
"""

from collections.abc import Mapping
from typing import NamedTuple

from sqlglot import exp

from dpstream.pipelines.statements.exact import safe_query, tables_by_unit, tried
from dpstream.pipelines.statements.functions import Function
from dpstream.pipelines.statements.statement import Statement
from dpstream.pipelines.tables.catalog import Catalog

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
    statement: Statement, catalog: Catalog, grids: Mapping[str, tuple[float, int, int]]
) -> exp.Select:
    """Return the DuckDB query of a statement's partials (``.sql("duckdb")`` is its text).

    Args:
        statement: the checked statement.
        catalog: the catalog of its tables.
        grids: (step, low, high) of every function but units, by label; bounds in whole steps.
    """
    source = safe_query(statement.source)
    rows = [exp.alias_(statement.unit.copy(), "unit", quoted=True)]
    keys = [f"group_{i}" for i in range(len(statement.groups))]
    for key, group in zip(keys, statement.groups, strict=True):
        rows.append(exp.alias_(tried(group.expression.copy(), group.type), key, quoted=True))
    partials: list[exp.Expr] = []
    listed = _listed(source, ["unit", *keys])
    for i, function in enumerate(statement.functions):
        if function.kind == "units":
            continue
        grid = Grid(*grids[function.name])
        rows.append(exp.alias_(_per_row(function, grid), f"x_{i}", quoted=True))
        partials += _partials(i, function, grid, statement.options.rows, listed)
    source.set("expressions", rows)
    inner = exp.Subquery(this=source, alias=exp.TableAlias(this=exp.to_identifier("rows_of_units")))
    by = [exp.column(name, quoted=True) for name in ("unit", *keys)]
    query = exp.Select(
        expressions=[*(column.copy() for column in by), *partials],
        from_=exp.From(this=inner),
        group=exp.Group(expressions=by),
    )
    return tables_by_unit(query, catalog)


def columns(statement: Statement) -> list[str]:
    """Return the names of the columns of `stage_one`, in order."""
    names = ["unit", *(f"group_{i}" for i in range(len(statement.groups)))]
    for i, function in enumerate(statement.functions):
        kind = function.kind
        if kind in ("count", "sum", "mean"):
            names.append(f"value_{i}")
        if kind == "mean":
            names.append(f"count_{i}")
        if kind in ("var", "stddev", "quantiles"):
            names.append(f"rows_{i}")
    return names


def _sql(text: str, **parts: exp.Expr) -> exp.Expr:
    """Parse an expression of DuckDB with placeholders for its parts."""
    tree = exp.maybe_parse(text, dialect="duckdb")
    return exp.replace_placeholders(tree, **parts)


def _per_row(function: Function, grid: Grid) -> exp.Expr:
    """Return the whole number that a row adds: 1 or NULL for a count, grid steps for the others."""
    if function.argument is None:
        return exp.Literal.number(1)
    value = tried(function.argument.copy())
    if function.kind == "count":
        return _sql("CASE WHEN NOT :v IS NULL THEN 1 END", v=value)
    low, high = (grid.low, grid.high)
    if function.per == "group":
        low, high = -MAX_STEPS, MAX_STEPS
    text = (
        f"TRY(CAST(CASE WHEN ISFINITE(TRY_CAST(:v AS DOUBLE)) THEN LEAST(GREATEST(ROUND("
        f"TRY_CAST(:v AS DOUBLE) / CAST('{grid.step!r}' AS DOUBLE)), CAST({low} AS DOUBLE)), "
        f"CAST({high} AS DOUBLE)) END AS BIGINT))"
    )
    return _sql(text, v=value)


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
        total = f"COUNT({x})" if function.kind == "count" else f"SUM({x})"
        if function.kind == "sum" and function.per == "row":
            low, high = min(low, 0) * rows, max(high, 0) * rows
        # LEAST and GREATEST skip a NULL: without the CASE nothing would become a bound.
        texts = {
            f"value_{i}": f"CASE WHEN COUNT({x}) > 0 THEN "
            f"CAST(LEAST(GREATEST({total}, {low}), {high}) AS BIGINT) END"
        }
    return [exp.alias_(_sql(text), name, quoted=True) for name, text in texts.items()]
