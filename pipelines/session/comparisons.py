"""Comparisons of a dimension with a value: the coordinates for which they are true.

A coordinate of an integer, a category or an initial budget stands for one value, so that every
comparison is exact.  One of a real number or an instant stands for a whole step: only ``<`` and
``>=`` at a line of the grid divide records as they divide coordinates, and everything else is
refused, unless the value lies outside the dimension's range.
"""

import operator
import unicodedata
from collections.abc import Callable
from fractions import Fraction
from math import ceil, floor

from dpstream.accounting.errors import InvariantError, UsageError
from dpstream.accounting.regions.amounts import MICRO, exact
from dpstream.accounting.regions.space import (
    Budget,
    Category,
    Dimension,
    Integer,
    Real,
    Timestamp,
)
from dpstream.pipelines.session.conditions import FAR, Ranges, apart

#: Each comparison, and what it is if it is not true (of a value that is there).
NEGATED = {"=": "<>", "<>": "=", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}
#: And with its sides exchanged.
TURNED = {"=": "=", "<>": "<>", "<": ">", ">": "<", "<=": ">=", ">=": "<="}
_ORDER: dict[str, Callable[[str, str], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
Value = Fraction | str | int


def true_at(dimension: Dimension, sign: str, value: Value) -> Ranges:
    """Return the coordinates for which ``column sign value`` is true, never that of missing values.

    Args:
        value: a number for integers, reals and budgets; microseconds for instants; a text for
            categories.

    Raises:
        UsageError: coordinates cannot decide the comparison, or the value has another type.
    """
    if isinstance(dimension, Category):
        return _of_codes(dimension, sign, str(value))
    if isinstance(value, str):
        raise InvariantError("not isinstance(value, str)")
    # A cut that the comparison does not need is not looked for: it may not exist.
    below = _below(dimension, value) if sign not in {"<=", ">"} else 0
    within = _through(dimension, value) if sign not in {"<", ">="} else 0
    return cuts(sign, below, within, 0, dimension.values)


def cuts(sign: str, below: int, through: int, low: int, high: int) -> Ranges:
    """Return the whole numbers from low to before high that a comparison selects.

    Args:
        below: where the numbers that are less end.
        through: where the numbers that are less or equal end.
    """
    parts = {
        "<": ((low, below),),
        ">=": ((below, high),),
        "<=": ((low, through),),
        ">": ((through, high),),
        "=": ((below, through),),
        "<>": ((low, below), (through, high)),
    }[sign]
    return tuple(part for part in parts if part[0] < part[1])


def amounts_at(sign: str, value: Fraction) -> Ranges:
    """Return the amounts in millionths for which ``amount sign value`` is true."""
    micro = max(min(value * MICRO, Fraction(FAR)), Fraction(-FAR))
    return cuts(sign, ceil(micro), floor(micro) + 1, -FAR, FAR)


def _below(dimension: Dimension, value: Fraction | int) -> int:
    """The first coordinate at or above a value."""
    if isinstance(dimension, Budget):
        return _clipped(ceil(value * MICRO / dimension.step), dimension)
    return dimension.edge(value)


def _through(dimension: Dimension, value: Fraction | int) -> int:
    """The first coordinate above a value."""
    if isinstance(dimension, Budget):
        return _clipped(floor(value * MICRO / dimension.step) + 1, dimension)
    if isinstance(dimension, Integer):
        return dimension.edge(floor(value) + 1)
    if not isinstance(dimension, Real | Timestamp):
        raise InvariantError("isinstance(dimension, Real | Timestamp)")
    if isinstance(dimension, Timestamp) and dimension.step == 1:
        return dimension.edge(floor(value) + 1)
    if value < exact(dimension.low, dimension.name):
        return 0
    if value >= exact(dimension.high, dimension.name):
        return dimension.values
    raise UsageError(
        dimension.name,
        "can only be compared by < and >= there: its records are known by steps",
        "write column >= low AND column < high",
    )


def _clipped(at: int, dimension: Dimension) -> int:
    return min(max(at, 0), dimension.values)


def _of_codes(dimension: Category, sign: str, value: str) -> Ranges:
    """Compare texts by their bytes."""
    value = unicodedata.normalize("NFC", value)
    if sign in ("=", "<>"):
        at = dimension.edge(value)
        ranges: Ranges = ((at, at + 1),)
        return ranges if sign == "=" else apart(ranges, 0, dimension.values)
    true = _ORDER[sign]
    return tuple((at, at + 1) for at, code in enumerate(dimension.codes) if true(code, value))
