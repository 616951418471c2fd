"""Spellings: forms of GoogleSQL that mean the same as another one, which takes their place.

Everything after this sees one form, so that a rule and an identity are never doubled:

* ``COUNTIF(c)`` and ``f(x) FILTER (WHERE c)`` are ``COUNT(IF(c, 1, NULL))``
  and ``f(IF(c, x, NULL))``: the aggregates here ignore NULL;
* ``ANY_VALUE(x)`` of a subquery is ``MIN(x)``: any value is right, this one depends on no order;
* ``r'...'`` is the text that it is; ``x IN UNNEST([a, b])`` is ``x IN (a, b)``;
* ``UNNEST([a, b]) AS p`` in FROM is ``SELECT a AS p UNION ALL SELECT b``, a public relation;
* ``DATE(t, zone)`` and FORMAT_ functions with a zone are those of ``t AT TIME ZONE zone``, and
  ``EXTRACT(DATE FROM t)`` is ``DATE(t)``;
* ``RANGE_BUCKET(x, [a, b])`` of a column is ``CASE WHEN x < a THEN 0 WHEN x < b THEN 1 ..``;
* ``(column)`` is the column; joins in parentheses stand without them, where all are inner joins,
  which have one meaning in any order, or where they come first.
"""

import itertools
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from sqlglot import exp

from dpstream.pipelines.statements.dialect import Clamped, Private, WithReport


def spelled(tree: exp.Expr) -> exp.Expr:
    """Return the tree with every form in its one spelling."""
    for node in reversed(list(tree.walk())):  # the innermost first
        make = _SPELLINGS.get(type(node))
        new = None if make is None else make(node)
        if new is not None:
            new.meta.update(node.meta)
            tree = new if node is tree else tree
            if new is not node and node.parent is not None:
                node.replace(new)
    return tree


def _if(condition: exp.Expr, value: exp.Expr) -> exp.Expr:
    return exp.If(this=condition, true=value, false=exp.Null())


def _filtered(node: exp.Filter) -> exp.Expr:
    """Return the aggregate with its operand where the condition holds, and NULL elsewhere."""
    call, condition = node.this, node.expression.this
    at = call.expressions[0] if isinstance(call, Private) else call.this
    while isinstance(at, Clamped | WithReport):
        at = at.this
    if isinstance(at, exp.Distinct):
        at = at.expressions[0]
    star = isinstance(at, exp.Star)
    place = exp.Placeholder()
    at.replace(place)
    place.replace(_if(condition.copy(), exp.Literal.number(1) if star else at))
    return call


def _zoned(node: exp.Expr) -> exp.Expr | None:
    """DATE and FORMAT_ of an instant in a zone."""
    zone, value = node.args.get("zone"), node.this
    if isinstance(node, exp.TimeToStr):
        value = value.this  # what sqlglot takes for a cast
        node.set("this", value)
    if isinstance(zone, exp.Literal) and zone.name != "UTC" and not node.expressions:
        node.set("this", exp.AtTimeZone(this=value.copy(), zone=zone))
        node.set("zone", None)
    return node


def _private_count_if(node: Private) -> exp.Expr | None:
    if node.name.upper() != "COUNTIF" or not node.expressions:
        return None
    counted = _if(node.expressions[0], exp.Literal.number(1))
    return Private(this=exp.var("COUNT"), expressions=[counted, *node.expressions[1:]])


def _counted(node: exp.Array) -> exp.Expr | None:
    """A list of literals is not NULL, which is all that COUNT asks of it."""
    above = node.parent
    while isinstance(above, Clamped | WithReport):
        above = above.parent
    called = above is not None and above.name.upper() if isinstance(above, Private) else ""
    counts = isinstance(above, exp.Count) or called in ("COUNT", "ANON_COUNT")
    return exp.Literal.number(1) if counts and node.expressions else None


def _any(node: exp.AnyValue) -> exp.Expr | None:
    select = node.find_ancestor(exp.Select)
    private = select is None or select.args.get("hint") is not None
    return None if private or isinstance(node.this, exp.HavingMax) else exp.Min(this=node.this)


def _elements(node: exp.Expr) -> list[exp.Expr]:
    """Return the elements of UNNEST([..]) of literals; nothing for any other."""
    arrays = node.expressions
    plain = len(arrays) == 1 and isinstance(arrays[0], exp.Array) and not node.args.get("offset")
    elements = arrays[0].expressions if plain else []
    literal = all(isinstance(e, exp.Literal | exp.Neg | exp.Boolean) for e in elements)
    return [element.copy() for element in elements] if literal else []


def _listed(node: exp.In) -> exp.Expr | None:
    elements = _elements(node.args["unnest"]) if node.args.get("unnest") else []
    return exp.In(this=node.this, expressions=elements) if elements else None


def _relation(node: exp.Unnest) -> exp.Expr | None:
    elements, alias = _elements(node), node.args.get("alias")
    names = [] if alias is None else alias.args.get("columns") or []
    if not elements or len(names) != 1 or not isinstance(node.parent, exp.From | exp.Join):
        return None
    first, *others = (
        exp.Select(expressions=[exp.Alias(this=element, alias=names[0].copy())])
        for element in elements
    )
    query: exp.Query = first
    for other in others:
        query = exp.Union(this=query, expression=other, distinct=False)
    return exp.Subquery(this=query, alias=exp.TableAlias(this=names[0].copy()))


#: Ranges of a RANGE_BUCKET.
_MAX_RANGES = 1_000


def _bucketed(node: exp.RangeBucket) -> exp.Expr | None:
    """RANGE_BUCKET of a column and rising literals; NaN is below all numbers."""
    column, array = node.this.unnest(), node.expression
    edges = array.expressions
    if isinstance(array, exp.GenerateSeries):
        edges = _series(array.args["start"], array.args["end"], array.args.get("step"))
    values = [edge.to_py() for edge in edges if edge.is_number or edge.is_string]
    alike = len({isinstance(value, str) for value in values}) == 1 and len(values) == len(edges)
    rises = alike and all(a < b for a, b in itertools.pairwise(values))
    if not (isinstance(column, exp.Column) and rises and len(edges) <= _MAX_RANGES):
        return None
    below = [exp.LT(this=column.copy(), expression=edge.copy()) for edge in edges]
    above = exp.GTE(this=column.copy(), expression=edges[-1].copy())
    absent = exp.Not(this=exp.Is(this=column.copy(), expression=exp.Null()))
    numbers = [*range(len(edges) + 1), 0]
    tests = zip([*below, above, absent], numbers, strict=True)
    return exp.Case(ifs=[exp.If(this=t, true=exp.Literal.number(i)) for t, i in tests])


def _series(start: exp.Expr, end: exp.Expr, step: exp.Expr | None) -> list[exp.Expr]:
    """Return the numbers of GENERATE_ARRAY; none if they are too many, or a part is no literal."""
    parts = [part for part in (start, end, step or exp.Literal.number(1)) if part.is_number]
    if len(parts) < 3:
        return []
    low, high, by = (Decimal(part.sql()) for part in parts)
    if by <= 0 or (high - low) / by >= _MAX_RANGES:
        return []
    texts = (format(low + by * i, "f") for i in range(int((high - low) / by) + 1))
    return [exp.maybe_parse(text) for text in texts]


def _flat(node: exp.Select) -> exp.Expr:
    """Take joins out of parentheses; what joined the parentheses is a condition of WHERE."""
    joins = list[exp.Expr]()
    for part in filter(None, (node.args.get("from_"), *(node.args.get("joins") or ()))):
        table, first = part.this.this, isinstance(part, exp.From)
        inner = table.args.get("joins") or () if isinstance(table, exp.Table) else ()
        plain = first or not any(join.side or join.args.get("using") for join in (part, *inner))
        if inner and plain and not part.this.alias:
            table.set("joins", None)
            part.set("this", table)
            if part.args.get("on") is not None:
                node.where(part.args["on"], copy=False)
                part.set("on", None)
        joins += [*([] if first else [part]), *inner]
    node.set("joins", joins or None)
    return node


_SPELLINGS: dict[type[exp.Expr], Callable[[Any], exp.Expr | None]] = {
    exp.Array: _counted,
    exp.RawString: lambda node: exp.Literal.string(node.this),
    exp.Paren: lambda node: node.this if isinstance(node.this, exp.Column) else None,
    exp.Filter: _filtered,
    exp.CountIf: lambda node: exp.Count(this=_if(node.this, exp.Literal.number(1))),
    Private: _private_count_if,
    **dict.fromkeys((exp.Date, exp.TimeToStr), _zoned),
    exp.Extract: lambda n: exp.Date(this=n.expression) if n.name.upper() == "DATE" else None,
    exp.AnyValue: _any,
    exp.In: _listed,
    exp.Unnest: _relation,
    exp.RangeBucket: _bucketed,
    exp.Select: _flat,
}
