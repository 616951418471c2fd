"""Boxes, amounts and questions as text.

Boxes become conditions of GoogleSQL that can be asked again.  All of it is public: made from the
table's model, queries and the account.
"""

from decimal import Context, Decimal, Inexact
from fractions import Fraction

from dpstream.accounting.arrays import Int64
from dpstream.accounting.figures import exact as shown
from dpstream.accounting.figures import moment_of, time_text
from dpstream.accounting.regions.amounts import MICRO, exact
from dpstream.accounting.regions.space import (
    Budget,
    Category,
    Dimension,
    Integer,
    Real,
    Space,
    Timestamp,
)
from dpstream.accounting.sessions.aggregates import (
    Aggregate,
    Question,
)

EVERYTHING = "everything"
#: More than the decimal of any float, or of any number of its steps, has.
_MOST_DIGITS = 2_000
#: Further boxes are only counted.
MOST_LISTED = 8


def amount(micro: int) -> str:
    """Return an amount of budget as a decimal, exactly."""
    return decimal(Fraction(int(micro), MICRO))


def decimal(number: Fraction) -> str:
    """Return a fraction that has a finite decimal as that decimal."""
    exactly = Context(prec=_MOST_DIGITS)
    quotient = exactly.divide(Decimal(number.numerator), Decimal(number.denominator))
    return repr(float(number)) if exactly.flags[Inexact] else f"{quotient:f}"


def line(dimension: Dimension, coordinate: int) -> str:
    """Return the value at which a coordinate begins, as predicates write it."""
    match dimension:
        case Integer(low=low):
            return str(low + coordinate)
        case Real(range=(low, _, step)):
            return decimal(low + coordinate * step)
        case Timestamp(low=low, high=high, step=step):
            return f"'{time_text(moment_of(min(low + coordinate * step, high)))}'"
        case Budget(step=step):
            return amount(coordinate * step)
        case Category(codes=codes):
            return "'" + codes[coordinate].replace("\\", "\\\\").replace("'", "\\'") + "'"
    raise TypeError(type(dimension))


def rounding_of(space: Space, question: Question) -> list[str]:
    """Return a line for each column of figures whose values are rounded down to steps."""
    columns = dict.fromkeys(each.column for each in question.aggregates if each.column)
    dimensions = (space.dimensions[space.place(column)] for column in columns)
    return [
        f"{name(each)} is rounded down to steps of {decimal(exact(each.step, each.name))}: an "
        "average or quantile may be too low by up to that, a sum by that for each record."
        for each in dimensions
        if isinstance(each, Real)
    ]


def name(dimension: Dimension) -> str:
    """Return a dimension's name as predicates write it."""
    plain = dimension.name.isidentifier() and dimension.name.isascii()
    return dimension.name if plain else f"`{dimension.name}`"


def side(dimension: Dimension, low: int, high: int) -> str:
    """Return a range of one dimension as a predicate; empty for the whole range."""
    if low == 0 and high == dimension.size:
        return ""
    if high <= dimension.values:
        return _values(dimension, low, high)
    null = f"{name(dimension)} IS NULL"
    if low >= dimension.values:
        return null
    return f"({_values(dimension, low, dimension.values)} OR {null})"


def _values(dimension: Dimension, low: int, high: int) -> str:
    column = name(dimension)
    if low == 0 and high == dimension.values:
        return f"{column} IS NOT NULL"
    if isinstance(dimension, Category):
        codes = [line(dimension, at) for at in range(low, high)]
        return f"{column} = {codes[0]}" if len(codes) == 1 else f"{column} IN ({', '.join(codes)})"
    if isinstance(dimension, Integer) and high == low + 1:
        return f"{column} = {line(dimension, low)}"
    parts = [f"{column} >= {line(dimension, low)}"] if low else []
    if high < dimension.values:
        parts.append(f"{column} < {line(dimension, high)}")
    return " AND ".join(parts)


def box(space: Space, one: Int64) -> str:
    """Return a box as a predicate that can be asked."""
    ranges = zip(space.dimensions, one.tolist(), strict=True)
    parts = [part for dimension, (low, high) in ranges if (part := side(dimension, low, high))]
    return " AND ".join(parts) or EVERYTHING


def boxes(space: Space, many: Int64, most: int = MOST_LISTED) -> list[str]:
    """Return the first boxes as predicates, and how many more there are."""
    lines = [box(space, one) for one in many[:most]]
    return [*lines, f"... and {len(many) - most:,} more"] if len(many) > most else lines


def aggregate(one: Aggregate) -> str:
    """Return a figure as text: ``average(fare)``."""
    if one.what == "count":
        return "count"
    if one.what == "quantiles":
        return f"quantiles({one.column}, {', '.join(shown(q) for q in one.at)})"
    return f"{one.what}({one.column})"


def question(query: Question) -> str:
    """Return figures and cells as text: ``count, sum(fare) by hour``."""
    what = ", ".join(map(aggregate, query.aggregates))
    by = [f"{axis.name} ({axis.count})" for axis in query.cells.axes]
    return f"{what} by {', '.join(by)}" if by else what
