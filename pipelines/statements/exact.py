"""Queries for DuckDB in a form that no row can make fail and that no order can change.

`ownership` proves what a relation is; here its operators get the form that the proof relies on:
expressions that give NULL instead of an error, sums over sorted values, tables without the rows
that have no unit.
"""

import itertools

from sqlglot import exp

from dpstream.accounting.errors import required
from dpstream.pipelines.statements.forms import DECIMALS, FLOATS, decimal, duckdb, exact, type_of
from dpstream.pipelines.statements.ownership import GROUPABLE
from dpstream.pipelines.tables.catalog import Catalog, Table

#: Types whose equality cannot fail: DuckDB casts one of two decimals, which can.
_EQUATED = GROUPABLE - set(DECIMALS)
_COMPUTED = (exp.Window, exp.AggFunc)
_ZEROS = (exp.Min, exp.Max, exp.Count)
#: Nodes that cannot fail.
_PLAIN = (exp.Column, exp.Literal, exp.Boolean, exp.Null, exp.Try, exp.Star)


def safe_query(node: exp.Select) -> exp.Select:
    """Return a copy of a query that no row makes fail and whose rows' order changes no result."""
    node = node.copy()
    for select in list(node.find_all(exp.Select)):
        _safe_select(select, _combined(select))
    return node


def _combined(node: exp.Expr) -> bool:
    """Whether a query's rows go into a set operation."""
    up = node.parent
    while isinstance(up, exp.Subquery):
        up = up.parent
    return isinstance(up, exp.SetOperation)


def _loses_duplicates(node: exp.Expr) -> bool:
    """Whether equal rows of a SELECT can become one, or be compared with rows of another."""
    up, compared = node.parent, node.args.get("distinct") is not None
    while isinstance(up, exp.Subquery | exp.SetOperation):
        compared = compared or not isinstance(up, exp.Union | exp.Subquery)
        compared = compared or bool(up.args.get("distinct"))
        up = up.parent
    return compared


def one_of_equals(node: exp.Expr) -> exp.Expr:
    """Return a float in one form for equal values: else the order of rows decides which is left."""
    return duckdb("CASE WHEN ISNAN(:x) THEN CAST('NaN' AS DOUBLE) ELSE :x + 0 END", x=node.copy())


def _safe_select(node: exp.Select, combined: bool = False) -> None:
    loses = _loses_duplicates(node)
    floats = [loses and type_of(item.unalias()) in FLOATS for item in node.expressions]
    for join in node.args.get("joins") or ():
        if join.args.get("on") is not None:
            join.set("on", _condition(join.args["on"]))
    where = node.args.get("where")
    if where is not None:
        where.set("this", _condition(where.this))
    windows = any(item.find(exp.Window) for item in node.expressions)
    if (
        windows
        or node.args.get("group") is not None
        or any(item.find(exp.AggFunc) for item in node.expressions)
    ):
        _regroup(node, windows)
    else:
        node.set("expressions", [_item(item) for item in node.expressions])
    if node.args.get("order") is not None:
        for key in node.args["order"].expressions:
            key.set("this", tried(key.this))
    if combined:  # set operations cast decimals of two widths to a third
        node.set("expressions", [_widened(item) for item in node.expressions])
    for item, is_float in zip(node.expressions, floats, strict=True):
        if is_float:
            form = one_of_equals(item.unalias())
            item.replace(exp.alias_(form, item.alias_or_name, quoted=True))


def _widened(item: exp.Expr) -> exp.Expr:
    column = item.unalias()
    if isinstance(column, exp.Column) and type_of(column) in DECIMALS:
        cast = exp.TryCast(this=column.copy(), to=decimal())
        return exp.alias_(cast, item.alias_or_name, quoted=True)
    return item


def _regroup(node: exp.Select, windows: bool = False) -> None:
    """Two levels: groups with their counts, extremes and lists of values, or rows with their
    windows, none of which can fail; and above them, under TRY, everything that is computed from
    these."""
    group, having, order = (node.args.get(part) for part in ("group", "having", "order"))
    groups = [] if group is None else list(group.expressions)
    items = (*node.expressions, *(part for part in (having, order) if part is not None))
    columns = dict.fromkeys(c for item in items for c in item.find_all(exp.Column) if c.table)
    replacements: dict[exp.Expr, tuple[exp.Expr, exp.Expr]] = {
        item: (_typed(item), _above(f"g{i}", item))
        for i, item in enumerate(columns if windows else groups)
    }
    kind, collected = (exp.Window, _window) if windows else (exp.AggFunc, _collected)
    for call in (call for item in items for call in item.find_all(kind)):
        if call not in replacements:
            replacements[call] = collected(call, f"a{len(replacements)}")
    outputs = [
        exp.alias_(_over(i.unalias().copy(), replacements), i.alias_or_name, quoted=True)
        for i in node.expressions
    ]
    inner = exp.Select(
        expressions=[
            exp.alias_(below.copy(), f"{above.meta['name']}", quoted=True)
            for below, above in replacements.values()
        ],
        **{part: node.args.get(part) for part in ("from_", "joins", "where")},
    )
    if groups:
        inner.set("group", exp.Group(expressions=[replacements[g][0].copy() for g in groups]))
    alias = exp.TableAlias(this=exp.to_identifier("grouped"))
    for part in ("joins", "group", "where", "having"):
        node.set(part, None)
    node.set("from_", exp.From(this=exp.Subquery(this=inner, alias=alias)))
    node.set("expressions", [_item(item) for item in outputs])
    if having is not None:
        node.set("where", exp.Where(this=_condition(_over(having.this.copy(), replacements))))
    if order is not None:
        node.set("order", _over(order, replacements))


def _window(node: exp.Expr, name: str) -> tuple[exp.Expr, exp.Expr]:
    """A window over operands that are NULL where they fail, nothing else in which can, and its
    column."""
    window, order = node.copy(), node.args.get("order")
    keys = [key.this for key in window.args["order"].expressions] if order is not None else []
    call, default = window.this, window.this.args.get("default")
    value = call.this.expressions[0] if isinstance(call.this, exp.Distinct) else call.this
    kind = None if value is None else type_of(value)
    for part in (value, *(window.args.get("partition_by") or ()), *keys):
        if isinstance(part, exp.Expr) and not isinstance(part, exp.Star):
            new = tried(part.copy())
            zeros = part is value and kind in FLOATS and isinstance(call, _ZEROS)
            part.replace(_one_zero(new) if zeros else new)
    if default is not None:  # DuckDB casts it to the type of the value, which can fail
        default.replace(tried(default.copy(), kind))
    return window, _above(name, node)


def _one_zero(node: exp.Expr) -> exp.Expr:
    """-0.0 and 0.0 are equal: which of them comes first would depend on the order."""
    return exp.Add(this=node, expression=exp.Literal.number(0))


def _above(name: str, expression: exp.Expr) -> exp.Expr:
    column = exp.column(name, table="grouped", quoted=True)
    column.type = expression.type
    column.meta["name"] = name
    return column


def _over(node: exp.Expr, replacements: dict[exp.Expr, tuple[exp.Expr, exp.Expr]]) -> exp.Expr:
    """The expression over the columns of the groups."""
    if node in replacements:
        new = replacements[node][1].copy()
        new.type = node.type
        return new
    for child in list(node.iter_expressions()):
        new = _over(child, replacements)
        if new is not child:
            child.replace(new)
    return node


def _collected(node: exp.Expr, name: str) -> tuple[exp.Expr, exp.Expr]:
    """What a group keeps for an aggregate, and the aggregate from that: functions of the multiset
    of values.  Values that are summed are sorted first."""
    value, above = node.this, _above(name, node)
    call = node.copy()
    if isinstance(value, exp.Distinct):
        call.this.set("expressions", [tried(item.copy()) for item in value.expressions])
    elif isinstance(node, exp.Sum | exp.Avg):
        call = exp.Anonymous(this="LIST", expressions=[tried(value.copy())])
        function = "LIST_SUM" if isinstance(node, exp.Sum) else "LIST_AVG"
        ordered = exp.Anonymous(this="LIST_SORT", expressions=[above])
        total = exp.Anonymous(this=function, expressions=[ordered])
        total.meta["name"] = name
        return call, total
    elif not isinstance(value, exp.Star):
        call.set("this", _typed(value))
    if isinstance(node, exp.Min | exp.Max) and (
        type_of(value) is None or type_of(value) in (*FLOATS, exp.DType.UNKNOWN)
    ):
        call = _one_zero(call)
    return call, above


def _item(item: exp.Expr) -> exp.Expr:
    return exp.alias_(_typed(item.unalias()), item.alias_or_name, quoted=True)


def _typed(node: exp.Expr) -> exp.Expr:
    return tried(node.copy(), type_of(node) or exp.DType.UNKNOWN)


def _condition(node: exp.Expr) -> exp.Expr:
    """Parts of AND one by one, so that an equality of columns can still be a hash join."""
    if isinstance(node, exp.And):
        return exp.and_(*(_condition(part.copy()) for part in node.flatten()), copy=False)
    if isinstance(node, exp.Paren):
        return exp.Paren(this=_condition(node.this))
    if isinstance(node, exp.EQ) and _same(node.left, node.right):
        if type_of(node.left) in FLOATS:  # DuckDB's NaN equals itself
            return duckdb("(:e AND NOT ISNAN(:x))", e=node, x=node.left.copy())
        return node
    return tried(node)


def _same(one: exp.Expr, other: exp.Expr) -> bool:
    """Columns of one type whose equality cannot fail: every column has the type it is said to."""
    columns = isinstance(one, exp.Column) and isinstance(other, exp.Column)
    kind = type_of(one)
    return columns and kind == type_of(other) and (kind in _EQUATED or kind in FLOATS)


def tried(node: exp.Expr, kind: exp.DType | None = None) -> exp.Expr:
    """Return the expression, NULL where it fails; of DuckDB's type for ``kind``, if that is
    given.
    """
    if isinstance(node, exp.Column):
        return node
    body = exact(node)
    if not isinstance(body, _PLAIN):
        body = exp.Try(this=body)
    to = None if kind is None else _data_type(kind)
    return body if to is None else exp.TryCast(this=body, to=to)


def _data_type(kind: exp.DType) -> exp.DataType | None:
    """What a computed column is cast to.  Where DuckDB has a decimal for what is a float in
    GoogleSQL, two of them would meet in a third, which not all values fit in."""
    if kind in DECIMALS:
        return decimal()
    if kind in FLOATS or kind == exp.DType.UNKNOWN:
        return exp.DataType(this=exp.DType.DOUBLE)
    return exp.DataType(this=kind) if kind in GROUPABLE else None


def tables_by_unit(query: exp.Select, catalog: Catalog) -> exp.Select:
    """Return the query with every table as its rows that have a unit.

    The unit is added where it comes by a path.
    """
    for node in list(query.find_all(exp.Table)):
        table = catalog.tables[node.name]
        if table.unit is not None:
            alias = exp.TableAlias(this=exp.to_identifier(node.alias_or_name, quoted=True))
            node.replace(exp.Subquery(this=_owned(table, catalog), alias=alias))
    return query


def _owned(table: Table, catalog: Catalog) -> exp.Select:
    """All columns of a private table's rows that have a unit, the unit among them."""
    chain, at = [table], table
    while at.via is not None:
        at = catalog.tables[at.via.table]
        chain.append(at)
    unit = required(at.unit, "a chain ends at a table with a unit")
    owner = exp.column(unit, table=f"t{len(chain) - 1}", quoted=True)
    items: list[exp.Expr] = [exp.column(c, table="t0", quoted=True) for c in table.columns]
    if table.via is not None:
        items.append(exp.alias_(owner.copy(), table.unit or "", quoted=True))
    query = exp.Select(
        expressions=items,
        from_=exp.From(this=_named(table, 0)),
        where=exp.Where(this=exp.Not(this=exp.Is(this=owner, expression=exp.Null()))),
    )
    for place, (child, parent) in enumerate(itertools.pairwise(chain)):
        via = required(child.via, "a table of the chain refers to the next")
        on = exp.and_(
            *(
                exp.EQ(
                    this=_key(child, column, place),
                    expression=_key(parent, key, place + 1),
                )
                for column, key in via.on
            )
        )
        query.append("joins", exp.Join(this=_named(parent, place + 1), on=on))
    return query


def _key(table: Table, column: str, place: int) -> exp.Expr:
    """A column of a key; decimals in one width."""
    node = exp.column(column, table=f"t{place}", quoted=True)
    if table.columns[column] == "NUMERIC":
        return exp.TryCast(this=node, to=decimal())
    return node


def _named(table: Table, place: int) -> exp.Expr:
    alias = exp.TableAlias(this=exp.to_identifier(f"t{place}"))
    return exp.Table(this=exp.to_identifier(table.name, quoted=True), alias=alias)
