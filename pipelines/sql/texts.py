"""Texts of statements: splitting several, EXPLAIN before one, and answers as aligned tables."""

import math
from typing import Any

import pyarrow as pa
from sqlglot.errors import SqlglotError
from sqlglot.tokens import TokenType

from dpstream.pipelines.formats.receipt import LABELS
from dpstream.pipelines.sql.receipt import SqlAnswer, python_values
from dpstream.pipelines.statements.allowed import MAX_CHARACTERS
from dpstream.pipelines.statements.dialect import DpSql
from dpstream.pipelines.statements.errors import refusal

_EXPLAIN = "EXPLAIN"


def split(text: str) -> list[str]:
    """Return the statements of a text, divided by semicolons outside literals and comments.

    Raises:
        DpstreamError: the text cannot be read as SQL.
    """
    if len(text) > MAX_CHARACTERS:
        raise refusal("too-large")
    try:
        tokens = DpSql().tokenize(text)
    except (SqlglotError, RecursionError, ValueError, IndexError):
        raise refusal("syntax") from None
    out, begin, has_token = [], 0, False
    for token in tokens:
        if token.token_type == TokenType.SEMICOLON:
            out += [text[begin : token.start]] if has_token else []
            begin, has_token = token.end + 1, False
        else:
            has_token = True
    return [*out, *([text[begin:]] if has_token else [])]


def explained(text: str) -> str | None:
    """Return the text after EXPLAIN; ``None`` if the text does not begin with it."""
    stripped = text.lstrip()
    if stripped[: len(_EXPLAIN)].upper() == _EXPLAIN and stripped[len(_EXPLAIN) :][:1].isspace():
        return stripped[len(_EXPLAIN) :]
    return None


def answer_text(answer: SqlAnswer) -> str:
    """Return the rows as an aligned table; a column with an interval shows its half-width."""
    reports = [name for name in answer.header.reports if name in answer.intervals]
    extra = {f"{name}_{label}" for name in reports for label in LABELS.values()}
    names = [n for n in answer.table.column_names if n not in extra]
    columns = []
    for name in names:
        cells = [_cell(value) for value in python_values(answer.table.column(name))]
        if name in answer.intervals:
            between = answer.intervals[name]
            pairs = zip(between["low"].to_pylist(), between["high"].to_pylist(), strict=True)
            cells = [_with_bar(c, *pair) for c, pair in zip(cells, pairs, strict=True)]
        number = pa.types.is_integer(answer.table.schema.field(name).type)
        number |= pa.types.is_floating(answer.table.schema.field(name).type)
        wide = max(len(name), *(len(cell) for cell in cells), 1) if cells else len(name)
        place = str.rjust if number else str.ljust
        columns.append([place(cell, wide) for cell in (name, "-" * wide, *cells)])
    return "\n".join("  ".join(row).rstrip() for row in zip(*columns, strict=True)) + "\n"


def records(answer: SqlAnswer) -> list[dict[str, Any]]:
    """Return the rows for JSON: values, and under ``intervals`` each column's sd and ends."""
    values = {name: python_values(answer.table.column(name)) for name in answer.table.column_names}
    between = {name: table.to_pylist() for name, table in answer.intervals.items()}
    return [
        {
            "values": {name: _plain(values[name][row]) for name in values},
            "intervals": {
                name: {LABELS[part]: _plain(end) for part, end in between[name][row].items()}
                for name in between
            },
        }
        for row in range(answer.table.num_rows)
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, list):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):  # JSON has no such number
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_cell(part) for part in value) + "]"
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:,.0f}" if value == int(value) and abs(value) < 1e15 else f"{value:,.6g}"
    if value is None:
        return "NULL"
    text = str(_plain(value))
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _with_bar(cell: str, low: Any, high: Any) -> str:
    """Return a value with the half-width of its interval, at two digits."""
    if not isinstance(low, float) or not isinstance(high, float) or not math.isfinite(high - low):
        return cell
    return f"{cell} ±{(high - low) / 2:.2g}" if high - low < 200 else f"{cell} ±{_half(high - low)}"


def _half(width: float) -> str:
    return f"{width / 2:,.0f}"
