"""Parquet and rows of databases with texts as bytes, one of which may be no UTF-8.

DuckDB does not read a column of Parquet that has one such text.  As bytes they are decoded one by
one, and what is none is NULL.  It is slower, and asked for when DuckDB failed.
"""

import itertools
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from dpstream.pipelines.formats.parquet import coded_batches, portions
from dpstream.pipelines.tables.catalog import Table
from dpstream.pipelines.tables.files import Piece
from dpstream.pipelines.tables.inputs import files_of


class Decoded:
    """A Parquet table's files, or a piece of them, with texts as bytes; each scan begins anew.

    A column that a file does not have is NULL there.
    """

    def __init__(self, table: Table, piece: Piece | None) -> None:
        self._table, self._piece = table, piece
        self._paths = files_of(table) if piece is None else [piece.path]
        nothing = pa.schema([(column, pa.null()) for column in table.columns])
        schemas = [
            pa.schema(
                [
                    (f.name.lower(), _as_bytes(f.type))
                    for f in pq.read_schema(path)
                    if f.name.lower() in table.columns
                ]
            )
            for path in self._paths
        ]
        self._schema = pa.unify_schemas([nothing, *schemas], promote_options="permissive")

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """A new stream, as Arrow's protocol of capsules has it."""
        reader = pa.RecordBatchReader.from_batches(self._schema, self._batches())
        return reader.__arrow_c_stream__(requested_schema)

    @property
    def texts(self) -> set[str]:
        """Columns that are given as bytes though they are texts."""
        kinds = self._table.columns
        names = [f.name for f in self._schema if pa.types.is_binary(f.type)]
        return {column for column in names if kinds[column] != "BYTES"}

    def _batches(self) -> Iterator[pa.RecordBatch]:
        for path in self._paths:
            with pq.ParquetFile(path) as file:
                names = {n.lower(): n for n in reversed(file.schema_arrow.names)}
                groups = _groups(file, self._piece)
            there = {c: names[c] for c in self._table.columns if c in names}
            for group in groups:
                with coded_batches(path, list(there.values()), group) as (_, batches):
                    for batch in itertools.chain.from_iterable(map(portions, batches)):
                        yield self._fitted(batch, there)

    def _fitted(self, batch: pa.RecordBatch, there: dict[str, str]) -> pa.RecordBatch:
        columns = []
        for field in self._schema:
            if field.name not in there:
                columns.append(pa.nulls(batch.num_rows, field.type))
                continue
            column = batch.column(there[field.name])
            if pa.types.is_dictionary(column.type):
                column = column.dictionary_decode()
            columns.append(column.cast(field.type))
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)


def as_bytes(reader: pa.RecordBatchReader) -> tuple[pa.RecordBatchReader, set[str]]:
    """A database's rows with texts as bytes, for some of them may be none, and which those are."""
    schema = pa.schema([(f.name, _as_bytes(f.type)) for f in reader.schema])
    batches = (
        pa.RecordBatch.from_arrays(
            [column.cast(field.type) for column, field in zip(batch.columns, schema, strict=True)],
            schema=schema,
        )
        for batch in reader
    )
    texts = {
        old.name for old, new in zip(reader.schema, schema, strict=True) if old.type != new.type
    }
    return pa.RecordBatchReader.from_batches(schema, batches), texts


def _groups(file: pq.ParquetFile, piece: Piece | None) -> list[int]:
    """Numbers of the row groups that a piece is made of."""
    numbers, first = [], 0
    for number in range(file.metadata.num_row_groups):
        if piece is None or not piece.rows or piece.first <= first < piece.first + piece.rows:
            numbers.append(number)
        first += file.metadata.row_group(number).num_rows
    return numbers


def _as_bytes(kind: pa.DataType) -> pa.DataType:
    of = pa.types
    if of.is_dictionary(kind):
        return _as_bytes(kind.value_type)
    texts = of.is_string(kind) or of.is_large_string(kind) or of.is_string_view(kind)
    return pa.binary() if texts else kind
