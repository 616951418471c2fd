"""The sink of BigQuery, through its Storage Write API.  **Untested against the service.**

What it is built on, as the service documents it: on a table with a declared primary key, a row
appended to the default stream with ``_CHANGE_TYPE = 'UPSERT'`` replaces the row of the same key.
So appending a release again changes nothing, whatever was applied before, by whom and in which
order: idempotence needs no state of ours.  (The default stream alone is at least once.  Streams
with offsets, and pending ones, are exactly once only for who knows the stream's name, which the
service chooses: a worker that dies takes it along.)  The service takes such rows as Protocol
Buffers only, not as Arrow.

Tables (``python -m pipelines.sinks.bigquery JOB.toml`` prints their definition): the releases, key
``release_id``; and ``TABLE_seals`` (name, value), key ``name``, for seals and manifests as in
`pipelines.sinks.messages`.  A seal is appended after all its rows are acknowledged.

Nothing is read back, so a lost, older, forked or foreign store is not noticed here, and a restored
one is refused.
"""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa
from typing_extensions import override

from accounting.errors import DpstreamError, RunError, UsageError
from accounting.limits import SINK_SECONDS
from accounting.plan import Plan
from dp_transforms.batches import release_schema
from pipelines.sinks.bigquery_rows import (
    SEAL_SCHEMA,
    bigquery_type,
    requests_of,
    rows_of,
)
from pipelines.sinks.messages import manifest_key, messages_of, seal_key, text_of
from pipelines.sinks.sink import Manifest, Name, WriteOnlySink

#: A column's name in BigQuery that is a field's name in Protocol Buffers as well.
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,299}")
_CALL_SECONDS = 60.0


class BigQuerySink(WriteOnlySink):
    """A table.

    Args:
        table: ``project.dataset.table``.
        plan: the public plan: its columns.
        client: makes the service's client (default: with the account's own rights).
        seconds: how long the service may be away.
    """

    kind, field, another = "bigquery", "sink.table", "a new table"

    def __init__(
        self,
        table: str,
        plan: Plan,
        client: Callable[[], Any] | None = None,
        seconds: float = SINK_SECONDS,
    ) -> None:
        self._table, self._schema = table, release_schema(plan)
        self._make, self._seconds = client or _client, seconds
        self._client: Any = None
        for name in self._schema.names:
            if not _NAME.fullmatch(name) or name.upper().startswith("_"):
                raise UsageError(
                    f"schema.key.{name}", "is no name of a BigQuery column", "rename the column"
                )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None}

    @property
    @override
    def place(self) -> str:
        return self._table

    @property
    @override
    def words(self) -> str:
        return f"BigQuery's table {self._table}"

    @override
    def put_manifest(self, manifest: Manifest) -> None:
        self._seal([(manifest_key(manifest.epoch), text_of(manifest))])

    @override
    def write(self, batches: Sequence[pa.RecordBatch], only_compare: bool = False) -> list[Name]:
        if only_compare:
            self.prepare(restoring=True)  # refuses
        self._append(self._table, self._schema, [row for b in batches for row in rows_of(b)])
        # Only now, that every row is acknowledged.
        releases = [messages_of(batch) for batch in batches]
        self._seal([(seal_key(r.name), text_of(r.seal)) for r in releases])
        return [release.name for release in releases]

    @override
    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.transport.close()

    def _seal(self, named: Sequence[tuple[str, bytes]]) -> None:
        texts = [(name, value.decode()) for name, value in named]
        batch = pa.RecordBatch.from_pylist(
            [{"name": name, "value": value} for name, value in texts], schema=SEAL_SCHEMA
        )
        self._append(f"{self._table}_seals", SEAL_SCHEMA, rows_of(batch))

    def _append(self, table: str, schema: pa.Schema, rows: Sequence[bytes]) -> None:
        """Append rows and wait until all are acknowledged; a call that fails is repeated whole.

        Raises:
            RunError: refused, or not acknowledged in time; some may be applied.
        """
        from google.api_core import exceptions

        if not rows:
            return
        project, dataset, name = table.split(".")
        stream = f"projects/{project}/datasets/{dataset}/tables/{name}/streams/_default"
        try:
            _retry(self._seconds)(self._call)(stream, schema, rows)
        except exceptions.RetryError as error:
            raise _failed(error.cause) from None
        except DpstreamError:
            raise
        except Exception as error:
            raise _failed(error) from None

    def _call(self, stream: str, schema: pa.Schema, rows: Sequence[bytes]) -> None:
        """One connection: every request, and an answer to each."""
        if self._client is None:
            self._client = self._make()
        requests = list(requests_of(stream, schema, rows))
        where = (("x-goog-request-params", f"write_stream={stream}"),)
        answers = self._client.append_rows(
            iter(requests), retry=None, timeout=_CALL_SECONDS, metadata=where
        )
        answered = sum(1 for _ in _accepted(answers))
        if answered < len(requests):
            from google.api_core import exceptions

            raise exceptions.ServiceUnavailable("the connection ended early")


def _accepted(answers: Any) -> Iterator[Any]:
    """Answers that are no refusal; a refusal is raised as the error that its code means."""
    from google.api_core import exceptions

    for answer in answers:
        if answer.error.code or answer.row_errors:
            code = answer.error.code or 3
            raise exceptions.from_grpc_status(_status(code), "refused")
        yield answer


def _status(code: int) -> Any:
    import grpc

    return next(status for status in grpc.StatusCode if status.value[0] == code)


def _client() -> Any:
    try:
        from google.cloud.bigquery_storage_v1 import BigQueryWriteClient
    except ImportError:
        raise UsageError(
            "sink.kind", "needs BigQuery's client", "pip install 'dpstream[bigquery]'"
        ) from None
    return BigQueryWriteClient()


def _retry(seconds: float) -> Any:
    """What may pass is tried again, at most ten seconds apart."""
    from google.api_core import exceptions
    from google.api_core.retry import Retry, if_exception_type

    passing = if_exception_type(
        exceptions.Aborted,
        exceptions.Cancelled,
        exceptions.DeadlineExceeded,
        exceptions.InternalServerError,
        exceptions.ResourceExhausted,
        exceptions.ServiceUnavailable,
        exceptions.Unknown,
    )
    return Retry(predicate=passing, initial=0.2, maximum=10.0, multiplier=1.5, timeout=seconds)


def _failed(error: BaseException | None) -> RunError:
    """The class of a client's error only: its text can quote what was sent."""
    return RunError(
        "sink.table",
        f"did not take a release: {type(error).__name__}",
        "check the table's definition and the account's rights, then run again: the store has "
        "every release",
    )


def ddl(plan: Plan, table: str) -> str:
    """The definition of both tables of a plan, as text of BigQuery's SQL."""

    def create(name: str, schema: pa.Schema, key: str) -> str:
        columns = [
            f"  `{f.name}` {bigquery_type(f.type)}{' NOT NULL' if f.name == key else ''},\n"
            for f in schema
        ]
        text = "".join(columns) + f"  PRIMARY KEY (`{key}`) NOT ENFORCED\n"
        return f"CREATE TABLE IF NOT EXISTS `{name}` (\n{text}) CLUSTER BY `{key}`;\n"

    releases = create(table, release_schema(plan), "release_id")
    return releases + create(f"{table}_seals", SEAL_SCHEMA, "name")


if __name__ == "__main__":
    from pipelines.jobs.job import load_job

    job = load_job(sys.argv[1])
    sys.stdout.write(ddl(job.plan, job.sink.table or "project.dataset.table"))
