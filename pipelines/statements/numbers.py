"""Numbers written in a statement: literals only, so that they are public and known before a run."""

import math

from sqlglot import exp

#: Sizes of bounds and norms.
LEAST_BOUND, MAX_BOUND = 1e-60, 1e60


def number(node: exp.Expr | None) -> float | None:
    """The value of a number literal with or without a sign; ``None`` if it is none."""
    if isinstance(node, exp.Neg):
        value = number(node.this)
        return None if value is None else -value
    if isinstance(node, exp.Literal) and not node.is_string:
        try:
            value = float(node.this)
        except ValueError:
            return None
        return value if math.isfinite(value) else None
    return None


def usable(value: float | None) -> bool:
    """Whether a bound or a norm is one: squares of it and of its grid's steps are numbers too."""
    return value is not None and (value == 0 or LEAST_BOUND <= abs(value) <= MAX_BOUND)


def integer_literal(node: exp.Expr | None, low: int, high: int) -> int | None:
    """The value of a literal of digits within a range; ``None`` if it is none."""
    if isinstance(node, exp.Literal) and not node.is_string and node.this.isascii():
        text = node.this
        if text.isdigit() and len(text) <= 19 and low <= int(text) <= high:
            return int(text)
    return None


def pair(node: exp.Expr | None) -> tuple[float, float] | None:
    """``(low, high)`` with low below high, both usable; ``None`` if it is none."""
    if not isinstance(node, exp.Tuple) or len(node.expressions) != 2:
        return None
    low, high = (number(part) for part in node.expressions)
    if low is None or high is None or not (usable(low) and usable(high)):
        return None
    return (low, high) if low < high else None
