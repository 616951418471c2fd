"""The private part of a statement in its canonical form, which identifies it.

Two statements whose private SELECTs differ only in names and order ask one question, and must get
one answer.  So the private part has no name that a statement chose: relations are ``t0``, ``t1``
and so on in the order of FROM, columns of subqueries ``c0`` and so on, groups ``group_0`` and
functions ``function_0``, each sorted by its text, without duplicates.  A subquery that only passes
on columns is the relation that it reads.

**What is executed is the canonical form**, and its text is what the question's digest covers.  So
two questions that differ in what is computed have two digests, whatever a mistake here would do.
The noise of a group or a function is named by the question's digest and by the canonical name,
which is its rank in the set of all: neither a label nor a place in a select list decides.

Predicates stay as they are written: two spellings of one condition are two questions.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace
from sqlglot import ErrorLevel, exp
from sqlglot.errors import UnsupportedError

from dpstream.accounting.errors import instance
from dpstream.pipelines.statements.dialect import DpSql
from dpstream.pipelines.statements.errors import refusal
from dpstream.pipelines.statements.functions import Function
from dpstream.pipelines.statements.statement import Group, PrivateSelect, Statement


class Canonical(NamedTuple):
    """The canonical form of a statement's private part.

    Attributes:
        select: the private part; its groups and functions have canonical names.
        names: by each label of the statement's groups and functions its canonical name.
    """

    select: PrivateSelect
    names: dict[str, str]


def canonical_form(statement: Statement) -> Canonical:
    """Return the canonical form of a checked statement."""
    source = statement.source.copy()
    expressions = {group.name: group.expression for group in statement.groups}
    expressions |= {f.name: f.argument for f in statement.functions if f.argument is not None}
    source.set("expressions", [node.copy() for node in (statement.unit, *expressions.values())])
    _rename_sources(source)
    unit, *nodes = source.expressions
    by_label = dict(zip(expressions, nodes, strict=True))
    source.set("expressions", [])
    groups = [replace(g, name="", expression=by_label[g.name]) for g in statement.groups]
    functions = [
        replace(f, name="", argument=by_label.get(f.name), report="") for f in statement.functions
    ]
    new_groups, names = _named("group", groups, group_text)
    new_functions, function_names = _named("function", functions, function_text)
    labels = [*(g.name for g in statement.groups), *(f.name for f in statement.functions)]
    select = PrivateSelect(
        statement.options,
        source,
        unit,
        new_groups,
        new_functions,
        _public(statement.public, names),
    )
    return Canonical(select, dict(zip(labels, names + function_names, strict=True)))


def sql(node: exp.Expr | None) -> str | None:
    """Return the text of an expression, without comments and white space.

    Raises:
        DpstreamError: the text would leave out a part of the expression.
    """
    if node is None:
        return None
    try:
        return str(node.sql(DpSql, comments=False, unsupported_level=ErrorLevel.RAISE))
    except UnsupportedError:
        raise refusal("not-supported") from None


def group_text(group: Group) -> str:
    """Return the text of a group, without its name."""
    return _json([sql(group.expression), group.type.value])


def function_text(function: Function) -> str:
    """Return the text of a function, without its name and its report."""
    bounds = [function.low, function.high, function.per, function.norm]
    return _json([function.kind, sql(function.argument), *bounds, function.at, function.many])


def _json(parts: list[object]) -> str:
    return msgspec.json.encode(parts).decode()


Part = TypeVar("Part", Group, Function)


def _named(
    word: str, parts: Sequence[Part], text_of: Callable[[Part], str]
) -> tuple[tuple[Part, ...], list[str]]:
    """Return the parts with their names, each once, and the name of each given part."""
    by_text = {text_of(part): part for part in parts}
    names = {text: f"{word}_{rank}" for rank, text in enumerate(sorted(by_text))}
    named = tuple(replace(by_text[text], name=name) for text, name in names.items())
    return named, [names[text_of(part)] for part in parts]


def _public(query: exp.Query | None, names: Sequence[str]) -> exp.Query | None:
    """Return the query of the public groups with its columns in the order of the groups.

    Args:
        names: the group's name of each of its columns.
    """
    if query is None:
        return None
    select = instance(query.copy(), exp.Select)
    columns = dict(zip(names, select.expressions, strict=True))
    select.set("expressions", [columns[f"group_{rank}"] for rank in range(len(columns))])
    _rename_sources(select)
    return select


def _rename_sources(select: exp.Select) -> None:
    """Give the relations of a SELECT, and all in them, their canonical names."""
    sources = dict[str, tuple[str, dict[str, str] | None]]()
    joins = select.args.get("joins") or []
    first = select.args.get("from_")  # a constant has none
    for number, part in enumerate((*([] if first is None else [first]), *joins)):
        written, columns = part.this.alias_or_name, None
        if isinstance(part.this, exp.Subquery):
            columns = _rename_columns(part.this)
            relation, columns = _passed_on(part.this, columns)
            part.set("this", relation)
        alias = exp.to_identifier(f"t{number}", quoted=True)
        part.this.set("alias", exp.TableAlias(this=alias))
        sources[written] = alias.name, columns
    for join in joins:
        if join.kind.upper() in ("INNER", "OUTER"):  # words that change nothing
            join.set("kind", None)
    clauses = [select.args.get(clause) for clause in ("where", "group", "having")]
    for node in (*select.expressions, *clauses, *(join.args.get("on") for join in joins)):
        for column in () if node is None else node.find_all(exp.Column):
            name, columns = sources[column.table]
            column.set("table", exp.to_identifier(name, quoted=True))
            if columns is not None:
                column.set("this", exp.to_identifier(columns[column.name], quoted=True))


def _rename_columns(query: exp.Expr, placed: bool = False) -> dict[str, str]:
    """Give the columns of a subquery, and all in it, their canonical names.

    Args:
        placed: whether columns are known by their place, as in a set operation.

    Returns:
        the new names by the written ones.
    """
    if isinstance(query, exp.Subquery):
        return _rename_columns(query.this, placed)
    if isinstance(query, exp.SetOperation):
        _rename_columns(query.right, placed=True)
        return _rename_columns(query.left, placed=True)
    select = instance(query, exp.Select)
    _rename_sources(select)
    texts = {
        item.alias_or_name: f"{place:05}" if placed else str(sql(item.unalias()))
        for place, item in enumerate(select.expressions)
    }
    by_text = dict(zip(texts.values(), select.expressions, strict=True))
    order = {text: f"c{i}" for i, text in enumerate(sorted(by_text))}
    items = [exp.alias_(by_text[text].unalias(), name, quoted=True) for text, name in order.items()]
    select.set("expressions", items)
    return {name: order[text] for name, text in texts.items()}


def _passed_on(subquery: exp.Subquery, columns: dict[str, str]) -> tuple[exp.Expr, dict[str, str]]:
    """Return the relation that a subquery only passes on, else the subquery.

    Args:
        columns: the names of the subquery's columns by the written ones.

    Returns:
        (relation, the names of its columns by the written ones).
    """
    query = subquery.unnest()
    parts = {part for part, value in query.args.items() if value}
    items = query.args.get("expressions") or []
    if parts != {"expressions", "from_"} or not all(
        isinstance(item.unalias(), exp.Column) for item in items
    ):
        return subquery, columns
    passed = {item.alias: item.unalias().name for item in items}
    return query.args["from_"].this, {old: passed[new] for old, new in columns.items()}
