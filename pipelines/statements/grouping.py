"""ROLLUP, CUBE and GROUPING SETS of a private SELECT, as private SELECTs that group plainly.

They get no mechanism of their own, so that `ownership` and the plan see only what has its proof.

* **Selected groups**: a private SELECT for each set, combined by UNION ALL, with an equal part of
  epsilon and delta.  Groups, bounds and thresholds are those of each set, as if it were asked
  alone; the guarantee of all is at most the sum.
* **Public groups**: one private SELECT by all columns, the finest cells, and a sum of its noisy
  cells for each set.  A unit is in at most k finest cells, whatever is added up afterwards, so that
  totals cost nothing, and are consistent; their noise is that of as many cells.  Bounds hold in the
  finest cells.  Only COUNT and SUM add up.

A column that a set does not group by is NULL there, and GROUPING of it is 1.
"""

import itertools
from collections.abc import Mapping

from sqlglot import exp

from dpstream.pipelines.statements.allowed import GROUPINGS, require
from dpstream.pipelines.statements.dialect import Private
from dpstream.pipelines.statements.functions import number

#: Private SELECTs of one statement, and sets of one SELECT.
MAX_SELECTS = 16
_CALLS = (exp.AggFunc, Private)
_SUMMED = ("COUNT", "SUM", "ANON_COUNT", "ANON_SUM")
_CELLS = "finest"
#: What takes the place of an expression.
_Places = dict[exp.Expr, exp.Expr]
_Columns = tuple[exp.Expr, ...]


def set_apart(core: exp.Select, defaults: Mapping[str, float]) -> exp.Query:
    """Return a query that groups plainly and gives the rows of all sets; another SELECT as it is.

    Args:
        core: a private SELECT.
        defaults: options of the data set.

    Raises:
        DpstreamError: a set, a function or a clause has no such form.
    """
    group = core.args.get("group")
    if group is None or not any(isinstance(item, GROUPINGS) for item in group.expressions):
        return core
    names = [item.alias_or_name or f"f{i}_" for i, item in enumerate(core.expressions)]
    items = zip(core.expressions, names, strict=True)
    core.set("expressions", [exp.alias_(item.unalias().copy(), name) for item, name in items])
    named = {item.alias: item.this for item in core.expressions}
    parts = itertools.product(*(_sets(item, named) for item in group.expressions))
    sets = [tuple(dict.fromkeys(column for part in one for column in part)) for one in parts]
    columns = tuple(dict.fromkeys(column for one in sets for column in one))
    plain = not any(core.args.get(part) for part in ("having", "limit", "offset", "distinct"))
    require(plain and columns and len(sets) <= MAX_SELECTS, "grouping-sets", group)
    order = core.args.get("order")
    core.set("order", None)
    words = {o.name: o.expression.name.upper() for o in core.args["hint"].expressions}
    public = words.get("group_selection_strategy") == "PUBLIC_GROUPS"
    cells, summed = _finest(core, columns) if public else (core, {})
    query: exp.Query | None = None
    for one in sets:
        here = {column: summed[column] for column in one} if public else {}
        part = cells.copy() if public else _sharing(core, defaults, len(sets))
        by = [here.get(column, column).copy() for column in one]
        part.set("group", exp.Group(expressions=by) if by else None)
        places = summed | here
        for column in columns:
            absent = column not in one
            spelled = (column.copy(), *(exp.column(n) for n, e in named.items() if e == column))
            zero_or_one = exp.Literal.number(int(absent))
            places |= {exp.Grouping(expressions=[of]): zero_or_one for of in spelled}
            places |= {column: exp.Null()} if absent else {}
        part.set("expressions", [_replaced(item.copy(), places) for item in core.expressions])
        query = part if query is None else exp.Union(this=query, expression=part, distinct=False)
    query.set("order", order)  # type: ignore[union-attr]
    return query  # type: ignore[return-value]


def _sets(item: exp.Expr, named: Mapping[str, exp.Expr]) -> list[_Columns]:
    """Return the sets of columns that an element of GROUP BY stands for."""
    if isinstance(item, exp.GroupingSets):
        return [one for inner in item.expressions for one in _sets(inner, named)]
    if isinstance(item, exp.Rollup | exp.Cube | exp.Tuple):
        parts = [_sets(inner, named)[0] for inner in item.expressions]
        sizes = range(len(parts), -1, -1)
        chosen = [parts[:size] for size in sizes]
        if isinstance(item, exp.Cube):
            chosen = [list(c) for size in sizes for c in itertools.combinations(parts, size)]
        chosen = chosen[:1] if isinstance(item, exp.Tuple) else chosen
        return [tuple(column for part in one for column in part) for one in chosen]
    item = item.unnest()
    alias = isinstance(item, exp.Column) and not item.table and item.name in named
    return [(named[item.name] if alias else item,)]


def _sharing(core: exp.Select, defaults: Mapping[str, float], sets: int) -> exp.Select:
    """Return the private SELECT with an equal part of its budget."""
    part = core.copy()
    options = {option.name: option for option in part.args["hint"].expressions}
    for name in ("epsilon", "delta"):
        left_out = name not in options and name in defaults and "within" not in options
        default = exp.Literal.number(repr(defaults[name])) if left_out else None
        value = number(options[name].expression if name in options else default)
        if value is not None:
            given = exp.PropertyEQ(this=exp.var(name), expression=exp.Literal.number(value / sets))
            options[name] = given
    part.args["hint"].set("expressions", list(options.values()))
    return part


def _finest(core: exp.Select, columns: _Columns) -> tuple[exp.Select, _Places]:
    """Return a SELECT from the private one by all columns, and what is taken of its cells."""
    each = (call for item in core.expressions for call in item.find_all(*_CALLS))
    calls = list(dict.fromkeys(call for call in each if not isinstance(call, exp.Grouping)))
    for call in calls:
        name = call.name.upper() if isinstance(call, Private) else call.key.upper()
        require(name in _SUMMED and call.find(exp.Distinct) is None, "grouping-sets", call)
    cells, nodes = core.copy(), (*columns, *calls)
    items = [exp.alias_(node.copy(), f"c{i}") for i, node in enumerate(nodes)]
    cells.set("expressions", items)
    cells.set("group", exp.Group(expressions=[column.copy() for column in columns]))
    places: _Places = {node: exp.column(f"c{i}", table=_CELLS) for i, node in enumerate(nodes)}
    alias = exp.TableAlias(this=exp.to_identifier(_CELLS))
    source = exp.Select(from_=exp.From(this=exp.Subquery(this=cells, alias=alias)))
    return source, places | {call: exp.Sum(this=places[call]) for call in calls}


def _replaced(item: exp.Expr, places: _Places) -> exp.Expr:
    """Put what takes their place for parts of an item, but within functions."""
    for child in list(item.iter_expressions()):
        if child in places:
            child.replace(places[child].copy())
        elif not isinstance(child, _CALLS):
            _replaced(child, places)
    return item
