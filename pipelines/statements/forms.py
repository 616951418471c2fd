"""Translation of GoogleSQL nodes to DuckDB, where their meaning differs or they can fail.

Each form is a function of the node's operands alone, NULL where GoogleSQL has an error, and names
each operand once, or it is a column: a statement does not grow with its depth.  What TRY around it
catches (overflow, casts, bad patterns) is left to TRY; texts that grow are NULL beyond `MAX_TEXT`
bytes, and are not made before, because how much memory is used would tell of a row.

* CAST: a pair of types of `CASTS`, in its form; others are refused.
* DATE_TRUNC and EXTRACT of weeks; FORMAT_DATE and the like; REGEXP_EXTRACT; REVERSE of code points.
* ``/``, ``%``, DIV: NULL for a divisor of 0, in parentheses.
* Comparisons of floats: NaN is not equal to, above or below anything (DuckDB's equals itself and is
  above all numbers).  IN, BETWEEN, NULLIF and CASE with an operand compare alike.  LEAST and
  GREATEST with a NaN are NaN, with a NULL they are NULL.
* CONCAT, ``||``, REPLACE: NULL beyond MAX_TEXT bytes.
* LIKE: a backslash escapes.  SUBSTR: from the first character if it begins before; NULL, as LEFT
  and RIGHT, for a length below 0.
* EXTRACT, TIMESTAMP_DIFF, DATE_ADD, DATE_SUB.

The dialect is not loaded here: sessions read conditions without it.
"""

import itertools
from collections.abc import Callable
from typing import Any

from sqlglot import exp

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


#: Other names of types.
SAME = {
    exp.DType.INT: exp.DType.BIGINT,
    exp.DType.SMALLINT: exp.DType.BIGINT,
    exp.DType.TINYINT: exp.DType.BIGINT,
    exp.DType.VARCHAR: exp.DType.TEXT,
    exp.DType.BINARY: exp.DType.VARBINARY,
    exp.DType.DATETIME: exp.DType.TIMESTAMP,
    exp.DType.BIGDECIMAL: exp.DType.DECIMAL,
}


def type_of(node: exp.Expr) -> exp.DType | None:
    """Return the type of an expression as far as it is known."""
    return None if node.type is None else SAME.get(node.type.this, node.type.this)


def typed_nulls(
    query: exp.Query, mine: list[exp.DType | None], theirs: list[exp.DType | None]
) -> list[exp.DType | None]:
    """Give a query's NULLs the types of the columns that they stand beside; return its types."""
    out = list[exp.DType | None]()
    for item, kind, other in zip(query.selects, mine, theirs, strict=True):
        null = isinstance(item.unalias(), exp.Null) and other is not None
        out.append(other if null else kind)
        if null:
            cast = exp.Cast(this=exp.Null(), to=exp.DataType(this=other))
            cast.type = cast.args["to"]
            item.unalias().replace(cast)
    return out


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
    floats = [s for s, side in sides.items() if type_of(side) in FLOATS and not is_literal(side)]
    if not floats:
        return node
    otherwise = "TRUE" if isinstance(node, exp.NEQ) else "FALSE"
    sign = SIGNS[type(node)]

    def form(names: dict[str, str]) -> str:
        absent = _unlike(names["a"], names["b"], "a" in floats, "b" in floats)
        return f"CASE WHEN {absent} THEN {otherwise} ELSE {names['a']} {sign} {names['b']} END"

    return named(form, sides)


def order_keys(node: exp.Ordered) -> list[exp.Expr]:
    """Return the keys of a window that one key is: DuckDB's NaN is above all numbers, not below."""
    key, down = node.this, not node.args.get("desc")
    if type_of(key) not in (*FLOATS, exp.DType.UNKNOWN, None):
        return [node]
    null = exp.Paren(this=exp.Is(this=key.copy(), expression=exp.Null()))
    first = exp.Ordered(this=null, desc=bool(node.args.get("nulls_first")), nulls_first=True)
    return [first, exp.Ordered(this=exp.IsNan(this=key.copy()), desc=down, nulls_first=True), node]


def _unlike(a: str, b: str, *floats: bool) -> str:
    """Whether one of two names, of which some are floats, is NaN and the other is there."""
    sides = [pair for pair, is_float in zip(((a, b), (b, a)), floats, strict=True) if is_float]
    return " OR ".join(f"({_nan(x)} AND NOT {y} IS NULL)" for x, y in sides) or "FALSE"


def _nan(name: str) -> str:
    return f"ISNAN(TRY_CAST({name} AS DOUBLE))"


def _may_be_nan(node: exp.Expr) -> bool:
    return type_of(node) in FLOATS and not is_literal(node)


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
    size = "OCTET_LENGTH" if any(type_of(part) in _BYTES for part in parts) else "STRLEN"
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


_NUMBER = r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*"
_HEX, _DAY = r"\s*[+-]?0[xX][0-9a-fA-F]+\s*", r"\d{4}-\d{1,2}-\d{1,2}"
_CLOCK = r"([ T]([01]?\d|2[0-3]):\d{1,2}:\d{1,2}(\.\d{1,6})?"
_TO_CLOCK = "REGEXP_REPLACE(STRFTIME(:x, '%Y-%m-%d %H:%M:%S.%f'), '\\.?(000)?(000)?$', '')"


def _matched(pattern: str, value: str) -> str:
    """A form of the texts that a pattern matches: DuckDB's casts take more than GoogleSQL's."""
    return f"CASE WHEN REGEXP_FULL_MATCH(:x, '{pattern}') THEN {value} END"


def _in_years(form: str) -> str:
    return f"CASE WHEN YEAR(:x) BETWEEN 1 AND 9999 THEN {form} END"


#: Forms of casts by the types from and to; "" is TRY_CAST alone.  Zones in texts are offsets or Z.
CASTS: dict[tuple[exp.DType, exp.DType], str] = {
    (exp.DType.TEXT, exp.DType.BIGINT): (
        r"CASE WHEN REGEXP_FULL_MATCH(:x, '\s*[+-]?\d+\s*') THEN TRY_CAST(:x AS BIGINT) "
        f"WHEN REGEXP_FULL_MATCH(:x, '{_HEX}') THEN TRY_CAST(REGEXP_REPLACE(:x, '[+-]', '') "
        "AS HUGEINT) * CASE WHEN CONTAINS(:x, '-') THEN -1 ELSE 1 END END"
    ),
    (exp.DType.TEXT, exp.DType.DOUBLE): _matched(
        rf"{_NUMBER}|(?i:\s*[+-]?(inf|infinity|nan)\s*)", "TRY_CAST(:x AS DOUBLE)"
    ),
    (exp.DType.TEXT, exp.DType.DECIMAL): _matched(_NUMBER, "TRY_CAST(:x AS DECIMAL(38, 9))"),
    (exp.DType.TEXT, exp.DType.BOOLEAN): (
        "CASE LOWER(:x) WHEN 'true' THEN TRUE WHEN 'false' THEN FALSE END"
    ),
    (exp.DType.TEXT, exp.DType.VARBINARY): "ENCODE(:x)",
    (exp.DType.VARBINARY, exp.DType.TEXT): "DECODE(:x)",
    (exp.DType.TEXT, exp.DType.DATE): _matched(
        _DAY, _in_years("TRY_CAST(:x AS DATE)").replace("YEAR(:x)", "YEAR(TRY_CAST(:x AS DATE))")
    ),
    (exp.DType.TEXT, exp.DType.TIMESTAMP): _matched(
        f"{_DAY}{_CLOCK})?", "TRY_CAST(:x AS TIMESTAMP)"
    ),
    (exp.DType.TEXT, exp.DType.TIMESTAMPTZ): _matched(
        rf"{_DAY}{_CLOCK}(Z|[+-]\d\d(:\d\d)?)?)?", "TRY_CAST(:x AS TIMESTAMPTZ)"
    ),
    (exp.DType.DECIMAL, exp.DType.TEXT): (
        r"REGEXP_REPLACE(CAST(:x AS TEXT), '(\.\d*?)0+$', '\1').REGEXP_REPLACE('\.$', '')"
    ),
    (exp.DType.DOUBLE, exp.DType.TEXT): (
        r"REGEXP_REPLACE(CAST(TRY_CAST(:x AS DOUBLE) AS TEXT), '\.0$', '')"
    ),
    (exp.DType.DOUBLE, exp.DType.BIGINT): "ROUND(:x)",
    (exp.DType.DATE, exp.DType.TEXT): _in_years("CAST(:x AS TEXT)"),
    (exp.DType.TIMESTAMP, exp.DType.TEXT): _in_years(_TO_CLOCK),
    (exp.DType.TIMESTAMPTZ, exp.DType.TEXT): _in_years(f"{_TO_CLOCK} || '+00'"),
    **dict.fromkeys(itertools.permutations((exp.DType.BIGINT, exp.DType.BOOLEAN), 2), ""),
    **dict.fromkeys(itertools.permutations((exp.DType.DECIMAL, exp.DType.DOUBLE), 2), ""),
    **dict.fromkeys(itertools.permutations((exp.DType.DECIMAL, exp.DType.BIGINT), 2), ""),
    **dict.fromkeys(
        itertools.permutations((exp.DType.DATE, exp.DType.TIMESTAMP, exp.DType.TIMESTAMPTZ), 2), ""
    ),
    (exp.DType.BIGINT, exp.DType.DOUBLE): "",
    (exp.DType.BIGINT, exp.DType.TEXT): "",
    (exp.DType.BOOLEAN, exp.DType.TEXT): "",
}


def _cast(node: exp.Expr) -> exp.Expr:
    operand, to = node.this, node.args["to"]
    form = CASTS.get((type_of(operand) or exp.DType.UNKNOWN, SAME.get(to.this, to.this)))
    to = decimal() if to.this in DECIMALS and not to.expressions else to
    if form:
        operand = named(lambda names: form.replace(":x", names["x"]), {"x": operand})
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


#: Days that weeks begin with, as DuckDB numbers them.
DAYS = ("SUNDAY", "MONDAY", "TUESDAY", "WEDNESDAY", "THURSDAY", "FRIDAY", "SATURDAY")


def _into_week(unit: exp.Expr | None) -> str | None:
    """Days since a week began, of ``it_.x``; ``None`` if a unit is no week."""
    name = "" if unit is None else unit.name.upper().replace("ISOWEEK", "MONDAY")
    begin = DAYS.index(name) if name in DAYS else None
    return None if begin is None else f"(EXTRACT(DOW FROM it_.x) + {7 - begin}) % 7"


def _extracted(node: exp.Expr) -> exp.Expr:
    """Days as GoogleSQL numbers them: Sunday is 1, DuckDB's is 0; and weeks, of which the first
    begins with the first such day of a year, and days before are in week 0.  DuckDB's are ISO's."""
    part, date = node.name.upper(), node.expression
    if part == "DAYOFWEEK":
        return duckdb("(EXTRACT(DOW FROM :x) + 1)", x=date)
    if part == "ISOWEEK":
        return duckdb("EXTRACT(WEEK FROM :x)", x=date)
    days = _into_week(exp.var("SUNDAY") if part == "WEEK" else node.this)
    return node if days is None else once(f"(EXTRACT(DOY FROM it_.x) + 6 - {days}) // 7", x=date)


def _truncated(node: exp.Expr) -> exp.Expr:
    days, kind = _into_week(node.args.get("unit")), type_of(node.this)
    if days is None or kind is None:
        return node
    form = f"CAST(CAST(it_.x AS DATE) - CAST({days} AS INTEGER) AS {kind.value})"
    return once(form, x=node.this)


#: Years of four digits: of others it is not documented how GoogleSQL writes them.
_FORMATTED = "CASE WHEN YEAR(it_.x) BETWEEN 1000 AND 9999 THEN STRFTIME(it_.x, {}) END"
_EXTRACTED = "CASE WHEN REGEXP_MATCHES(it_.x, {0}) THEN REGEXP_EXTRACT(it_.x, {0}, {1}) END"
#: Of code points; DuckDB's is of graphemes.
_REVERSED = "ARRAY_TO_STRING(LIST_REVERSE(STRING_SPLIT(:x, '')), '')"


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
    **dict.fromkeys((exp.DateTrunc, exp.TimestampTrunc, exp.DatetimeTrunc), _truncated),
    exp.TimeToStr: lambda n: once(_FORMATTED.format(n.args["format"].sql("duckdb")), x=n.this),
    exp.RegexpExtract: lambda n: once(
        _EXTRACTED.format(n.expression.sql("duckdb"), n.text("group") or "0"), x=n.this
    ),
    exp.Reverse: lambda n: n if type_of(n.this) in _BYTES else duckdb(_REVERSED, x=n.this),
    exp.TimestampDiff: _difference,
    exp.Div: _divided,
    exp.Mod: _divided,
    exp.IntDiv: _divided,
    **dict.fromkeys((exp.DateAdd, exp.DateSub), lambda node: exp.Paren(this=node)),
}
