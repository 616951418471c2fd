"""Files as relations: the SELECTs that read a table's files, whole or in pieces.

No row decides how another is read (`text_files`), and a part of a file is read as it is within the
whole.
"""

import contextlib
import os
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from dpstream.pipelines.formats.parquet import refuse_large
from dpstream.pipelines.tables.casts import casts, listed
from dpstream.pipelines.tables.catalog import Table
from dpstream.pipelines.tables.inputs import files_of, is_not, without
from dpstream.pipelines.tables.text_files import text_view

#: A column that DuckDB's reader of Parquet adds: the number of a row in its file.
_NUMBER = "file_row_number"


class Piece(NamedTuple):
    """A part of a table's files that is read by itself.

    Attributes:
        table: its name; path: one of its files.
        first, rows: of a Parquet file; no rows: the whole file.
    """

    table: str
    path: str
    first: int = 0
    rows: int = 0


def rows_of(table: Table) -> int:
    """About how many rows a table's files hold."""
    rows = 0
    for path in files_of(table):
        with contextlib.suppress(OSError, pa.ArrowInvalid):
            if table.kind == "parquet":
                rows += pq.read_metadata(path).num_rows
            else:
                rows += os.path.getsize(path) // 24
    return rows


def view(table: Table, piece: Piece | None, strict: bool = False) -> str:
    """A SELECT of a table's files with the catalog's types.

    Args:
        piece: only this part of them.
        strict: fail at a row of CSV that would be dropped.

    Raises:
        RunError: a file has not the columns of the catalog, or none that can be read.
    """
    paths = files_of(table) if piece is None else [piece.path]
    if table.kind == "parquet":
        _check_columns(table, paths)
        condition = (
            ""
            if piece is None or not piece.rows
            else (f" WHERE {_NUMBER} >= {piece.first} AND {_NUMBER} < {piece.first + piece.rows}")
        )
        more = f", {_NUMBER} = true" if condition else ""
        read = f"read_parquet({listed(paths)}, union_by_name = true{more})"
        return f"SELECT {casts(table)} FROM {read}{condition}"
    return text_view(table, paths, strict)


def _check_columns(table: Table, paths: list[str]) -> None:
    """Every column is in one of the files, by their footers.

    DuckDB has columns of its own for what no file has, among them a row's number in its file: that
    one depends on the rows of other units.
    """
    missing = set(table.columns)
    for path in paths:
        missing -= {name.lower() for name in columns_of(table, path)}
    if missing:
        raise without(table)


def columns_of(table: Table, path: str) -> list[str]:
    """Names of the columns of a Parquet file, whose pages DuckDB may decode as they are.

    Raises:
        RunError: it is no Parquet file.
        UnpacksTooLargeError: see `refuse_large`.
    """
    try:
        meta = pq.read_metadata(path)
        names = list(meta.schema.to_arrow_schema().names)
    except (OSError, pa.ArrowException):
        failed = is_not(table, "Parquet")
    else:
        needed = [name for name in names if name.lower() in table.columns]
        refuse_large(meta, needed, f"table {table.name}", "a file of it")
        return names
    raise failed


def divisible(table: Table, path: str) -> bool:
    """Whether a Parquet file can be read in pieces: rows have a number in a column of that name."""
    return _NUMBER not in {name.lower() for name in columns_of(table, path)}
