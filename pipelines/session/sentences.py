"""Boxes, amounts and questions as text: predicates that can be asked again, and sentences.

All of it is public: made from the table's model, queries and the account.
"""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from fractions import Fraction

from dpstream.accounting.arrays import Int64
from dpstream.accounting.figures import exact as shown
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
from dpstream.accounting.sessions.aggregates import Aggregate, Question

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
EVERYTHING = "everything"
#: Further boxes are only counted.
MOST_LISTED = 8


def amount(micro: int) -> str:
    """An amount of budget as a decimal, exactly."""
    return decimal(Fraction(int(micro), MICRO))


def decimal(number: Fraction) -> str:
    """Return a fraction that has a finite decimal as that decimal."""
    if number.denominator == 1:
        return str(number.numerator)
    digits, power = 0, number.denominator
    while power % 10 == 0:
        digits, power = digits + 1, power // 10
    while power > 1:
        power = power // 2 if power % 2 == 0 else power // 5 if power % 5 == 0 else 0
        digits += 1
        if power == 0:  # none: as a float
            return repr(float(number))
    text = f"{abs(number.numerator) * 10**digits // number.denominator:0{digits + 1}d}"
    text = f"{text[:-digits]}.{text[-digits:]}".rstrip("0").rstrip(".")
    return f"-{text}" if number < 0 else text


def instant(micros: int) -> str:
    """Return an instant in microseconds since 1970 as ISO text."""
    at = _EPOCH + timedelta(microseconds=int(micros))
    whole_second = at.microsecond == 0
    return at.strftime("%Y-%m-%dT%H:%M:%SZ" if whole_second else "%Y-%m-%dT%H:%M:%S.%fZ")


def line(dimension: Dimension, coordinate: int) -> str:
    """Return the value at which a coordinate begins, as predicates write it."""
    match dimension:
        case Integer(low=low):
            return str(low + coordinate)
        case Real(low=low, step=step):
            return decimal(exact(low, dimension.name) + coordinate * exact(step, dimension.name))
        case Timestamp(low=low, high=high, step=step):
            return f"'{instant(min(low + coordinate * step, high))}'"
        case Budget(step=step):
            return amount(coordinate * step)
        case Category(codes=codes):
            return "'" + codes[coordinate].replace("'", "''") + "'"
    raise TypeError(type(dimension))


def name(dimension: Dimension) -> str:
    """Return a dimension's name as predicates write it."""
    plain = dimension.name.isidentifier() and dimension.name.isascii()
    return dimension.name if plain else '"' + dimension.name.replace('"', '""') + '"'


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
    of = name(dimension)
    if low == 0 and high == dimension.values:
        return f"{of} IS NOT NULL"
    if isinstance(dimension, Category):
        codes = [line(dimension, at) for at in range(low, high)]
        return f"{of} = {codes[0]}" if len(codes) == 1 else f"{of} IN ({', '.join(codes)})"
    if isinstance(dimension, Integer) and high == low + 1:
        return f"{of} = {line(dimension, low)}"
    parts = [f"{of} >= {line(dimension, low)}"] if low else []
    if high < dimension.values:
        parts.append(f"{of} < {line(dimension, high)}")
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


def listed(names: Iterable[str]) -> str:
    """Return names separated by commas; ``none`` without names."""
    return ", ".join(names) or "none"
