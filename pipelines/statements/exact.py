"""Queries for DuckDB in a form that no row can make fail and that no order can change.

`ownership` proves what a relation is; here its operators get the form that the proof relies on:
expressions that give NULL instead of an error, sums over sorted values, tables without the rows
that have no unit.

**Forms** of GoogleSQL's nodes, where their meaning differs in DuckDB or they can fail.  Each is a
function of the node's operands alone, NULL where GoogleSQL has an error, and names each operand
once, or it is a column: a statement does not grow with its depth.  What TRY around it catches
(overflow, casts, bad patterns) is left to TRY; texts that grow are NULL beyond `MAX_TEXT` bytes,
and are not made before, because how much memory is used would tell of a row.

* CAST: TRY_CAST; floats to whole numbers round halves away from zero; 5.0 is the text ``5``.
* ``/``, ``%``, DIV: NULL for a divisor of 0, in parentheses.
* Comparisons of floats: NaN is not equal to, above or below anything (DuckDB's equals itself and is
  above all numbers).  IN, BETWEEN, NULLIF and CASE with an operand compare alike.  LEAST and
  GREATEST with a NaN are NaN, with a NULL they are NULL.
* CONCAT, ``||``, REPLACE: NULL beyond MAX_TEXT bytes.
* LIKE: a backslash escapes.  SUBSTR: from the first character if it begins before; NULL, as LEFT
  and RIGHT, for a length below 0.
* EXTRACT, TIMESTAMP_DIFF, DATE_ADD, DATE_SUB.
"""

import itertools
from collections.abc import Callable
from typing import Any

from sqlglot import exp

from dpstream.accounting.errors import required
from dpstream.pipelines.statements.ownership import GROUPABLE, type_of
from dpstream.pipelines.tables.catalog import Catalog, Table

FLOATS = (exp.DType.DOUBLE, exp.DType.FLOAT)
DECIMALS = (exp.DType.DECIMAL, exp.DType.BIGDECIMAL)
#: How a comparison is written.
SIGNS: dict[type[exp.Expr], str] = {
    exp.EQ: "=",
    exp.NEQ: "<>",
    exp.LT: "<",
    exp.LTE: "<=",
    exp.GT: ">",
    exp.GTE: ">=",
}


def duckdb(text: str, **parts: exp.Expr) -> exp.Expr:
    """Return an expression of DuckDB's with parts put in."""
    tree = exp.maybe_parse(text, dialect="duckdb")
    return exp.replace_placeholders(tree, **parts).copy()  # no node stands in two places


def decimal() -> exp.DataType:
    """Return the type that decimals have where two of them meet."""
    return exp.DataType.build("DECIMAL(38, 9)", dialect="duckdb")


def kind_of(node: exp.Expr) -> exp.DType | None:
    """Return the type of a node as far as it is known."""
    return None if node.type is None else node.type.this


def is_literal(node: exp.Expr) -> bool:
    """Return whether an expression is a literal number, with a sign or without, or a literal
    text.
    """
    return isinstance(node.this if isinstance(node, exp.Neg) else node, exp.Literal)


def once(form: str, **parts: exp.Expr) -> exp.Expr:
    """Return a form that names its parts (``it_.a``, ...) as often as it likes; each is evaluated
    once.
    """
    fields = ", ".join(f"'{name}': :{name}" for name in parts)
    return duckdb(f"LIST_TRANSFORM([{{{fields}}}], lambda it_: {form})[1]", **parts)


def named(make: Callable[[dict[str, str]], str], parts: dict[str, exp.Expr]) -> exp.Expr:
    """Return a form by the names of its parts: themselves if they are short."""
    if all(isinstance(part, exp.Column) or is_literal(part) for part in parts.values()):
        return duckdb(make({name: f":{name}" for name in parts}), **parts)
    return once(make({name: f"it_.{name}" for name in parts}), **parts)


def _compared(node: exp.Expr) -> exp.Expr:
    """DuckDB's NaN equals itself and is above all numbers."""
    sides = {"a": node.left, "b": node.right}
    floats = [s for s, side in sides.items() if kind_of(side) in FLOATS and not is_literal(side)]
    if not floats:
        return node
    otherwise = "TRUE" if isinstance(node, exp.NEQ) else "FALSE"
    sign = SIGNS[type(node)]

    def form(names: dict[str, str]) -> str:
        absent = _unlike(names["a"], names["b"], "a" in floats, "b" in floats)
        return f"CASE WHEN {absent} THEN {otherwise} ELSE {names['a']} {sign} {names['b']} END"

    return named(form, sides)


def _unlike(a: str, b: str, *floats: bool) -> str:
    """Whether one of two names, of which some are floats, is NaN and the other is there."""
    sides = [pair for pair, is_float in zip(((a, b), (b, a)), floats, strict=True) if is_float]
    return " OR ".join(f"({_nan(x)} AND NOT {y} IS NULL)" for x, y in sides) or "FALSE"


def _nan(name: str) -> str:
    return f"ISNAN(TRY_CAST({name} AS DOUBLE))"


def _may_be_nan(node: exp.Expr) -> bool:
    return kind_of(node) in FLOATS and not is_literal(node)


def _in_list(node: exp.Expr) -> exp.Expr:
    """IN: DuckDB finds NaN among others."""
    if not (_may_be_nan(node.this) and any(map(_may_be_nan, node.expressions))):
        return node
    parts = {f"e{i}": value for i, value in enumerate(node.expressions)}

    def form(names: dict[str, str]) -> str:
        x, others = names["x"], [names[name] for name in parts]
        null = " OR ".join(f"{value} IS NULL" for value in others)
        return (
            f"CASE WHEN {_nan(x)} THEN CASE WHEN {null} THEN NULL ELSE FALSE END "
            f"ELSE {x} IN ({', '.join(others)}) END"
        )

    return named(form, {"x": node.this, **parts})


def _between(node: exp.Expr) -> exp.Expr:
    parts = {"x": node.this, "l": node.args["low"], "h": node.args["high"]}
    may = {name: _may_be_nan(part) for name, part in parts.items()}
    if not any(may.values()):
        return node

    def side(names: dict[str, str], end: str, sign: str) -> str:
        x, y = names["x"], names[end]
        return f"CASE WHEN {_unlike(x, y, may['x'], may[end])} THEN FALSE ELSE {x} {sign} {y} END"

    def form(names: dict[str, str]) -> str:
        return f"({side(names, 'l', '>=')}) AND ({side(names, 'h', '<=')})"

    return exp.Paren(this=named(form, parts))


def _null_if(node: exp.Expr) -> exp.Expr:
    if not (_may_be_nan(node.this) and _may_be_nan(node.expression)):
        return node
    return named(
        lambda names: (
            f"CASE WHEN {_nan(names['a'])} THEN {names['a']} "
            f"ELSE NULLIF({names['a']}, {names['b']}) END"
        ),
        {"a": node.this, "b": node.expression},
    )


def _case(node: exp.Expr) -> exp.Expr:
    """CASE with an operand: the number of the first that is equal, and CASE of that."""
    operand, whens = node.this, node.args["ifs"]
    if operand is None or not (
        _may_be_nan(operand) and any(_may_be_nan(when.this) for when in whens)
    ):
        return node
    parts = {f"w{i}": when.this for i, when in enumerate(whens)}

    def form(names: dict[str, str]) -> str:
        tests = (f"WHEN {names['x']} = {names[f'w{i}']} THEN {i}" for i in range(len(whens)))
        return f"CASE WHEN {_nan(names['x'])} THEN -1 {' '.join(tests)} ELSE -1 END"

    number = named(form, {"x": operand, **parts})
    ifs = [
        exp.If(this=exp.Literal.number(i), true=when.args["true"]) for i, when in enumerate(whens)
    ]
    return exp.Case(this=number, ifs=ifs, default=node.args.get("default"))


def _extreme(node: exp.Expr) -> exp.Expr:
    """LEAST and GREATEST: DuckDB leaves NULL out, and takes NaN for the largest of all."""
    operands = [node.this, *node.expressions]
    parts = {f"p{i}": operand for i, operand in enumerate(operands)}
    floats = [name for name, operand in parts.items() if _may_be_nan(operand)]
    name = "LEAST" if isinstance(node, exp.Least) else "GREATEST"

    def form(names: dict[str, str]) -> str:
        null = " OR ".join(f"{names[part]} IS NULL" for part in parts)
        nan = " OR ".join(_nan(names[part]) for part in floats)
        absent = f"WHEN {nan} THEN CAST('nan' AS DOUBLE) " if floats else ""
        return f"CASE WHEN {null} THEN NULL {absent}ELSE {name}({', '.join(names.values())}) END"

    return named(form, parts)


#: Bytes of a text that is put together of others.
MAX_TEXT = 65_536
_BYTES = (exp.DType.VARBINARY, exp.DType.BINARY)


def _concatenated(node: exp.Expr) -> exp.Expr:
    """CONCAT and ``||``."""
    parts = [node.left, node.right] if isinstance(node, exp.DPipe) else node.expressions
    if len(parts) == 1:
        return parts[0]
    names = {f"p{i}": part for i, part in enumerate(parts)}
    size = "OCTET_LENGTH" if any(kind_of(part) in _BYTES for part in parts) else "STRLEN"
    long = " + ".join(f"{size}(it_.{name})" for name in names)
    concatenation = " || ".join(f"it_.{name}" for name in names)
    return once(f"CASE WHEN {long} <= {MAX_TEXT} THEN {concatenation} END", **names)


def _replaced(node: exp.Expr) -> exp.Expr:
    parts = {"a": node.this, "b": node.expression, "c": node.args["replacement"]}
    times = "(STRLEN(it_.a) - STRLEN(REPLACE(it_.a, it_.b, ''))) // STRLEN(it_.b)"
    return once(
        f"CASE WHEN STRLEN(it_.b) = 0 AND STRLEN(it_.c) >= 0 THEN it_.a "
        f"WHEN STRLEN(it_.a) + {times} * (STRLEN(it_.c) - STRLEN(it_.b)) <= {MAX_TEXT} "
        f"THEN REPLACE(it_.a, it_.b, it_.c) END",
        **parts,
    )


def _alike(node: exp.Expr) -> exp.Expr:
    """A pattern may not end within an escape: DuckDB fails on that, also under TRY."""
    text, pattern = node.this, node.expression
    if isinstance(pattern, exp.Literal) and "\\" not in pattern.name:
        return node
    open_ = "(LENGTH(it_.p) - LENGTH(RTRIM(it_.p, '\\'))) % 2 = 1"
    pattern_text = f"CASE WHEN {open_} THEN NULL ELSE it_.p END"
    return once(f"it_.s LIKE ({pattern_text}) ESCAPE '\\'", s=text, p=pattern)


def _substring(node: exp.Expr) -> exp.Expr:
    """SUBSTR."""
    start, length = node.args.get("start"), node.args.get("length")
    if start is None:
        return node
    plain = isinstance(start, exp.Literal) and start.is_int and int(start.name) > 0
    if plain and (length is None or isinstance(length, exp.Literal)):
        return node
    parts = {"s": node.this, "p": start} | ({} if length is None else {"n": length})
    begin = "CASE WHEN it_.p = 0 OR it_.p < -LENGTH(it_.s) THEN 1 ELSE it_.p END"
    if length is None:
        return once(f"SUBSTRING(it_.s, {begin})", **parts)
    return once(f"CASE WHEN it_.n >= 0 THEN SUBSTRING(it_.s, {begin}, it_.n) END", **parts)


def _end(node: exp.Expr) -> exp.Expr:
    """LEFT and RIGHT."""
    if isinstance(node.expression, exp.Literal):
        return node
    name = "LEFT" if isinstance(node, exp.Left) else "RIGHT"
    form = f"CASE WHEN it_.n >= 0 THEN {name}(it_.s, it_.n) END"
    return once(form, s=node.this, n=node.expression)


def exact(node: exp.Expr) -> exp.Expr:
    """Return the expression with every node in its form; the given one is used up."""
    for inner in reversed(list(node.find_all(*_FORMS))):  # the innermost first
        if inner is not node:
            place = exp.Placeholder()  # the form may hold the node itself
            inner.replace(place)
            place.replace(_formed(inner))
    return _formed(node)


def _formed(node: exp.Expr) -> exp.Expr:
    make = _FORMS.get(type(node))
    if make is None:
        return node
    kind, new = node.type, make(node)
    new.type = kind
    return new


def _cast(node: exp.Expr) -> exp.Expr:
    operand, to = node.this, node.args["to"]
    if to.this in DECIMALS and not to.expressions:
        to = decimal()
    if kind_of(operand) in FLOATS:
        if to.this in (exp.DType.BIGINT, exp.DType.INT):
            operand = exp.Anonymous(this="ROUND", expressions=[operand])
        elif to.this in (exp.DType.TEXT, exp.DType.VARCHAR):
            form = "REGEXP_REPLACE(TRY_CAST(TRY_CAST(:x AS DOUBLE) AS TEXT), '\\.0$', '')"
            return duckdb(form, x=operand)
    return exp.TryCast(this=operand, to=to)


def _divided(node: exp.Expr) -> exp.Expr:
    divisor: exp.Expr = node.expression
    if isinstance(node, exp.IntDiv):  # a function: its operands have no parentheses yet
        node.set("this", exp.Paren(this=node.this))
    node.set("expression", exp.Nullif(this=divisor, expression=exp.Literal.number(0)))
    return node if isinstance(node, exp.Div) else exp.Paren(this=node)


def _difference(node: exp.Expr) -> exp.Expr:
    """Whole units that have passed, not boundaries."""
    unit = exp.Literal.string(node.text("unit").lower() or "microsecond")
    return exp.Anonymous(this="DATE_SUB", expressions=[unit, node.expression, node.this])


def _extracted(node: exp.Expr) -> exp.Expr:
    """Days and weeks as GoogleSQL numbers them: Sunday is 1 and begins a week; DuckDB's Sunday is 0
    and its weeks are those of ISO."""
    part, date = node.name.upper(), node.expression
    if part == "DAYOFWEEK":
        return duckdb("(EXTRACT(DOW FROM :x) + 1)", x=date)
    if part == "ISOWEEK":
        return duckdb("EXTRACT(WEEK FROM :x)", x=date)
    if part != "WEEK":
        return node
    # Days before the first Sunday are in week 0.
    return once("(EXTRACT(DOY FROM it_.x) + 6 - EXTRACT(DOW FROM it_.x)) // 7", x=date)


#: By the nodes that have one.
_FORMS: dict[type[exp.Expr], Callable[[Any], exp.Expr]] = {
    **dict.fromkeys(SIGNS, _compared),
    exp.In: _in_list,
    exp.Between: _between,
    exp.Nullif: _null_if,
    exp.Case: _case,
    exp.Least: _extreme,
    exp.Greatest: _extreme,
    exp.Concat: _concatenated,
    exp.DPipe: _concatenated,
    exp.Replace: _replaced,
    exp.Like: _alike,
    exp.Substring: _substring,
    exp.Left: _end,
    exp.Right: _end,
    exp.Cast: _cast,
    exp.TryCast: _cast,
    exp.Extract: _extracted,
    exp.TimestampDiff: _difference,
    exp.Div: _divided,
    exp.Mod: _divided,
    exp.IntDiv: _divided,
    **dict.fromkeys((exp.DateAdd, exp.DateSub), lambda node: exp.Paren(this=node)),
}


#: Types whose equality cannot fail: DuckDB casts one of two decimals, which can.
_EQUATED = GROUPABLE - set(DECIMALS)
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


def _safe_select(node: exp.Select, combined: bool = False) -> None:
    for join in node.args.get("joins") or ():
        if join.args.get("on") is not None:
            join.set("on", _condition(join.args["on"]))
    where = node.args.get("where")
    if where is not None:
        where.set("this", _condition(where.this))
    if node.args.get("group") is not None or any(n.find(exp.AggFunc) for n in node.expressions):
        _regroup(node)
    else:
        node.set("expressions", [_item(item) for item in node.expressions])
    if node.args.get("order") is not None:
        for key in node.args["order"].expressions:
            key.set("this", tried(key.this))
    if combined:  # set operations cast decimals of two widths to a third
        node.set("expressions", [_widened(item) for item in node.expressions])


def _widened(item: exp.Expr) -> exp.Expr:
    column = item.unalias()
    if isinstance(column, exp.Column) and type_of(column) in DECIMALS:
        cast = exp.TryCast(this=column.copy(), to=decimal())
        return exp.alias_(cast, item.alias_or_name, quoted=True)
    return item


def _regroup(node: exp.Select) -> None:
    """Two levels: groups with their counts, extremes and lists of values, none of which can fail;
    and above them, under TRY, everything that is computed from these."""
    group, having, order = (node.args.get(part) for part in ("group", "having", "order"))
    groups = [] if group is None else list(group.expressions)
    replacements: dict[exp.Expr, tuple[exp.Expr, exp.Expr]] = {}
    for i, item in enumerate(groups):
        replacements[item] = _typed(item), _above(f"g{i}", item)
    for item in (*node.expressions, *(part for part in (having, order) if part is not None)):
        for call in item.find_all(exp.AggFunc):
            if call not in replacements:
                replacements[call] = _collected(call, f"a{len(replacements)}")
    items = [
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
    node.set("expressions", [_item(item) for item in items])
    if having is not None:
        node.set("where", exp.Where(this=_condition(_over(having.this.copy(), replacements))))
    if order is not None:
        node.set("order", _over(order, replacements))


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
        # -0.0 and 0.0 are equal: which of them comes first would depend on the order.
        call = exp.Add(this=call, expression=exp.Literal.number(0))
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
