"""Rows of a batch as the Protocol Buffers that BigQuery's Storage Write API takes.

Field names are column names; times are int64 micros; a null is a field left out.  Bytes are text of
hex digits, as in the other sinks: a column of bytes can be no primary key.
"""

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.connectors.records.formats import as_hex

#: The change that a row stands for: a pseudo column beside the table's own.
CHANGE_TYPE, UPSERT = "_CHANGE_TYPE", "UPSERT"
SEAL_SCHEMA = pa.schema([("name", pa.string()), ("run_id", pa.string()), ("value", pa.string())])
#: Bytes of rows in one request (the service takes 10 MB).
_REQUEST_BYTES = 4 << 20


def bigquery_type(kind: pa.DataType) -> str:
    """A column's type in BigQuery.

    Raises:
        UsageError: none fits.
    """
    return _types_of(kind)[0]


def column_kind(kind: pa.DataType) -> str:
    """The same as the Storage Write API names it."""
    found = bigquery_type(kind)
    return "DOUBLE" if found == "FLOAT64" else found


def _types_of(kind: pa.DataType) -> tuple[str, str]:
    """(type in BigQuery, type of the field)."""
    tests: list[tuple[Any, tuple[str, str]]] = [
        (pa.types.is_timestamp, ("TIMESTAMP", "TYPE_INT64")),
        (pa.types.is_boolean, ("BOOL", "TYPE_BOOL")),
        (pa.types.is_signed_integer, ("INT64", "TYPE_INT64")),
        (pa.types.is_floating, ("FLOAT64", "TYPE_DOUBLE")),
        (pa.types.is_string, ("STRING", "TYPE_STRING")),
        (pa.types.is_fixed_size_binary, ("STRING", "TYPE_STRING")),
        (pa.types.is_binary, ("STRING", "TYPE_STRING")),
    ]
    for is_kind, types in tests:
        if is_kind(kind):
            return types
    raise UsageError("schema.key", f"of Arrow type {kind} has no column in BigQuery", "cast it")


@functools.lru_cache(maxsize=8)
def message_type(schema: pa.Schema) -> Any:
    """The message class of a row; the same for the same columns."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    row = descriptor_pb2.DescriptorProto(name="Row")
    types = [(f.name, _types_of(f.type)[1]) for f in schema]
    for number, (name, kind) in enumerate([*types, (CHANGE_TYPE, "TYPE_STRING")], 1):
        row.field.add(name=name, number=number, label="LABEL_OPTIONAL", type=kind)
    file = descriptor_pb2.FileDescriptorProto(name="dpstream_row.proto", syntax="proto2")
    file.message_type.append(row)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("Row"))


def rows_of(batch: pa.RecordBatch) -> list[bytes]:
    """Every row as the bytes of an upsert; the same for the same row."""
    make = message_type(batch.schema.remove_metadata())
    table = as_hex(pa.Table.from_batches([batch]))
    for i, field in enumerate(batch.schema):
        if pa.types.is_timestamp(field.type):
            micros = table.column(i).cast(pa.timestamp("us", "UTC")).cast(pa.int64())
            table = table.set_column(i, field.name, micros)
    return [
        make(**{k: v for k, v in row.items() if v is not None}, **{CHANGE_TYPE: UPSERT})
        .SerializeToString(deterministic=True)
        for row in table.to_pylist()
    ]  # fmt: skip


def requests_of(stream: str, schema: pa.Schema, rows: Iterable[bytes]) -> Iterator[Any]:
    """The requests of one connection: none is larger than the service takes."""
    from google.cloud.bigquery_storage_v1 import types
    from google.protobuf import descriptor_pb2

    described = descriptor_pb2.DescriptorProto()
    message_type(schema.remove_metadata()).DESCRIPTOR.CopyToProto(described)
    for part in _parts(rows):
        data = types.AppendRowsRequest.ProtoData(
            writer_schema=types.ProtoSchema(proto_descriptor=described),
            rows=types.ProtoRows(serialized_rows=part),
        )
        yield types.AppendRowsRequest(write_stream=stream, proto_rows=data, trace_id="dpstream")


def _parts(rows: Iterable[bytes]) -> Iterator[list[bytes]]:
    part, size = list[bytes](), 0
    for row in rows:
        if part and size + len(row) > _REQUEST_BYTES:
            yield part
            part, size = [], 0
        part.append(row)
        size += len(row)
    if part:
        yield part
