"""A table's columns with the types of its catalog: what does not fit its type is NULL."""

import contextlib
from collections.abc import Collection

import pyarrow as pa
import pyarrow.parquet as pq

from dpstream.pipelines.tables.catalog import Table
from dpstream.pipelines.tables.inputs import files_of
from dpstream.pipelines.tables.row_types import DUCKDB

#: The first that there are.
_FIRST = {
    "DATE": "5877642-06-25 (BC)",
    "TIMESTAMP": "290309-12-22 (BC) 00:00:00+00",
    "DATETIME": "290309-12-22 (BC) 00:00:00",
}


def casts(
    table: Table,
    places: dict[str, str] | None = None,
    row: str | None = None,
    encoded: Collection[str] = (),
) -> str:
    """A table's columns with its types; texts that are units in one spelling (NFC).

    Args:
        places: names of the columns there; row: the struct that has them; encoded: those that
            are bytes of texts.
    """
    items = []
    for column in table.columns:
        source = quoted(column if places is None else places[column])
        source = source if row is None else f"{row}.{source}"
        if column in encoded:
            source = f"TRY(decode({source}))"
        item = _timely(table, column, f"TRY_CAST({source} AS {typed(table, column)})")
        if column in table.units and table.columns[column] == "STRING":
            item = f"nfc_normalize({item})"
        items.append(f"{item} AS {quoted(column)}")
    return ", ".join(items)


def _timely(table: Table, column: str, item: str) -> str:
    """NULL for what is no time: a file may hold any bits, and DuckDB fails where it uses them.

    So a filter by time skips no row groups: 0.06 CPU s more for 5M rows.  The bare predicate beside
    it would be evaluated on those bits.
    """
    first = _FIRST.get(table.columns[column])
    if first is None or table.kind in ("csv", "jsonl"):
        return item
    kind = typed(table, column)
    in_range = f"{item} >= {kind} '{first}' OR {item} = {kind} '-infinity'"
    return f"CASE WHEN {in_range} THEN {item} END"


def typed(table: Table, column: str) -> str:
    """DuckDB's type of a column; decimals of Parquet keep their own width."""
    kind = table.columns[column]
    if kind == "NUMERIC" and table.kind == "parquet":
        with contextlib.suppress(OSError, pa.ArrowException, IndexError):
            for field in pq.read_schema(files_of(table)[0]):
                if field.name.lower() == column and pa.types.is_decimal(field.type):
                    if field.type.precision <= 38:
                        return f"DECIMAL({field.type.precision}, {field.type.scale})"
                    break
    return DUCKDB[kind]


def listed(paths: list[str]) -> str:
    """A list of texts."""
    return f"[{', '.join(literal(p) for p in paths)}]"


def literal(value: str) -> str:
    """A literal of a text."""
    return "'" + value.replace("'", "''") + "'"


def quoted(value: str) -> str:
    """A quoted name."""
    return '"' + value.replace('"', '""') + '"'
