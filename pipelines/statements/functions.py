"""The private functions of a select list, with their arguments, bounds and quantiles.

Bounds hold for what a unit adds to a group (``per`` is "group": COUNT, SUM, and AVG, whose unit
then adds its own mean), or for each of its rows ("row": VAR, STDDEV and quantiles always, SUM and
AVG by ``contribution_bounds_per_row``; ``CLAMPED BETWEEN`` is the first for COUNT, SUM and AVG).
Without bounds ``low`` and ``high`` are ``None``: they are found by the query and paid by it.
VAR and STDDEV are those of the population.
"""

from typing import Literal

import msgspec
from sqlglot import exp

from dpstream.accounting.query.plan import MAX_QUANTILES
from dpstream.pipelines.statements.allowed import require
from dpstream.pipelines.statements.dialect import Clamped, Private, WithReport
from dpstream.pipelines.statements.options import integer_literal, number, pair, usable
from dpstream.pipelines.statements.ownership import Scope, type_of

Kind = Literal["count", "sum", "mean", "var", "stddev", "units", "quantiles"]
Per = Literal["group", "row"]
#: Parts of APPROX_QUANTILES.
MAX_PARTS = MAX_QUANTILES - 1
_KINDS: dict[str, Kind] = {
    "COUNT": "count",
    "SUM": "sum",
    "AVG": "mean",
    "VAR": "var",
    "VARIANCE": "var",
    "VAR_POP": "var",
    "STDDEV": "stddev",
    "STDDEV_POP": "stddev",
    "MIN": "quantiles",
    "MAX": "quantiles",
    "MEDIAN": "quantiles",
    "NTILE": "quantiles",
    "PERCENTILE": "quantiles",
    "PERCENTILE_CONT": "quantiles",
    "APPROX_QUANTILES": "quantiles",
    "QUANTILES": "quantiles",
}
_FIXED = {"MIN": (0.0,), "MAX": (1.0,), "MEDIAN": (0.5,)}
_PARTS = {"APPROX_QUANTILES", "QUANTILES"}
_ROWS_ONLY = {"var", "stddev", "quantiles"}
#: Plain aggregates that have a private form, by name.
PLAIN: dict[type[exp.Expr], str] = {
    exp.Count: "COUNT",
    exp.Sum: "SUM",
    exp.Avg: "AVG",
    exp.Min: "MIN",
    exp.Max: "MAX",
}


class Function(msgspec.Struct, frozen=True):
    """One private function.

    Attributes:
        name: label of the output, unique in the statement.
        kind: what is published; MIN, MAX, MEDIAN and all quantiles are ``quantiles``.
        argument: over the columns of the statement's source; ``None`` for COUNT(*) and units.
        low, high: bounds, or both ``None``: automatic.
        per: what the bounds hold for.
        report: whether its interval is asked for.
        at: the quantiles, from 0 to 1, in the order asked.
        norm: contribution_norm of its own.
        many: whether the answer is a list of all of ``at`` (APPROX_QUANTILES), not one number.
    """

    name: str
    kind: Kind
    argument: exp.Expr | None
    low: float | None = None
    high: float | None = None
    per: Per = "group"
    report: bool = False
    at: tuple[float, ...] = ()
    norm: float | None = None
    many: bool = False


def private_form(node: exp.Expr) -> Private:
    """Return an aggregate of a private select list as a `Private` node.

    Raises:
        DpstreamError: it has no private form.
    """
    if isinstance(node, Private):
        return node
    name = PLAIN.get(type(node))
    require(name is not None, "dp-aggregate", node)
    extra = [part for part, value in node.args.items() if value and part not in ("this", "big_int")]
    require(not extra and node.this is not None, "arguments", node)
    return Private(this=exp.var(name or ""), expressions=[node.this])


def function_of(node: exp.Expr, name: str, scope: Scope) -> Function:
    """Return the function that a node of a private select list is.

    Args:
        node: plain or private.
        name: label of its output.
        scope: whose columns it is about.

    Raises:
        DpstreamError: wrong arguments or bounds.
    """
    call = private_form(node)
    inside = [n for n in call.walk() if n is not call and isinstance(n, exp.AggFunc | Private)]
    require(not inside, "nested-aggregate", node)
    called = call.name.upper()
    legacy, kind = called.startswith("ANON_"), _KINDS[called.removeprefix("ANON_")]
    called = called.removeprefix("ANON_")
    bounds: list[tuple[tuple[float, float] | None, Per]] = []
    report, norm, plain = False, None, []
    for given in call.expressions:
        part = given
        while isinstance(part, Clamped | WithReport):
            if isinstance(part, Clamped):
                values = exp.Tuple(expressions=[part.args["low"].copy(), part.args["high"].copy()])
                bounds.append((pair(values), "row" if kind in _ROWS_ONLY else "group"))
            report = report or isinstance(part, WithReport)
            part = part.this
        if not isinstance(part, exp.Kwarg):
            plain.append(part)
        elif part.name.lower() == "contribution_norm":
            require(norm is None, "norm", node)
            norm = number(part.expression)
            require(norm is not None and norm > 0 and usable(norm), "norm", node)
        else:
            bounds.append((pair(part.expression), _per(part, kind)))
    plain, positional = _legacy_bounds(plain, called, kind) if legacy else (plain, [])
    bounds += positional
    require(len(bounds) <= 1 and all(b is not None for b, _ in bounds), "bounds", node)
    at = _quantiles(called, plain, node)
    needed = 1 if kind != "quantiles" or called in _FIXED else 2
    require(len(plain) == needed, "arguments", node)
    argument = _argument(kind, plain[0], scope, node)
    if argument is _UNITS:
        require(not bounds, "bounds", node)
        return Function(name, "units", None, report=report, norm=norm)
    low, high, per = None, None, _default(kind)
    if bounds and bounds[0][0] is not None:
        (low, high), per = bounds[0][0], bounds[0][1]
    if kind == "count" and bounds:
        whole_numbers = all(b is not None and b >= 0 and b == int(b) for b in (low, high))
        require(whole_numbers, "count-bounds", node)
    many = called in _PARTS
    return Function(name, kind, argument, low, high, per, report, at, norm, many)


_UNITS = exp.var("units")
#: Types of which no value is a number: a figure of them would be NULL, after its charge.
_NO_NUMBERS = {
    exp.DType.TEXT,
    exp.DType.VARBINARY,
    exp.DType.BOOLEAN,
    exp.DType.DATE,
    exp.DType.TIMESTAMP,
    exp.DType.TIMESTAMPTZ,
    exp.DType.TIME,
}


def _default(kind: Kind) -> Per:
    return "row" if kind in _ROWS_ONLY else "group"


def _per(node: exp.Expr, kind: Kind) -> Per:
    name = node.name.lower()
    names = ("contribution_bounds_per_group", "contribution_bounds_per_row")
    require(name in names, "arguments", node)
    per: Per = "row" if name.endswith("row") else "group"
    fits = per == "row" if kind in _ROWS_ONLY else kind != "count" or per == "group"
    require(fits, "arguments", node)
    return per


def _legacy_bounds(
    plain: list[exp.Expr], called: str, kind: Kind
) -> tuple[list[exp.Expr], list[tuple[tuple[float, float] | None, Per]]]:
    """``ANON_SUM(x, low, high)`` and ``ANON_COUNT(*, high)``: bounds by place."""
    needed = 1 if kind != "quantiles" or called in _FIXED else 2
    extra = plain[needed:]
    if not extra:
        return plain, []
    if kind == "count" and len(extra) == 1:
        extra = [exp.Literal.number(0), *extra]
    values = exp.Tuple(expressions=[part.copy() for part in extra])
    return plain[:needed], [(pair(values), _default(kind))]


def _quantiles(called: str, plain: list[exp.Expr], node: exp.Expr) -> tuple[float, ...]:
    if _KINDS[called] != "quantiles":
        return ()
    if called in _FIXED:
        return _FIXED[called]
    require(len(plain) == 2, "arguments", node)
    if called in _PARTS:
        parts = integer_literal(plain[1], 1, MAX_PARTS)
        require(parts is not None, "quantile", node)
        return tuple(i / (parts or 1) for i in range((parts or 1) + 1))
    quantile = number(plain[1])
    require(quantile is not None and 0 <= quantile <= 1, "quantile", node)
    return (quantile or 0.0,)


def _argument(kind: Kind, given: exp.Expr, scope: Scope, node: exp.Expr) -> exp.Expr | None:
    scope.check_columns(given)
    if isinstance(given, exp.Distinct):
        require(kind == "count", "arguments", node)
        unit = len(given.expressions) == 1 and scope.is_unit(given.expressions[0])
        require(unit, "count-distinct", node)
        return _UNITS
    if isinstance(given, exp.Star):
        require(kind == "count", "arguments", node)
        return None
    require(kind == "count" or type_of(given) not in _NO_NUMBERS, "numbers", node)
    return given
