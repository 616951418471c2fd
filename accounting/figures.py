"""Public figures as text: a guarantee is never shown smaller than it is.

A figure that says how much may be learnt or spent is shortened with ``up``, one that says how
much is proven or left with ``down``.  Both round the number as a person writes it (its shortest
decimal form), so 0.1 stays 0.1.
"""

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal

from dpstream.accounting.limits import MICROS_PER_SECOND


def up(figure: float, digits: int = 6) -> str:
    """A figure with at most so many digits, never below itself."""
    return _shortened(figure, digits, ROUND_CEILING)


def down(figure: float, digits: int = 6) -> str:
    """A figure with at most so many digits, never above itself."""
    return _shortened(figure, digits, ROUND_FLOOR)


def exact(figure: float) -> str:
    """A figure as short as it can be written without changing it."""
    short = f"{figure:g}"
    return short if float(short) == figure else repr(float(figure))


def _shortened(figure: float, digits: int, rounding: str) -> str:
    if not math.isfinite(figure):
        return f"{figure:g}"
    rounded = Context(prec=digits, rounding=rounding).create_decimal(Decimal(repr(float(figure))))
    return f"{float(rounded):.{digits}g}"


def duration(micros: int) -> str:
    """A length of time in words, exact: the largest unit that divides it."""
    names = (("day", 86400), ("hour", 3600), ("minute", 60), ("second", 1))
    for name, seconds in names:
        number, rest = divmod(micros, seconds * MICROS_PER_SECOND)
        if number and not rest:
            return f"{number} {name}{'s' if number != 1 else ''}"
    return f"{micros} microseconds"
