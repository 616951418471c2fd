"""The rows of files that DuckDB does not read itself: texts, Arrow and ORC, as batches of Arrow."""

from collections.abc import Iterator
from typing import cast

import msgspec
import pyarrow as pa

from dpstream.accounting.places import FileKind
from dpstream.dp_transforms.ingest.columns import instant
from dpstream.pipelines.formats.columnar import plain_type
from dpstream.pipelines.formats.dialect import read_as
from dpstream.pipelines.formats.parquet import read_row_group, row_groups
from dpstream.pipelines.formats.rows import Part, Rows
from dpstream.pipelines.formats.texts import read_text
from dpstream.pipelines.project.dialect import NUMBERS
from dpstream.pipelines.tables.catalog import Table
from dpstream.pipelines.tables.files import (
    TEXTS,
    columns_of,
    names_in,
    names_of,
    readable,
    text_of,
)


def parts_of(table: Table, path: str) -> Iterator[Part]:
    """Yield the rows of a file that DuckDB does not read, and where there are none.

    Yields:
        columns in the table's order, of the types of `arrow_schema`; raises as `text_parts`.
    """
    if table.kind in TEXTS:
        yield from _text_parts(table, path)
        return
    kind, schema = cast(FileKind, table.kind), arrow_schema(table, path)
    names = {name.lower(): name for name in names_of(table, path)}
    with readable(table):
        for group, first in enumerate(row_groups(path, [*names.values()], kind=kind) or ()):
            for part in read_row_group(path, [*names.values()], group, first, kind):
                yield _typed(part, names, schema) if isinstance(part, Rows) else part


def _typed(part: Rows, names: dict[str, str], schema: pa.Schema) -> Rows:
    arrays = []
    for field in schema:
        column = part.batch.column(names[field.name]) if field.name in names else None
        if column is None:
            column = pa.nulls(part.batch.num_rows)
        elif pa.types.is_timestamp(field.type) and column.type.unit != "us":
            micros, good = instant(column)
            column = pa.array(micros, mask=~good).view(field.type)
        elif field.type == pa.int64() and column.type == pa.uint64():
            column = column.view(pa.int64())
        arrays.append(column)
    return Rows(part.offset, pa.RecordBatch.from_arrays(arrays, schema=schema))


def arrow_schema(table: Table, path: str) -> pa.Schema:
    """Return the types in which DuckDB gets the rows of a file that it does not read.

    Times are in microseconds, and unsigned units have the signed numbers of the same bits, as
    `ingest.columns` reads both.
    """
    if table.kind in TEXTS:
        return pa.schema([(column, pa.string()) for column in table.columns])
    types = {each.name.lower(): plain_type(each.type) for each in columns_of(table, path)}
    for column, kind in types.items():
        if pa.types.is_timestamp(kind):
            types[column] = pa.timestamp("us", kind.tz)
        elif kind == pa.uint64() and column in table.units and table.columns[column] == "INT64":
            types[column] = pa.int64()
    return pa.schema([(column, types.get(column, pa.null())) for column in table.columns])


def _text_parts(table: Table, path: str) -> Iterator[Part]:
    """Yield the rows of a file of CSV or JSON Lines, and where lines are no rows.

    Yields:
        columns in the table's order, with the file's names, as texts.

    Raises:
        RunError: it cannot be read, or has not the columns of the catalog.
    """
    names, reading = names_in(table, path), table.reading
    with text_of(table, path) as stream:
        for part in read_text(table.kind, stream, names, nested=True, csv=reading.csv):
            yield _as_declared(part, table) if isinstance(part, Rows) and reading.converts else part


def _as_declared(part: Rows, table: Table) -> Rows:
    """Return texts with times in RFC 3339, days as clocks show them, and numbers with a point.

    A column of numbers has them, also of times.
    """
    names, reading, time = list(table.columns), table.reading, table.reading.time
    if time is not None:
        kind = table.columns[time.column]
        zone = None if kind in ("DATE", "DATETIME") else time.zone
        local = None if kind in NUMBERS else msgspec.structs.replace(time, zone=zone)
        reading = msgspec.structs.replace(reading, time=local)
    batch = read_as(part.batch.rename_columns(names), reading)
    columns = [column.cast(pa.string()) for column in batch.columns]
    return Rows(part.offset, pa.RecordBatch.from_arrays(columns, part.batch.schema.names))
