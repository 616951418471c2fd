"""What a command line asks: figures like ``average(fare)``, ranges like ``fare=0,10,20``, and
answers as tables for people and machines."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dpstream.accounting.errors import UsageError
from dpstream.accounting.figures import human
from dpstream.accounting.regions.space import Category, Space
from dpstream.accounting.sessions.aggregates import (
    COUNT,
    PARTS,
    Aggregate,
    average,
    median,
    quantiles,
    sum_of,
)
from dpstream.pipelines.session.receipt import Answer
from dpstream.pipelines.session.union import Union

if TYPE_CHECKING:
    import pyarrow as pa

_FIGURE = re.compile(r"\s*(\w+)\s*(?:\((.*)\))?\s*", re.S)
_USE = "write count, sum(COLUMN), average(COLUMN), median(COLUMN) or quantiles(COLUMN, 0.25, 0.75)"


def figure_of(text: str) -> Aggregate:
    """The figure of a text.

    Raises:
        UsageError: it is none.
    """
    match = _FIGURE.fullmatch(text)
    what, inside = match.groups() if match else ("", None)
    parts = [part.strip() for part in inside.split(",")] if inside else []
    if what == "count" and not parts and inside is None:
        return COUNT
    made = {"sum": sum_of, "average": average, "median": median}.get(what)
    if made is not None and len(parts) == 1 and parts[0]:
        return made(parts[0])
    if what == "quantiles" and len(parts) > 1:
        try:
            return quantiles(parts[0], [float(part) for part in parts[1:]])
        except ValueError:
            pass
    raise UsageError("figure", "is not a figure that a session can ask for", _USE)


def ranges_of(space: Space, texts: Sequence[str]) -> dict[str, list[Any] | int | None]:
    """The cells of texts: ``NAME`` (every value), ``NAME=16`` (equal ranges), ``NAME=0,10,20``.

    Raises:
        UsageError: one is none, or names a dimension twice.
    """
    cells: dict[str, list[Any] | int | None] = {}
    for text in texts:
        name, _, edges = text.partition("=")
        name = name.strip()
        dimension = space.dimensions[space.place(name)]
        if name in cells:
            raise UsageError("--by", "names a dimension twice", "name each once")
        parts = [part.strip() for part in edges.split(",")] if edges.strip() else []
        if not parts or isinstance(dimension, Category):
            cells[name] = parts or None
        elif len(parts) == 1:
            if not parts[0].isdigit():
                raise UsageError("--by", "must be NAME, NAME=PARTS or NAME=LOW,..,HIGH", "use that")
            cells[name] = int(parts[0])
        else:
            cells[name] = [value_of(space, name, part) for part in parts]
    return cells


def value_of(space: Space, name: str, text: str) -> Any:
    """A value of a dimension, as `Dimension.edge` takes it: instants as microseconds.

    Raises:
        UsageError: it is none.
    """
    from dpstream.accounting.regions.space import Timestamp
    from dpstream.pipelines.project.text import instant_micros

    if isinstance(space.dimensions[space.place(name)], Timestamp):
        return instant_micros(name, text)
    return text


def answer_text(answer: Answer) -> str:
    """The rows as an aligned table; beside a value the half width of its 95% interval."""
    extra = {name for name in answer.table.column_names if _part_of(answer, name)}
    names = [name for name in answer.table.column_names if name not in extra]
    columns = []
    for name in names:
        column = answer.table[name]
        cells = [cell(value) for value in column.to_pylist()]
        if name + PARTS[1] in extra:
            ends = (answer.table[name + part].to_pylist() for part in PARTS[1:])
            cells = [
                _with_bar(c, *pair) for c, pair in zip(cells, zip(*ends, strict=True), strict=True)
            ]
        wide = max(len(text) for text in (name, *cells))
        place = str.rjust if _number(column.type) else str.ljust
        columns.append([place(text, wide) for text in (name, "-" * wide, *cells)])
    return "\n".join("  ".join(row).rstrip() for row in zip(*columns, strict=True)) + "\n"


def _part_of(answer: Answer, name: str) -> bool:
    figures = [figure for a in answer.header.question.aggregates for figure in a.outputs]
    return any(name == figure + part for figure in figures for part in PARTS)


def _number(kind: "pa.DataType") -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def cell(value: Any) -> str:
    """A value for people; texts of the table's model are shown without control characters."""
    if value is None:
        return "NULL"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) < 1e15 and value == int(value) else f"{value:,.6g}"
    if hasattr(value, "strftime"):
        return str(value.strftime("%Y-%m-%dT%H:%M:%SZ"))
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(value))


def _with_bar(text: str, low: float | None, high: float | None) -> str:
    return text if low is None or high is None else f"{text} ±{human((high - low) / 2)}"


def records(answer: Answer) -> list[dict[str, Any]]:
    """The rows for JSON."""
    return [
        {
            name: value if value is None or isinstance(value, int | float) else cell(value)
            for name, value in row.items()
        }
        for row in answer.table.to_pylist()
    ]


def union_text(union: Union) -> str:
    """A figure that was put together, in words."""
    half = (union.high - union.low) / 2
    dates = union.first if union.first == union.last else f"{union.first} to {union.last}"
    return f"{cell(union.value)} ±{human(half)}, of {union.parts:,} parts answered {dates}"
