"""The layout of text: labelled lines, warnings, and tables of released rows.

Everything that a person reads of a plan, an account or an answer is made of these.  A label starts
a line and its text stands in column 12; further lines of the same label are indented to there.
"""

import math
import textwrap
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from dpstream.accounting.figures import human, time_text

#: Column at which the text after a label starts.
INDENT = 12
#: Characters of a line of wrapped text.
_WIDTH = 100


def labelled(label: str, text: str, *more: str) -> list[str]:
    """Return a label with its text, then further lines of it.

    Example:
        >>> labelled("Can run", "NO. store: is missing", "Fix: name one")
        ['Can run     NO. store: is missing', '            Fix: name one']
    """
    return [f"{label:<{INDENT}}{text}", *(f"{'':<{INDENT}}{line}" for line in more)]


def wrapped(label: str, text: str) -> list[str]:
    """Return a label with a text that is broken into lines of at most 100 characters."""
    return labelled(label, *(textwrap.wrap(text, _WIDTH - INDENT) or [""]))


def each(label: str, texts: Iterable[str]) -> list[str]:
    """Return a labelled line for each text, such as each warning."""
    return [line for text in texts for line in labelled(label, text)]


def page(lines: Iterable[str]) -> str:
    """Return lines as text that ends with a line break."""
    return "".join(f"{line}\n" for line in lines)


def count(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: ``1 charge``, ``2,000 charges``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def value_text(value: Any) -> str:
    """Return a released value as one safe line: no control characters, ``NULL`` for none."""
    if isinstance(value, list):
        return "[" + ", ".join(map(value_text, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, float):
        value += 0.0  # a negative zero is none
        return f"{value:,.0f}" if value == int(value) and abs(value) < 1e15 else f"{value:,.6g}"
    if value is None:
        return "NULL"
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, datetime):
        return time_text(value)
    text = str(value)
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def with_interval(value: Any, low: Any, high: Any) -> str:
    """Return a value with the half-width of its interval, at the digits of that: ``100.2 ±19.6``.

    Where the value is not in the middle (of a median, or at a bound) the ends are named:
    ``9.1 [9, 12]``.  A value that has no interval is returned as `value_text` does.
    """
    if not isinstance(low, float) or not isinstance(high, float) or not math.isfinite(high - low):
        return value_text(value)
    half = (high - low) / 2
    digits = 2 - math.floor(math.log10(half)) if 1e-3 <= half < 1e12 else None

    def text(number: Any) -> str:
        if digits is None or not isinstance(number, float) or not math.isfinite(number):
            return value_text(number)
        plain = f"{number:,.{max(0, digits)}f}"
        return plain.rstrip("0").rstrip(".") if "." in plain else plain

    rounding = 0.5 if isinstance(value, int) else 0.0
    is_number = isinstance(value, float | int)
    if is_number and abs((low + high) / 2 - value) > max(rounding, 0.02 * half):
        return f"{text(value)} [{text(low)}, {text(high)}]"
    return f"{text(value)} ±{human(half)}"


def table_text(
    names: Sequence[str], columns: Sequence[Sequence[str]], right: Sequence[bool]
) -> str:
    """Return texts as an aligned table under a ruled head.

    Args:
        names: titles of the columns.
        columns: their texts, equally many each.
        right: for each column whether its texts end at the right, as numbers do.
    """
    aligned = []
    for name, cells, at_right in zip(names, columns, right, strict=True):
        wide = max((len(text) for text in (name, *cells)), default=0) or 1
        place = str.rjust if at_right else str.ljust
        aligned.append([place(text, wide) for text in (name, "-" * wide, *cells)])
    return page("  ".join(row).rstrip() for row in zip(*aligned, strict=True))
