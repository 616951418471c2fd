"""Numbers written in a statement: literals only, so that they are public and known before a run."""

import math

from sqlglot import exp


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


def whole(node: exp.Expr | None, low: int, high: int) -> int | None:
    """The value of a literal of digits within a range; ``None`` if it is none."""
    if isinstance(node, exp.Literal) and not node.is_string and node.this.isascii():
        text = node.this
        if text.isdigit() and len(text) <= 19 and low <= int(text) <= high:
            return int(text)
    return None


def pair(node: exp.Expr | None) -> tuple[float, float] | None:
    """``(low, high)`` with low below high; ``None`` if it is none."""
    if not isinstance(node, exp.Tuple) or len(node.expressions) != 2:
        return None
    low, high = (number(part) for part in node.expressions)
    return (low, high) if low is not None and high is not None and low < high else None
