"""CSV and JSON Lines as relations: no row decides how another is read.

* A reader that starts in the middle of a CSV file may start inside a quoted field, and takes the
  lines of that field for rows: one field's text makes rows of other units.  So a file of CSV is
  read from its beginning, by one thread, and a row that is no good CSV is lost by itself (of a
  quote that is never closed, to the next one: `wellformed` tells the owner).
* JSON Lines have no line end inside a value.  They are read as lines and each is parsed by itself:
  one that is no object, or is longer than `MAX_LINE`, is lost, and nothing else.

The header of CSV and what a name says of its compression are public; nothing else is looked at to
decide how a file is read.
"""

import contextlib
import csv
import gzip
import io
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import pyarrow as pa

from dpstream.pipelines.tables.casts import casts, listed, literal
from dpstream.pipelines.tables.catalog import Table
from dpstream.pipelines.tables.inputs import files_of, is_not, without

#: Bytes of the longest row of CSV, and of the longest line of JSON; longer ones are dropped.
MAX_ROW, MAX_LINE = 2_000_000, 1 << 24
_BUFFER = 1 << 25
_PACKED = {".gz": "gzip", ".zst": "zstd"}
#: No line of JSON has it, but escaped: a line is one column.
_NEVER = "\x1f"


def text_view(table: Table, paths: Sequence[str], strict: bool = False) -> str:
    """A SELECT of some of a table's files of CSV or JSON Lines.

    Args:
        strict: fail at a row of CSV that would be dropped.

    Raises:
        RunError: a file of CSV has not the columns of the catalog.
    """
    alike: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for path in paths:
        header = _header(table, path) if table.kind == "csv" else ()
        alike[header, packed(path)].append(path)
    read = _csv if table.kind == "csv" else _jsonl
    return " UNION ALL ".join(
        read(table, header, file_paths, how or "none", strict)
        for (header, how), file_paths in alike.items()
    )


def _csv(
    table: Table, header: tuple[str, ...], paths: list[str], packing: str, strict: bool
) -> str:
    """Dialect and columns are given, so that no row decides about them."""
    names = ", ".join(f"{literal(f'c{i}')}: 'VARCHAR'" for i in range(len(header)))
    places = {name.lower(): f"c{i}" for i, name in enumerate(header)}
    missing = [c for c in table.columns if c not in places]
    if missing:
        raise without(table)
    return (
        f"SELECT {casts(table, places)} FROM read_csv({listed(paths)}, columns = {{{names}}}, "
        "auto_detect = false, header = true, delim = ',', quote = '\"', escape = '\"', "
        f"{_reading(packing, strict, MAX_ROW)}, parallel = false)"
    )


def _jsonl(table: Table, _: object, paths: list[str], packing: str, strict: bool) -> str:
    """Each line by itself, whatever stands in the others."""
    return f"SELECT {casts(table, row='line')} FROM ({_lines(table, paths, packing, strict)})"


def _lines(table: Table, paths: list[str], packing: str, strict: bool) -> str:
    form = "{" + ", ".join(f'"{column}":"VARCHAR"' for column in table.columns) + "}"
    return (
        f"SELECT TRY(json_transform(line, {literal(form)})) AS line, line AS source "
        f"FROM read_csv({listed(paths)}, columns = {{'line': 'VARCHAR'}}, auto_detect = false, "
        f"header = false, delim = '{_NEVER}', quote = '', escape = '', "
        f"{_reading(packing, strict, MAX_LINE)})"
    )


def _reading(packing: str, strict: bool, most: int) -> str:
    """A row that does not fit is dropped by itself, also one that strict rules take for a mess."""
    drop = str(not strict).lower()
    return (
        f"ignore_errors = {drop}, strict_mode = false, max_line_size = {most}, "
        f"buffer_size = {_BUFFER}, compression = '{packing}'"
    )


def bad_lines(table: Table) -> str:
    """A SELECT of whether files of JSON Lines have a line that is no object, nor empty."""
    alike: dict[str | None, list[str]] = defaultdict(list)
    for path in files_of(table):
        alike[packed(path)].append(path)
    parts = (_lines(table, file_paths, how or "none", True) for how, file_paths in alike.items())
    return (
        f"SELECT COUNT(*) > 0 AS bad FROM ({' UNION ALL '.join(parts)}) "
        "WHERE TRY(json_type(source)) IS DISTINCT FROM 'OBJECT' "
        "AND trim(source, chr(32) || chr(9) || chr(13)) <> ''"
    )


def packed(path: str) -> str | None:
    """How a file is compressed, as its name says."""
    return _PACKED.get(os.path.splitext(path)[1].lower())


@contextlib.contextmanager
def unpacked(path: str) -> Iterator[BinaryIO]:
    """The text of a file.

    Raises:
        OSError: it cannot be read, or not be unpacked, here or where it is read.
    """
    how = packed(path)
    if how == "zstd":
        with pa.input_stream(path, compression="zstd") as stream, io.BufferedReader(stream) as file:
            yield file
    else:
        with gzip.open(path) if how == "gzip" else open(path, "rb") as plain:
            yield plain  # type: ignore[misc]


def _header(table: Table, path: str) -> tuple[str, ...]:
    """The names in a CSV file's first line, and no byte of a row; they are public."""
    try:
        with unpacked(path) as file:
            # What is not UTF-8 may stand in a row, and fails where that is read.
            lines = io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="")
            return tuple(next(csv.reader(lines), ()))
    except (OSError, EOFError, csv.Error):
        failure = is_not(table, "CSV")
    raise failure
