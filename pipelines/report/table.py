"""The table of all keys: the rows that a page's script searches, sorts and saves.

A page without its script shows the first rows.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from dpstream.accounting.fields import Field
from dpstream.accounting.figures import human
from dpstream.accounting.plan.timeline import Timeline
from dpstream.pipelines.render.charts import WIDTH
from dpstream.pipelines.report.data import Keys, floats, newest_of_each
from dpstream.pipelines.report.text import EMPTY, instant, plain, stamp

#: Rows that stand in the page itself; the script shows further ones.
FIRST_ROWS = 20
#: Characters of a key column's text in table and CSV.
KEY_TEXT = 120


class Column(NamedTuple):
    """A published column of the table: its title, and the columns of value and sd."""

    title: str
    value: str
    sd: str


class Table(NamedTuple):
    """A table for the page.

    Attributes:
        data: what the script is given; see `table`.
        names: of the key columns; ``columns``: titles of the others.
        first: the first rows: texts of the key, the window's start, the values.
        caption: which rows there are.
    """

    data: dict[str, Any]
    names: list[str]
    columns: list[str]
    first: list[tuple[list[str], str, list[str]]]
    caption: str


def with_error(value: float | None, sd: float | None) -> str:
    """``100 ± 19.6``: a value and 1.96 times its sd."""
    if value is None or sd is None or not np.isfinite([value, sd]).all():
        return "–"
    return f"{human(value)} ± {human(WIDTH * sd)}"


def table(
    fields: Sequence[Field],
    keys: Keys,
    line: Timeline,
    columns: Sequence[Column],
    file: str,
    unfinished: Sequence[int] = (),
) -> Table:
    """The rows of a page, column by column.

    Args:
        unfinished: windows that are not over or that the end of the job cuts: the page opens on the
            newest of the others.

    ``data``: ``names``, ``texts`` (which key columns are text) and ``keys`` (texts of each key);
    ``starts`` and ``ends`` of windows, for people, and ``from`` and ``to``, for CSV; which of them
    are ``complete``; of each row
    ``key`` and ``window`` (places in those lists); ``columns``: title, ``values`` and ``sds`` of
    each; ``file``: of CSV.
    """
    names = [field.column for field in fields]
    numbers, place = np.unique(keys.rows["_window"].to_numpy(), return_inverse=True)
    bounds = [line.window_bounds(int(number)) for number in numbers]
    texts = [[plain(v, KEY_TEXT) for v in keys.ranked[name].to_pylist()] for name in names]
    data = {
        "names": names,
        "texts": [field.type == "string" for field in fields],
        "keys": list(zip(*texts, strict=True)),
        "starts": [instant(low) for low, _ in bounds],
        "ends": [instant(high) for _, high in bounds],
        "complete": (~np.isin(numbers, unfinished)).tolist(),
        "from": [stamp(low) for low, _ in bounds],
        "to": [stamp(high) for _, high in bounds],
        "key": keys.rows["_key"].to_pylist(),
        "window": place.tolist(),
        "columns": [
            {
                "title": column.title,
                "values": _short(keys.rows[column.value], 8),
                "sds": _short(keys.rows[column.sd], 4),
            }
            for column in columns
        ],
        "file": file,
    }
    titles = [column.title for column in columns]
    complete = ~np.isin(numbers, unfinished)[place]
    return Table(data, names, titles, _first(data, newest_of_each(keys, complete)), rows_text(keys))


def _short(column: pa.ChunkedArray, digits: int) -> list[float | None]:
    """Numbers with so many digits; what is not defined is ``None``."""
    return [float(f"{v:.{digits}g}") if np.isfinite(v) else None for v in floats(column).tolist()]


def _first(data: dict[str, Any], newest: Any) -> list[tuple[list[str], str, list[str]]]:
    return [
        (
            [text or EMPTY for text in data["keys"][data["key"][row]]],
            data["starts"][data["window"][row]],
            [with_error(c["values"][row], c["sds"][row]) for c in data["columns"]],
        )
        for row in newest[:FIRST_ROWS].tolist()
    ]


def rows_text(keys: Keys) -> str:
    """Which of all values a page holds."""
    held, least = keys.ranked.num_rows, "" if keys.exact else "at least "
    if keys.rows.num_rows == keys.values and keys.exact:
        return f"All {keys.distinct:,} keys with all their {keys.values:,} values."
    return (
        f"The {held:,} busiest of {least}{keys.distinct:,} keys, each with its newest value; the"
        f" {keys.complete:,} busiest with all their windows: {keys.rows.num_rows:,} of"
        f" {least}{keys.values:,} values. A page holds no more, so that it stays quick; the"
        " releases hold them all."
    )
