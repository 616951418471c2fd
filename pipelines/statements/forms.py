"""What nodes of GoogleSQL are in DuckDB's words, where these mean something else or can fail.

Each form is a function of the node's operands alone, NULL where GoogleSQL has an error, and names
each operand once, or it is a column: a statement does not grow with its depth.  What TRY around it
catches (overflow, casts, bad patterns) is left to TRY; texts that grow are bounded before they are
made, because how much memory is used would tell of a row.

* CAST: TRY_CAST; floats to whole numbers round halves away from zero; 5.0 is the text ``5``.
* ``/``, ``%``, DIV: NULL for a divisor of 0, in parentheses.
* Comparisons of floats: NaN is not equal to, above or below anything.  IN, BETWEEN, NULLIF and CASE
  with an operand compare alike.  LEAST and GREATEST with a NaN are NaN, with a NULL they are NULL.
* CONCAT, ``||``, REPLACE: NULL beyond MAX_TEXT bytes.
* LIKE: a backslash escapes.  SUBSTR: from the first character if it begins before; NULL, as LEFT
  and RIGHT, for a length below 0.
* EXTRACT, TIMESTAMP_DIFF, DATE_ADD, DATE_SUB.
"""

from collections.abc import Callable
from typing import Any

from sqlglot import exp

from dpstream.pipelines.statements import comparisons, text_forms
from dpstream.pipelines.statements.expressions import (
    DECIMALS,
    FLOATS,
    decimal,
    duckdb,
    kind_of,
    once,
)


def exact(node: exp.Expr) -> exp.Expr:
    """The expression with every node in its form; the given one is used up."""
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
    of, to = node.this, node.args["to"]
    if to.this in DECIMALS and not to.expressions:
        to = decimal()
    if kind_of(of) in FLOATS:
        if to.this in (exp.DType.BIGINT, exp.DType.INT):
            of = exp.Anonymous(this="ROUND", expressions=[of])
        elif to.this in (exp.DType.TEXT, exp.DType.VARCHAR):
            form = "REGEXP_REPLACE(TRY_CAST(TRY_CAST(:x AS DOUBLE) AS TEXT), '\\.0$', '')"
            return duckdb(form, x=of)
    return exp.TryCast(this=of, to=to)


def _divided(node: exp.Expr) -> exp.Expr:
    divisor: exp.Expr = node.expression
    if isinstance(node, exp.IntDiv):  # a function: its operands have no parentheses yet
        node.set("this", exp.Paren(this=node.this))
    node.set("expression", exp.Nullif(this=divisor, expression=exp.Literal.number(0)))
    return node if isinstance(node, exp.Div) else exp.Paren(this=node)


def _in_parentheses(node: exp.Expr) -> exp.Expr:
    return exp.Paren(this=node)


def _difference(node: exp.Expr) -> exp.Expr:
    """Whole units that have passed, not boundaries."""
    unit = exp.Literal.string(node.text("unit").lower() or "microsecond")
    return exp.Anonymous(this="DATE_SUB", expressions=[unit, node.expression, node.this])


def _extracted(node: exp.Expr) -> exp.Expr:
    """Days and weeks as GoogleSQL numbers them: Sunday is 1 and begins a week; DuckDB's Sunday is 0
    and its weeks are those of ISO."""
    part, of = node.name.upper(), node.expression
    if part == "DAYOFWEEK":
        return duckdb("(EXTRACT(DOW FROM :x) + 1)", x=of)
    if part == "ISOWEEK":
        return duckdb("EXTRACT(WEEK FROM :x)", x=of)
    if part != "WEEK":
        return node
    # Days before the first Sunday are in week 0.
    return once("(EXTRACT(DOY FROM it_.x) + 6 - EXTRACT(DOW FROM it_.x)) // 7", x=of)


_FORMS: dict[type[exp.Expr], Callable[[Any], exp.Expr]] = {
    **comparisons.FORMS,
    **text_forms.FORMS,
    exp.Cast: _cast,
    exp.TryCast: _cast,
    exp.Extract: _extracted,
    exp.TimestampDiff: _difference,
    exp.Div: _divided,
    exp.Mod: _divided,
    exp.IntDiv: _divided,
    exp.DateAdd: _in_parentheses,
    exp.DateSub: _in_parentheses,
}
