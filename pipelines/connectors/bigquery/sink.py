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
and manifests, named and worded as in `pipelines.connectors.messages`.  A seal is appended after all
its rows are acknowledged.
"""

import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
from typing_extensions import override

from dpstream.accounting.errors import UsageError
from dpstream.accounting.limits import SINK_SECONDS
from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms.batches import release_schema
from dpstream.pipelines.connectors.bigquery.table import (
    SEAL_SCHEMA,
    BigQueryTables,
    bigquery_type,
    rows_of,
)
from dpstream.pipelines.connectors.messages import ControlMessage, OutgoingRelease, WriteOnlySink

#: A column's name in BigQuery (those with a leading ``_`` are its own for the most part) that is a
#: field's name in Protocol Buffers as well.
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,299}")


class BigQuerySink(WriteOnlySink):
    """A table.

    Args:
        table: ``project.dataset.table``.
        plan: the public plan: its columns.
        run_id: whose releases come, as they show it.
        client: makes the service's client (default: with the account's own rights).
        seconds: how long the service may be away.
    """

    kind, field, another = "bigquery", "sink.table", "a new table"

    def __init__(
        self,
        table: str,
        plan: Plan,
        run_id: str | None = None,
        client: Callable[[], Any] | None = None,
        seconds: float = SINK_SECONDS,
    ) -> None:
        super().__init__(run_id)
        self._table, self._schema = table, release_schema(plan)
        self._tables = BigQueryTables(client, seconds)
        seen = set[str]()
        for name in self._schema.names:
            if not _NAME.fullmatch(name) or name.lower() in seen:  # it does not see the case
                raise UsageError(
                    f"key.{name}", "is no name of a BigQuery column", "rename the column"
                )
            seen.add(name.lower())

    @property
    @override
    def place(self) -> str:
        return self._table

    @property
    @override
    def description(self) -> str:
        return f"BigQuery's table {self._table}"

    @override
    def prepare(self, restoring: bool = False) -> None:
        super().prepare(restoring)
        self._tables.look(self._table, self._schema)
        self._tables.look(self._seals, SEAL_SCHEMA)

    @override
    def _put_rows(self, releases: Sequence[OutgoingRelease]) -> None:
        rows = (row for release in releases for row in rows_of(release.batch))
        self._tables.append(self._table, self._schema, rows)

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
        return f"{self._table}_seals"


def ddl(plan: Plan, table: str) -> str:
    """The definition of both tables of a plan, as text of BigQuery's SQL."""

    def create(name: str, schema: pa.Schema, key: str) -> str:
        columns = [
            f"  `{f.name}` {bigquery_type(f.type).sql}{' NOT NULL' if f.name == key else ''},\n"
            for f in schema
        ]
        text = "".join(columns) + f"  PRIMARY KEY (`{key}`) NOT ENFORCED\n"
        return f"CREATE TABLE IF NOT EXISTS `{name}` (\n{text}) CLUSTER BY `{key}`;\n"

    releases = create(table, release_schema(plan), "release_id")
    return releases + create(f"{table}_seals", SEAL_SCHEMA, "name")


if __name__ == "__main__":
    from dpstream.pipelines.jobs.job import load_job

    job = load_job(sys.argv[1])
    sys.stdout.write(ddl(job.plan, job.sink.table or "project.dataset.table"))
