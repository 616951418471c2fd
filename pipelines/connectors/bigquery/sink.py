"""The sink of BigQuery, through its Storage Write API.  **Untested against the service.**

What it is built on, as the service documents it: on a table with a declared primary key, a row
appended to the default stream with ``_CHANGE_TYPE = 'UPSERT'`` replaces the row of the same key.
So appending a release again changes nothing, whatever was applied before, by whom and in which
order: idempotence needs no state of ours.  (The default stream alone is at least once.  Streams
with offsets, and pending ones, are exactly once only for who knows the stream's name, which the
service chooses: a worker that dies takes it along.)  The service takes such rows as Protocol
Buffers only, not as Arrow.

Tables (``python -m dpstream.pipelines.connectors.bigquery.sink JOB`` prints their definition):
the releases, key ``release_id``; and ``TABLE_seals`` (name, run_id, value), key ``name``, for seals
and manifests, named and worded as in `pipelines.connectors.sink`.  A seal is appended after all
its rows are acknowledged.

**Appending.**  The client keeps connections; a request that may pass is sent again here, because
the client's own retries end where a stream of requests has begun.

**Rows** go as Protocol Buffers.  Field names are column names; times are int64 micros; a null is a
field left out.  Bytes are text of hex digits, as in the other sinks: a column of bytes can be no
primary key.
"""

import functools
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
from typing_extensions import override

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.errors import DpstreamError, PolicyError, RunError, UsageError
from dpstream.accounting.facts import RunStamp, encoded, labels, run_facts
from dpstream.accounting.limits import SINK_SECONDS
from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms.batches import release_schema, with_plain_stamps
from dpstream.pipelines.connectors.sink import ControlMessage, ReleaseMessages, WriteOnlySink
from dpstream.pipelines.formats.encodings import as_hex
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.state.connecting import (
    LOOK_SECONDS,
    ServiceClient,
    failed,
    imported,
    retry,
)

#: The change that a row stands for: a pseudo column beside the table's own.
CHANGE_TYPE, UPSERT = "_CHANGE_TYPE", "UPSERT"
SEAL_SCHEMA = pa.schema([("name", pa.string()), ("run_id", pa.string()), ("value", pa.string())])
#: Bytes of rows in one request (the service takes 10 MB).
_REQUEST_BYTES = 4 << 20
#: One connection, and how many requests (of 4 MB) it carries.
CALL_SECONDS, CALL_REQUESTS = 60.0, 8
_STORAGE = "google.cloud.bigquery_storage_v1"
_MAKE = "make it: python -m dpstream.pipelines.connectors.bigquery.sink JOB prints its definition"


class ColumnType(NamedTuple):
    """A column's type in BigQuery, in the Storage Write API, and of the field of a row."""

    sql: str
    api: str
    field: str


def bigquery_type(kind: pa.DataType) -> ColumnType:
    """Return the column type for an Arrow type in BigQuery.

    Raises:
        UsageError: none fits.
    """
    tests: list[tuple[Any, tuple[str, str, str]]] = [
        (pa.types.is_timestamp, ("TIMESTAMP", "TIMESTAMP", "TYPE_INT64")),
        (pa.types.is_boolean, ("BOOL", "BOOL", "TYPE_BOOL")),
        (pa.types.is_signed_integer, ("INT64", "INT64", "TYPE_INT64")),
        (pa.types.is_floating, ("FLOAT64", "DOUBLE", "TYPE_DOUBLE")),
        (pa.types.is_string, ("STRING", "STRING", "TYPE_STRING")),
        (pa.types.is_fixed_size_binary, ("STRING", "STRING", "TYPE_STRING")),
        (pa.types.is_binary, ("STRING", "STRING", "TYPE_STRING")),
    ]
    for is_kind, types in tests:
        if is_kind(kind):
            return ColumnType(*types)
    raise UsageError("key", f"of Arrow type {kind} has no column in BigQuery", "cast it")


@functools.lru_cache(maxsize=8)
def message_type(schema: pa.Schema) -> Any:
    """Return the message class of a row; the same for the same columns."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    row = descriptor_pb2.DescriptorProto(name="Row")
    types = [(f.name, bigquery_type(f.type).field) for f in schema]
    for number, (name, kind) in enumerate([*types, (CHANGE_TYPE, "TYPE_STRING")], 1):
        row.field.add(name=name, number=number, label="LABEL_OPTIONAL", type=kind)
    file = descriptor_pb2.FileDescriptorProto(name="dpstream_row.proto", syntax="proto2")
    file.message_type.append(row)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("Row"))


def rows_of(batch: pa.RecordBatch) -> list[bytes]:
    """Return every row as the bytes of an upsert; the same for the same row."""
    table = with_plain_stamps(batch)
    make, schema = message_type(table.schema.remove_metadata()), table.schema
    table = as_hex(table)
    for i, field in enumerate(schema):
        if pa.types.is_timestamp(field.type):
            micros = table.column(i).cast(pa.timestamp("us", "UTC")).cast(pa.int64())
            table = table.set_column(i, field.name, micros)
    return [
        make(
            **{k: v for k, v in row.items() if v is not None}, **{CHANGE_TYPE: UPSERT}
        ).SerializeToString(deterministic=True)
        for row in table.to_pylist()
    ]


def requests_of(stream: str, schema: pa.Schema, rows: Iterable[bytes]) -> Iterator[Any]:
    """Yield the requests of one connection: none is larger than the service takes."""
    from google.cloud.bigquery_storage_v1 import types
    from google.protobuf import descriptor_pb2

    described = descriptor_pb2.DescriptorProto()
    message_type(schema.remove_metadata()).DESCRIPTOR.CopyToProto(described)
    for part in request_parts(rows):
        data = types.AppendRowsRequest.ProtoData(
            writer_schema=types.ProtoSchema(proto_descriptor=described),
            rows=types.ProtoRows(serialized_rows=part),
        )
        yield types.AppendRowsRequest(write_stream=stream, proto_rows=data, trace_id="dpstream")


def request_parts(rows: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Yield rows in parts that a request can hold."""
    part, size = list[bytes](), 0
    for row in rows:
        if part and size + len(row) > _REQUEST_BYTES:
            yield part
            part, size = [], 0
        part.append(row)
        size += len(row)
    if part:
        yield part


def write_client() -> Any:
    """Return the service's client with the account's own rights."""
    return imported("bigquery", _STORAGE).BigQueryWriteClient()


class BigQueryTables(ServiceClient):
    """The tables that a client writes to.

    Args:
        client: makes it.
        seconds: how long the service may be away, which is time in which nothing gets through.
    """

    service = "BigQuery"

    def __init__(
        self, client: Callable[[], Any] | None = None, seconds: float = SINK_SECONDS
    ) -> None:
        super().__init__("sink.table")
        self._make, self._seconds = client or write_client, seconds

    def look(self, table: str, schema: pa.Schema) -> None:
        """Refuse a table that is not there, or that cannot take these columns.

        Raises:
            UsageError: the client is not installed.
            PolicyError, RunError.
        """
        client, types = self._reached(), imported("bigquery", f"{_STORAGE}.types")
        from google.api_core import exceptions

        request = {"name": default_stream(table), "view": types.WriteStreamView.FULL}
        try:
            stream = client.get_write_stream(
                request, timeout=LOOK_SECONDS, retry=retry(LOOK_SECONDS)
            )
            fields = stream.table_schema.fields
        except exceptions.NotFound:
            raise RunError("sink.table", f"{message_prefix(table)}is not there", _MAKE) from None
        except Exception as error:
            raise failed("sink.table", error, "cannot be reached") from None
        wrong = misfits(schema, fields)
        if wrong:
            raise PolicyError("sink.table", f"{message_prefix(table)}does not fit: {wrong}", _MAKE)

    def append(self, table: str, schema: pa.Schema, rows: Iterable[bytes]) -> None:
        """Append rows and wait until all are acknowledged.

        A few requests make one call; what of it is not acknowledged is sent again, and the
        deadline begins anew with the next call.

        Raises:
            RunError: refused, or not acknowledged in time; some may be applied.
        """
        client, stream = self._open(), default_stream(table)
        from google.api_core import exceptions

        requests = iter(requests_of(stream, schema, rows))
        try:
            while left := deque(islice(requests, CALL_REQUESTS)):
                retry(self._seconds)(_call)(client, stream, left)
        except DpstreamError:
            raise
        except exceptions.RetryError as error:
            raise failed("sink.table", error.cause, "did not take a release") from None
        except Exception as error:
            raise failed("sink.table", error, "did not take a release") from None

    @override
    def _new_client(self) -> Any:
        return self._make()

    @override
    def _end(self, client: Any) -> None:
        client.transport.close()


def _call(client: Any, stream: str, left: deque[Any]) -> None:
    """One connection: every request, and an answer to each, which takes it from what is left."""
    from google.api_core import exceptions

    where = (("x-goog-request-params", f"write_stream={stream}"),)
    answers = client.append_rows(iter([*left]), retry=None, timeout=CALL_SECONDS, metadata=where)
    for _ in _accepted(answers):
        left.popleft()  # answers come in the order of the requests
    if left:
        raise exceptions.ServiceUnavailable("the connection ended early")


def _accepted(answers: Any) -> Iterator[Any]:
    """Answers that are no refusal; a refusal is raised as the error that its code means."""
    from google.api_core import exceptions

    for answer in answers:
        if answer.error.code or answer.row_errors:
            code = answer.error.code or 3  # a row's error: an invalid argument
            raise exceptions.from_grpc_status(int(code), "refused")
        yield answer


def misfits(schema: pa.Schema, fields: Iterable[Any]) -> str:
    """Return what hinders a table from taking rows of a schema, in words; empty: nothing."""
    there = {column.name.lower(): column for column in fields}
    wrong = []
    for field in schema:
        column = there.pop(field.name.lower(), None)
        if column is None:
            wrong.append(f"no column {field.name}")
        elif column.type_.name != bigquery_type(field.type).api or column.mode.name == "REPEATED":
            wrong.append(f"{field.name} is no {bigquery_type(field.type).sql}")
    if any(column.mode.name == "REQUIRED" for column in there.values()):
        wrong.append("it requires a column that no release has")
    return ", ".join(wrong)


def default_stream(table: str) -> str:
    """Return the name of a table's default stream."""
    project, dataset, name = table.split(".")
    return f"projects/{project}/datasets/{dataset}/tables/{name}/streams/_default"


def message_prefix(table: str) -> str:
    """Return words for the second of the tables; empty for the first."""
    return "TABLE_seals " if table.endswith("_seals") else ""


#: A column's name in BigQuery (those with a leading ``_`` are its own for the most part) that is a
#: field's name in Protocol Buffers as well.
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,299}")


class BigQuerySink(WriteOnlySink):
    """A table.

    Args:
        table: ``project.dataset.table``.
        plan: the public plan: its columns.
        run_id: id of the run whose releases are written.
        client: makes the service's client (default: with the account's own rights).
        seconds: how long the service may be away.
    """

    kind, field, another = "bigquery", "sink.table", "a new table"
    called = "BigQuery's table"

    def __init__(
        self,
        table: str,
        plan: Plan,
        run_id: str | None = None,
        client: Callable[[], Any] | None = None,
        seconds: float = SINK_SECONDS,
    ) -> None:
        super().__init__(run_id)
        self.place, self._schema = table, release_schema(plan)
        self._tables = BigQueryTables(client, seconds)
        seen = set[str]()
        for name in self._schema.names:
            if not _NAME.fullmatch(name) or name.lower() in seen:  # it does not see the case
                raise UsageError(
                    f"key.{name}", "is no name of a BigQuery column", "rename the column"
                )
            seen.add(name.lower())

    @override
    def prepare(self, restoring: bool = False) -> None:
        super().prepare(restoring)
        self._tables.look(self.place, self._schema)
        self._tables.look(self._seals, SEAL_SCHEMA)

    @override
    def _put_rows(self, run_id: str, releases: Sequence[ReleaseMessages]) -> None:
        rows = (row for release in releases for row in rows_of(release.batch))
        self._tables.append(self.place, self._schema, rows)

    @override
    def _put_control_messages(self, messages: Sequence[ControlMessage]) -> None:
        texts = [{"name": m.name, "run_id": m.run_id, "value": m.value.decode()} for m in messages]
        rows = rows_of(pa.RecordBatch.from_pylist(texts, schema=SEAL_SCHEMA))
        self._tables.append(self._seals, SEAL_SCHEMA, rows)

    @override
    def close(self) -> None:
        self._tables.close()

    @property
    def _seals(self) -> str:
        return f"{self.place}_seals"


def open_sink(job: Job, run_id: str | None) -> BigQuerySink:
    """Return the sink of a job."""
    return BigQuerySink(job.sink.table or "", job.plan, run_id)


def ddl(plan: Plan, table: str) -> str:
    """Return the definition of both tables of a plan, as text of BigQuery's SQL.

    The table of releases has the plan's facts as labels, as far as their alphabet goes, and as its
    description; those of a run are in its manifest.
    """
    facts = run_facts(plan, allocate(plan), RunStamp(plan.hash, "", 0))
    named = {"plan": plan.hash, **labels(facts)}
    pairs = [f'("dpstream_{name}", "{_label(text)}")' for name, text in named.items()]
    described = {name: facts[name] for name in ("guarantee", "lifetime", "unit", "values")}
    description = f"description={msgspec.json.encode(encoded(described).decode()).decode()}"

    def create(name: str, schema: pa.Schema, key: str, options: str = "") -> str:
        columns = [
            f"  `{f.name}` {bigquery_type(f.type).sql}{' NOT NULL' if f.name == key else ''},\n"
            for f in schema
        ]
        text = "".join(columns) + f"  PRIMARY KEY (`{key}`) NOT ENFORCED\n"
        return f"CREATE TABLE IF NOT EXISTS `{name}` (\n{text}) CLUSTER BY `{key}`{options};\n"

    options = f"\nOPTIONS ({description},\n  labels=[{', '.join(pairs)}])"
    releases = create(table, release_schema(plan), "release_id", options)
    return releases + create(f"{table}_seals", SEAL_SCHEMA, "name")


def _label(text: str) -> str:
    """A text in the alphabet and length of labels."""
    return re.sub(r"[^a-z0-9_-]", "_", text.lower())[:63]


if __name__ == "__main__":
    job = load_job(sys.argv[1])
    sys.stdout.write(ddl(job.plan, job.sink.table or "project.dataset.table"))
