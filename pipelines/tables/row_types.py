"""Columns of a batch as a row-local query sees them: of a declared SQL type, value by value.

The canonical forms are those of `dp_transforms.ingest.columns`: what a value becomes depends on it
alone, whatever type the rest of its batch arrived in, and text is NFC.  What does not fit, texts
above 1,024 bytes, NaN and infinities are NULL.
"""

import pyarrow as pa
import pyarrow.compute as pc

from dpstream.accounting.arrays import Bool
from dpstream.dp_transforms.ingest.columns import identity, instant, measure

#: DuckDB's types.
DUCKDB = {
    "INT64": "BIGINT",
    "FLOAT64": "DOUBLE",
    "NUMERIC": "DECIMAL(38, 9)",
    "BOOL": "BOOLEAN",
    "STRING": "VARCHAR",
    "BYTES": "BLOB",
    "DATE": "DATE",
    "TIMESTAMP": "TIMESTAMPTZ",
    "DATETIME": "TIMESTAMP",
}
_IDENTITIES = {"STRING": "string", "INT64": "int", "BOOL": "bool", "BYTES": "bytes"}
_CAST = {"DATE": "date", "NUMERIC": "decimal"}


def typed(column: pa.Array | pa.ChunkedArray, kind: str) -> pa.Array:
    """Return a column for a query that declares it of ``kind``.

    Dates and decimals in text stay text, which the query casts.

    Args:
        kind: one of `columns.TYPES`.
    """
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if kind == "FLOAT64":
        numbers, ok = measure(column)
        return pa.array(numbers, mask=~ok)
    if kind in ("TIMESTAMP", "DATETIME"):
        ticks, ok = instant(column)
        zone = "UTC" if kind == "TIMESTAMP" else None
        return pa.array(ticks, mask=~ok).cast(pa.timestamp("us", zone))
    if kind in _CAST:
        text, ok = identity(column, "string")
        if not ok.any():
            return _with_nulls(*identity(column, _CAST[kind]))
        return _with_nulls(text, ok)
    return _with_nulls(*identity(column, _IDENTITIES[kind]))


def _with_nulls(column: pa.Array, ok: Bool) -> pa.Array:
    """NULL in the place of fillers."""
    if ok.all():
        return column
    return pc.if_else(pa.array(ok), column, pa.scalar(None, column.type))
