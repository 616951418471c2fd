"""Post-processing of released columns: their intervals, and the statement's outer query.

The outer query (HAVING, ORDER BY, LIMIT, arithmetic, joins with public tables) runs on the released
rows alone.  A column that the outer query passes on unchanged keeps its interval: three more
columns (sd, low, high), with names that no statement can write.
"""

from collections.abc import Iterable

import numpy as np
import pyarrow as pa
from sqlglot import exp

from dpstream.pipelines.sql.query_plan import Question, named_tables
from dpstream.pipelines.sql.receipt import MARK, PARTS, estimated
from dpstream.pipelines.sql.stage import StageAnswer
from dpstream.pipelines.statements.allowed import AGGREGATES
from dpstream.pipelines.statements.exact import safe_query
from dpstream.pipelines.tables.catalog import RELEASED, Catalog
from dpstream.pipelines.tables.engine import Engine
from dpstream.state.numbers import numbers

_AGGREGATES = tuple(AGGREGATES)


def released(question: Question, private_answer: StageAnswer) -> pa.Table:
    """Return the released relation with intervals; sorted, so that the order reveals nothing."""
    columns: dict[str, pa.Array | pa.ChunkedArray] = {}
    groups = private_answer.groups.values
    if groups is not None:
        chosen = groups.take(numbers(np.asarray(private_answer.answer.group, np.int64)))
        columns = dict(zip(chosen.column_names, chosen.columns, strict=True))
    for function in question.statement.functions:
        output = question.outputs[function.name]
        estimate = private_answer.answer.columns[output.column]
        absent = output.column in private_answer.nulls
        columns |= estimated(function.name, estimate, output.places, function.many, absent)
    table = pa.table(columns)
    by = [] if groups is None else groups.column_names
    return table.sort_by([(name, "ascending") for name in by]) if by else table


def empty(question: Question, types: Iterable[pa.DataType]) -> pa.Table:
    """Return a released relation without rows, to check the outer query on."""
    columns = {
        group.name: pa.nulls(0, kind)
        for group, kind in zip(question.statement.groups, types, strict=True)
    }
    for function in question.statement.functions:
        kind = pa.list_(pa.float64()) if function.many else pa.float64()
        for name in (function.name, *(f"{function.name}{MARK}{part}" for part in PARTS)):
            columns[name] = pa.nulls(0, kind)
    return pa.table(columns)


def outer(question: Question, catalog: Catalog, rows: pa.Table, check: bool = False) -> pa.Table:
    """Return the rows of the outer query, with the intervals of unchanged columns.

    Args:
        rows: the released relation.
        check: whether public tables are replaced by empty ones.
    """
    tree = question.statement.outer.copy()
    names = {f.name for f in question.statement.functions}
    _with_intervals(tree, names)
    tables = named_tables([tree], catalog)
    with Engine(catalog, tables, empty=check, ordered=True) as engine:
        engine.register(RELEASED, rows)
        return engine.run(safe_query(tree))  # type: ignore[arg-type]


def _with_intervals(node: exp.Expr, names: set[str]) -> set[str]:
    """Add the intervals of unchanged columns to a query; return the columns that have one."""
    if isinstance(node, exp.Subquery):
        return _with_intervals(node.this, names)
    if not isinstance(node, exp.Select):
        return set()
    aggregated = any(item.find(*_AGGREGATES) for item in node.expressions)
    if node.args.get("group") is not None or node.args.get("distinct") is not None or aggregated:
        return set()
    intervals: dict[str, set[str]] = {}
    for part in (node.args["from_"], *(node.args.get("joins") or ())):
        source = part.this
        if isinstance(source, exp.Table):
            intervals[source.alias_or_name] = names if source.name == RELEASED else set()
        else:
            intervals[source.alias_or_name] = _with_intervals(source, names)
    interval_columns = set()
    for item in list(node.expressions):
        column = item.unalias()
        if isinstance(column, exp.Column) and column.name in intervals.get(column.table, ()):
            interval_columns.add(item.alias_or_name)
            for part in PARTS:
                inner = exp.column(f"{column.name}{MARK}{part}", table=column.table, quoted=True)
                name = f"{item.alias_or_name}{MARK}{part}"
                node.append("expressions", exp.alias_(inner, name, quoted=True))
    return interval_columns
