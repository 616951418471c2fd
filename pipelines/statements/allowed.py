"""From a text to a tree of allowed parts in which every column names its relation.

**Allowed parts.**  A text has a limited size.  Every node of a parsed statement is of a type on
these lists, with no other parts than listed.
The scalar functions are deterministic functions of one row: what they give depends on their
arguments alone (time zone UTC, binary collation), never on the clock, a session, a random source
or another row.  They are:

* those of `FUNCTIONS`, with the parts of a time in `PARTS`, ISO week and day of week;
* operators: + - * / % & || AND OR NOT = <> < <= > >= IS (NOT) DISTINCT FROM, IS NULL, BETWEEN, IN
  (list), LIKE, CASE, INTERVAL;
* CAST and SAFE_CAST between INT64, FLOAT64, NUMERIC, BOOL, STRING, BYTES, DATE, TIMESTAMP and
  DATETIME, by the pairs of `forms.CASTS`; AT TIME ZONE of an instant and a zone that DuckDB knows.

Aggregates per unit, in subqueries that group by it: COUNT, COUNT(DISTINCT), SUM, AVG, MIN, MAX,
LOGICAL_AND, LOGICAL_OR, and COUNTIF and ANY_VALUE by their spelling (`spelling`).  In windows also
`RANKS`.

**Names.**  WITH parts and views are put in the place of their names first (they are deterministic,
so that a part used twice is the same relation twice), then sqlglot's ``qualify`` resolves names,
``*`` and USING.  Every column is checked again by `ownership`: qualify is trusted with no rule.
"""

import contextlib
import functools
import re
from collections.abc import Iterable, Mapping

from sqlglot import exp
from sqlglot.errors import SqlglotError
from sqlglot.optimizer.annotate_types import annotate_types
from sqlglot.optimizer.normalize_identifiers import normalize_identifiers
from sqlglot.optimizer.qualify_columns import qualify_columns, quote_identifiers
from sqlglot.optimizer.qualify_tables import qualify_tables
from sqlglot.optimizer.scope import traverse_scope
from sqlglot.schema import MappingSchema
from sqlglot.tokens import Token, TokenType

from dpstream.accounting.errors import DpstreamError, instance
from dpstream.pipelines.statements.dialect import (
    ALWAYS,
    SOMETIMES,
    Clamped,
    DpSql,
    PrivacyOptions,
    Private,
    WithReport,
)
from dpstream.pipelines.statements.errors import Position, position, position_in, refusal
from dpstream.pipelines.statements.forms import CASTS, DAYS, SAME, type_of
from dpstream.pipelines.statements.spelling import spelled

#: Characters of a statement, nodes of its tree (also after its WITH parts are put in place) and
#: the depth to which it may be nested: an analyst's statement has under a tenth of each.
MAX_CHARACTERS, MAX_NODES, MAX_DEPTH = 50_000, 4_000, 100

#: Nodes with the parts that they may have.
STRUCTURE: dict[type[exp.Expr], set[str]] = {
    exp.Select: {
        "hint",
        "distinct",
        "expressions",
        "from_",
        "joins",
        "where",
        "group",
        "having",
        "order",
        "limit",
        "offset",
        "with_",
    },
    exp.With: {"expressions"},
    exp.CTE: {"this", "alias"},
    exp.From: {"this"},
    exp.Table: {"this", "alias"},
    exp.TableAlias: {"this"},
    exp.Subquery: {"this", "alias", "with_"},
    exp.Join: {"this", "side", "kind", "on", "using"},
    exp.Where: {"this"},
    exp.Group: {"expressions"},
    exp.Having: {"this"},
    exp.Order: {"expressions"},
    exp.Ordered: {"this", "desc", "nulls_first"},
    exp.Limit: {"expression"},
    exp.Offset: {"expression"},
    exp.Distinct: {"expressions"},
    exp.Union: {"this", "expression", "distinct", "with_", "order", "limit", "offset"},
    exp.Intersect: {"this", "expression", "distinct", "with_", "order", "limit", "offset"},
    exp.Except: {"this", "expression", "distinct", "with_", "order", "limit", "offset"},
    exp.Alias: {"this", "alias"},
    exp.Column: {"this", "table"},
    exp.Identifier: {"this", "quoted"},
    exp.Star: set(),
    exp.Cast: {"this", "to"},
    exp.TryCast: {"this", "to", "safe"},
    exp.DataType: {"this", "nested", "expressions"},
    exp.DataTypeParam: {"this"},
    exp.In: {"this", "expressions", "query"},
    exp.Exists: {"this"},
    exp.Window: {"this", "partition_by", "order", "spec", "over"},
    exp.WindowSpec: {"kind", "start", "start_side", "end", "end_side"},
    exp.Trim: {"this", "position", "expression"},
}
#: What stands in private functions and options only.
PRIVACY = (PrivacyOptions, Private, Clamped, WithReport, exp.Kwarg, exp.PropertyEQ, exp.Tuple)
#: Operators, scalar functions and their parts.
_TIME_FUNCTIONS = (
    exp.Extract,
    exp.DateTrunc,
    exp.TimestampTrunc,
    exp.DatetimeTrunc,
    exp.DateDiff,
    exp.TimestampDiff,
    exp.DateAdd,
    exp.DateSub,
)
SCALARS = {
    exp.Literal,
    exp.Boolean,
    exp.Null,
    exp.Var,
    exp.Interval,
    exp.Paren,
    exp.Add,
    exp.Sub,
    exp.Mul,
    exp.Div,
    exp.Mod,
    exp.Neg,
    exp.BitwiseAnd,
    exp.IntDiv,
    exp.Abs,
    exp.Ceil,
    exp.Floor,
    exp.Round,
    exp.Trunc,
    exp.Sign,
    exp.Sqrt,
    exp.Exp,
    exp.Ln,
    exp.Log,
    exp.Pow,
    exp.Greatest,
    exp.Least,
    exp.SafeDivide,
    exp.And,
    exp.Or,
    exp.Not,
    exp.EQ,
    exp.NEQ,
    exp.LT,
    exp.LTE,
    exp.GT,
    exp.GTE,
    exp.Is,
    exp.NullSafeEQ,
    exp.NullSafeNEQ,
    exp.Between,
    exp.Like,
    exp.Case,
    exp.If,
    exp.Coalesce,
    exp.Nullif,
    exp.Upper,
    exp.Lower,
    exp.Length,
    exp.Concat,
    exp.DPipe,
    exp.Substring,
    exp.Replace,
    exp.StartsWith,
    exp.EndsWith,
    exp.StrPosition,
    exp.Reverse,
    exp.Left,
    exp.Right,
    exp.RegexpLike,
    exp.RegexpExtract,
    exp.TimeToStr,
    exp.AtTimeZone,
    exp.WeekStart,
    exp.Date,
    *_TIME_FUNCTIONS,
}
#: Groupings of a private SELECT, see `grouping`.
GROUPINGS = (exp.Rollup, exp.Cube, exp.GroupingSets)
#: Functions that stand in a window only.
RANKS = {exp.RowNumber, exp.Rank, exp.DenseRank, exp.Lag, exp.Lead, exp.FirstValue}
#: Those whose value depends on which of two tied rows comes first.
PLACED = (exp.RowNumber, exp.Lag, exp.Lead, exp.FirstValue)
AGGREGATES = {
    exp.Count,
    exp.Sum,
    exp.Avg,
    exp.Min,
    exp.Max,
    exp.LogicalAnd,
    exp.LogicalOr,
}
TYPES = {
    exp.DType.BIGINT,
    exp.DType.DOUBLE,
    exp.DType.DECIMAL,
    exp.DType.BOOLEAN,
    exp.DType.TEXT,
    exp.DType.VARCHAR,
    exp.DType.BINARY,
    exp.DType.VARBINARY,
    exp.DType.DATE,
    exp.DType.TIMESTAMPTZ,
    exp.DType.TIMESTAMP,
    exp.DType.DATETIME,
    exp.DType.INT,
    exp.DType.BIGDECIMAL,
}
PARTS = {
    "YEAR",
    "QUARTER",
    "MONTH",
    "DAY",
    "HOUR",
    "MINUTE",
    "SECOND",
    "ISOYEAR",
    "DAYOFYEAR",
    "WEEK",
}
#: Parts that can be extracted, and are no length of time.
_EXTRACTED = {"DAYOFWEEK", "ISOWEEK"}
_TIME_NODES = (*_TIME_FUNCTIONS, exp.Interval)
_WEEK_NODES = (exp.Extract, exp.DateTrunc, exp.TimestampTrunc, exp.DatetimeTrunc)
#: Directives of a format that mean the same in DuckDB.
_FORMATS = re.compile(r"([^%]|%[YmdHMSyBbAajpI%])*")
#: The rule that a node breaks which is on no list; the first that fits.
REFUSED: list[tuple[tuple[type[exp.Expr], ...], str]] = [
    ((exp.Qualify, exp.RowNumber, exp.Rank, exp.DenseRank, exp.Lag, exp.Lead), "window"),
    (
        (
            exp.Rand,
            exp.Randn,
            exp.Uuid,
            exp.CurrentDate,
            exp.CurrentTimestamp,
            exp.CurrentTime,
            exp.CurrentDatetime,
            exp.CurrentUser,
            exp.SessionUser,
        ),
        "nondeterministic",
    ),
    ((exp.TableSample,), "sample"),
    ((exp.FromTimeZone,), "time-zone"),
    ((exp.Any, exp.All), "subquery-expression"),
    ((*GROUPINGS, exp.Grouping), "grouping-sets"),
    ((exp.Unnest, exp.Lateral, exp.Pivot, exp.Values), "lateral"),
    ((exp.Fetch,), "limit"),
    ((exp.AggFunc,), "inner-aggregate"),
    ((exp.Func,), "function"),
]
#: The rule that an unlisted part of a listed node breaks, by the part's name.
PARTS_REFUSED = {
    "recursive": "recursive",
    "rollup": "grouping-sets",
    "cube": "grouping-sets",
    "grouping_sets": "grouping-sets",
    "totals": "grouping-sets",
    "all": "grouping-sets",
    "sample": "sample",
    "qualify": "window",
    "windows": "window",
    "laterals": "lateral",
    "pivots": "lateral",
    "unnest": "lateral",
    "db": "unknown-table",
    "catalog": "unknown-table",
    "method": "join-kind",
    "joins": "join-kind",
    "fetch": "limit",
}
#: Names of the functions that a statement can use somewhere: what a refusal lists.
FUNCTIONS = (
    *(*SOMETIMES, *ALWAYS, "ANY_VALUE", "LOGICAL_AND", "LOGICAL_OR"),
    *("ABS", "CEIL", "FLOOR", "ROUND", "TRUNC", "SIGN", "SQRT", "EXP", "LN", "LOG", "LOG10"),
    *("POW", "MOD", "DIV", "GREATEST", "LEAST", "SAFE_DIVIDE", "RANGE_BUCKET"),
    *("IF", "COALESCE", "IFNULL", "NULLIF", "CAST", "SAFE_CAST"),
    *("UPPER", "LOWER", "LENGTH", "CHAR_LENGTH", "CONCAT", "SUBSTR", "TRIM", "LTRIM", "RTRIM"),
    *("REPLACE", "STARTS_WITH", "ENDS_WITH", "STRPOS", "REVERSE", "LEFT", "RIGHT"),
    *("REGEXP_CONTAINS", "REGEXP_EXTRACT", "FORMAT_DATE", "FORMAT_TIMESTAMP", "FORMAT_DATETIME"),
    *("DATE", "EXTRACT", "DATE_TRUNC", "TIMESTAMP_TRUNC", "DATETIME_TRUNC"),
    *("DATE_DIFF", "TIMESTAMP_DIFF", "DATE_ADD", "DATE_SUB"),
)
#: The rules whose refusal names the function that breaks them.
_OF_FUNCTIONS = {"function", "nondeterministic", "inner-aggregate", "dp-aggregate"}
_DIALECT = DpSql()
_OPEN = (TokenType.L_PAREN, TokenType.CASE, TokenType.L_BRACKET)
_CLOSE = (TokenType.R_PAREN, TokenType.END, TokenType.R_BRACKET)


def require(holds: object, code: str, node: exp.Expr | None = None) -> None:
    """Raise a refusal unless a rule of a statement holds.

    Raises:
        DpstreamError: it does not hold.
    """
    if holds:
        return
    at = position(node) if node is not None else Position(1, 1)
    if not isinstance(node, exp.Func) or code not in _OF_FUNCTIONS:
        raise refusal(code, at)
    text, meta = node.root().meta.get("text", ""), node.meta
    name = text[meta["start"] : meta["end"] + 1].upper() if "start" in meta else ""
    if not name or (code == "function" and name in FUNCTIONS):  # a part of it is refused
        raise refusal(code, at)
    raise refusal(code, at, name, FUNCTIONS if code == "function" else ())


def check_nodes(tree: exp.Expr) -> None:
    """Refuse every node and part that is not on the lists.

    Raises:
        DpstreamError: says which rule the first of them breaks.
    """
    for number, node in enumerate(tree.walk(bfs=False)):
        require(number < MAX_NODES, "too-large")
        _check_node(node)


def _check_node(node: exp.Expr) -> None:
    kind = type(node)
    if kind in STRUCTURE:
        for part, value in node.args.items():
            if value and part not in STRUCTURE[kind]:
                require(False, PARTS_REFUSED.get(part, "not-supported"), node)
    elif not (_has_its_place(node) or kind in (*SCALARS, *AGGREGATES, *PRIVACY)):
        codes = (code for kinds, code in REFUSED if isinstance(node, kinds))
        require(False, next(codes, "not-supported"), node)
    if isinstance(node, exp.Select):
        require(node.expressions, "syntax", node)
    if isinstance(node, exp.DataType):
        require(node.this in TYPES, "function", node)
    if isinstance(node, exp.Distinct | exp.Union | exp.Intersect | exp.Except):
        require(not node.args.get("on"), "not-supported", node)
    if isinstance(node, _TIME_NODES):
        extracted = isinstance(node, exp.Extract)
        unit = node.this if extracted else node.args.get("unit")
        parts = PARTS | _EXTRACTED if extracted else PARTS
        begins = DAYS if isinstance(unit, exp.WeekStart) else ("ISOWEEK",)
        week = unit is not None and unit.name.upper() in begins
        named = unit is None or unit.name.upper() in parts
        require(isinstance(node, _WEEK_NODES) if week else named, "function", node)
    if isinstance(node, exp.TimeToStr | exp.RegexpExtract):
        text = node.args.get("format") or node.args.get("position") or node.expression
        fits = _FORMATS.fullmatch if isinstance(node, exp.TimeToStr) else _has_its_group
        require(text.is_string and fits(text.name), "function", node)
    zone = node.args.get("zone")  # DuckDB fails on one that it does not know, also under TRY
    names = _zones() if zone is not None and isinstance(node, exp.AtTimeZone) else {"UTC"}
    require(zone is None or (zone.is_string and zone.name in names), "time-zone", node)
    if isinstance(node, exp.WindowSpec | exp.Lag | exp.Lead):  # DuckDB fails on a row's number
        reach = [node.args.get(part) for part in ("start", "end", "offset")]
        numbers = [part for part in reach if isinstance(part, exp.Expr)]
        literal = all(isinstance(n, exp.Literal) and n.is_int and len(n.name) < 10 for n in numbers)
        by_rows = node.text("kind").upper() != "RANGE"
        require(literal and (by_rows or not numbers), "window-frame", node)
    if isinstance(node, exp.Query):  # `ownership` says where a query can be a value
        require(not isinstance(node.parent, exp.Limit | exp.Offset), "limit", node)


def _has_its_place(node: exp.Expr) -> bool:
    """Whether it is a rank of a window, or a grouping of a private SELECT."""
    if isinstance(node, (*GROUPINGS, exp.Grouping)):
        select = node.find_ancestor(exp.Select)
        return select is not None and select.args.get("hint") is not None
    return isinstance(node.parent, exp.Window) and type(node) in RANKS and node.arg_key == "this"


def _has_its_group(pattern: str) -> bool:
    """Whether a pattern has at most one group, which is in every match: DuckDB has no NULL for one
    that is not."""
    plain = re.sub(r"\\.|\[[^\]]*\]|\(\?:", "", pattern)
    return plain.count("(") < 2 and not ("(" in plain and re.search(r"\||\)[?*{]", plain))


@functools.cache
def _zones() -> frozenset[str]:
    import duckdb  # only few statements name a zone

    with duckdb.connect() as base:
        rows = base.execute("SELECT name FROM pg_timezone_names()").fetchall()
    return frozenset(name for (name,) in rows)


def parsed(text: str) -> exp.Query:
    """Return the tree of one statement, of allowed nodes only.

    Raises:
        DpstreamError: it is none.
    """
    try:
        tokens = tokens_of(text)
        _check_tokens(tokens)
        # The text before an error tells its place; sqlglot gives the end of a token.
        parser = _DIALECT.parser(error_message_context=MAX_CHARACTERS)
        trees = [tree for tree in parser.parse(tokens, text) if tree is not None]
        require(len(trees) == 1, "one-statement")
        [tree] = trees
        tree = spelled(tree)
        tree.meta["text"] = text
        for name in tree.find_all(exp.Identifier):
            first = text[name.meta["start"]] if "start" in name.meta else ""
            name.meta["named"] = first == "`" or first.isidentifier()  # else it is a literal
        require(isinstance(tree, exp.Query), "select-only")
        check_nodes(tree)
    except SqlglotError as error:
        raise refusal("syntax", _where(error, text)) from None
    except RecursionError:
        raise refusal("too-large") from None
    except (AttributeError, TypeError, ValueError, IndexError, KeyError, AssertionError):
        # The parser met something that it does not expect: it never passes on what.
        raise refusal("syntax") from None
    return instance(tree, exp.Query)


def tokens_of(text: str) -> list[Token]:
    """Return the tokens of a text.

    Raises:
        DpstreamError: it is too long, or has a quote or comment that is not closed.
    """
    if len(text) > MAX_CHARACTERS:
        raise refusal("too-large")
    try:
        return list(_DIALECT.tokenize(text))
    except SqlglotError as error:
        begin = re.search(r" from \d+:(\d+)$", str(error.__cause__))
        at = position_in(text, int(begin[1])) if begin else Position(1, 1)
    except (RecursionError, ValueError, IndexError):
        at = Position(1, 1)
    raise refusal("syntax", at)


def _check_tokens(tokens: list[Token]) -> None:
    starts = (TokenType.SELECT, TokenType.WITH, TokenType.L_PAREN)
    require(tokens, "one-statement")
    if tokens[0].token_type not in starts:
        first = tokens[0]
        raise refusal("select-only", Position(first.line, first.col - (first.end - first.start)))
    if len(tokens) > MAX_NODES:
        raise refusal("too-large")
    depth = 0
    for token in tokens:
        depth += (token.token_type in _OPEN) - (token.token_type in _CLOSE)
        if depth > MAX_DEPTH:
            raise refusal("too-large", Position(token.line, token.col))


def _where(error: SqlglotError, text: str) -> Position:
    details = getattr(error, "errors", None) or [{}]
    return position_in(text, len(details[0].get("start_context") or ""))


def inlined(tree: exp.Query, views: Mapping[str, str] | None = None) -> exp.Query:
    """Return the tree with the queries of its WITH parts and views in place of their names.

    Args:
        views: texts by name; a view may name those before it.

    Raises:
        DpstreamError: it grows too large, or is recursive.
    """
    tree = normalize_identifiers(tree, dialect=_DIALECT)
    size = [sum(1 for _ in tree.walk())]
    definitions = dict[str, exp.Expr]()
    written = {table.name for table in tree.find_all(exp.Table)} if views else set()
    for name, text in (views or {}).items():
        if written:  # a view that nothing names may be of another data set
            definitions[name] = _view(text, definitions)
    _inline(tree, definitions, size)
    return tree


def _view(text: str, before: Mapping[str, exp.Expr]) -> exp.Expr:
    """Return the query of a view; its nodes have the place of the name that stands for it."""
    query = normalize_identifiers(parsed(text), dialect=_DIALECT)
    _inline(query, before, [0])
    for node in query.walk():
        for part in ("line", "start"):
            node.meta.pop(part, None)
    return query


def _inline(node: exp.Expr, definitions: Mapping[str, exp.Expr], size: list[int]) -> None:
    with_ = node.args.get("with_")
    if with_ is not None:
        definitions = dict(definitions)
        for part in with_.expressions:
            require(part.args.get("alias") is not None, "syntax", part)
            _inline(part.this, definitions, size)
            definitions[part.alias] = part.this  # type: ignore[index]
        node.set("with_", None)
    for child in list(node.iter_expressions()):
        if isinstance(child, exp.Table) and child.name in definitions:
            query = definitions[child.name].copy()
            size[0] += sum(1 for _ in query.walk())
            require(size[0] <= MAX_NODES, "too-large", child)
            alias = exp.TableAlias(this=exp.to_identifier(child.alias_or_name))
            alias.this.meta.update(child.this.meta)
            child.replace(exp.Subquery(this=query, alias=alias))
        else:
            _inline(child, definitions, size)


def qualified(tree: exp.Query, schema: Mapping[str, Mapping[str, str]]) -> exp.Query:
    """Return the tree with every column named by its relation, and types where they are known.

    Args:
        tree: without WITH.
        schema: of each table the columns with their types; nothing else exists.

    Raises:
        DpstreamError: a name is not known or not unique.
    """
    for table in tree.find_all(exp.Table):
        if table.name not in schema:
            raise refusal("unknown-table", position(table), _name_of(table), schema)
    plain = {table: dict(columns) for table, columns in schema.items()}
    mapping = MappingSchema(plain, dialect=_DIALECT, normalize=False)
    try:
        tree = qualify_tables(tree, dialect=_DIALECT)
        tree = qualify_columns(tree, mapping)
        tree = annotate_types(tree, schema=mapping, dialect=_DIALECT)
        tree = quote_identifiers(tree, dialect=_DIALECT)
    except SqlglotError:
        raise _unresolved(tree, schema) from None
    except RecursionError:
        raise refusal("too-large") from None
    except (AttributeError, TypeError, ValueError, IndexError, KeyError, AssertionError):
        raise refusal("syntax") from None
    for node in tree.find_all(exp.Cast, exp.AtTimeZone):
        cast, kind = isinstance(node, exp.Cast), type_of(node.this)
        to = node.args["to"].this if cast else exp.DType.TIMESTAMPTZ
        same = kind in (None, exp.DType.UNKNOWN, exp.DType.NULL, SAME.get(to, to))
        fits = same or (cast and (kind, SAME.get(to, to)) in CASTS)
        require(fits, "cast" if cast else "time-zone", node)
    return tree


def _unresolved(tree: exp.Expr, schema: Mapping[str, Mapping[str, str]]) -> DpstreamError:
    """Return the refusal of the first column that sqlglot could not resolve."""
    with contextlib.suppress(SqlglotError):  # two relations of one name
        for scope in traverse_scope(tree):
            sources = {
                name: schema[source.name]
                if isinstance(source, exp.Table)
                else source.expression.named_selects
                for name, source in scope.sources.items()
            }
            strange = [
                column
                for column in scope.columns
                if sum(
                    column.table in ("", name) and column.name in sources[name] for name in sources
                )
                != 1
            ]
            if strange:
                return unknown_column(min(strange, key=position), sources)
    return refusal("unknown-column")


def _name_of(node: exp.Column | exp.Table) -> str:
    """Return a written name for an error; nothing if a part of it is a literal."""
    parts = list(node.find_all(exp.Identifier))
    named = [part.meta.get("named", "start" not in part.meta) for part in parts]
    if not all(named) or not node.this.meta.get("named"):
        return ""
    return f"{node.table}.{node.name}" if isinstance(node, exp.Column) and node.table else node.name


def unknown_column(node: exp.Column, sources: Mapping[str, Iterable[str]]) -> DpstreamError:
    """Return the refusal of a column that no relation has, or that several have.

    Args:
        sources: of each relation the names of its columns.
    """
    owners = [name for name in sources if node.name in sources[name]]
    if not node.table and not owners:
        choices = {name for names in sources.values() for name in names if name.isprintable()}
    else:
        names = [node.table] if node.table in sources else owners or sources
        choices = {
            f"{name}.{column}"
            for name in names
            for column in (sources[name] if node.table else [node.name])
            if column.isprintable()
        }
    written = _name_of(node)
    code = "ambiguous-column" if owners and not node.table else "unknown-column"
    return refusal(code, position(node), written, choices)
