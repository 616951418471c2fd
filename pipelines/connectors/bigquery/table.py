"""One BigQuery table through the client of its Storage Write API: what it is, appending to it.

The client keeps connections; a request that may pass is sent again here, because the client's own
retries end where a stream of requests has begun.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import pyarrow as pa

from dpstream.accounting.errors import DpstreamError, PolicyError, RunError
from dpstream.accounting.limits import SINK_SECONDS
from dpstream.pipelines.connectors.bigquery.rows import bigquery_type, column_kind, requests_of
from dpstream.pipelines.connectors.google_client import LOOK_SECONDS, failed, imported, retry

#: One connection, and how many requests (of 4 MB) it carries.
CALL_SECONDS, CALL_REQUESTS = 60.0, 8
_STORAGE = "google.cloud.bigquery_storage_v1"
_MAKE = (
    "make it: python -m dpstream.pipelines.connectors.bigquery.sink JOB.toml prints its definition"
)


def write_client() -> Any:
    """The service's client with the account's own rights."""
    return imported("bigquery", _STORAGE).BigQueryWriteClient()


class BigQueryTables:
    """The tables that a client writes to.

    Args:
        client: makes it.
        seconds: how long the service may be away, which is time in which nothing gets through.
    """

    def __init__(
        self, client: Callable[[], Any] | None = None, seconds: float = SINK_SECONDS
    ) -> None:
        self._make, self._seconds = client or write_client, seconds
        self._client: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None}

    def look(self, table: str, schema: pa.Schema) -> None:
        """Refuse a table that is not there, or that cannot take these columns.

        Raises:
            UsageError: the client is not installed.
            PolicyError, RunError.
        """
        client, types = self._open(), imported("bigquery", f"{_STORAGE}.types")
        from google.api_core import exceptions

        asked = {"name": _stream(table), "view": types.WriteStreamView.FULL}
        try:
            found = client.get_write_stream(asked, timeout=LOOK_SECONDS).table_schema.fields
        except exceptions.NotFound:
            raise RunError("sink.table", f"{_which(table)}is not there", _MAKE) from None
        except Exception as error:
            raise failed("sink.table", error, "cannot be reached") from None
        wrong = _misfits(schema, found)
        if wrong:
            raise PolicyError("sink.table", f"{_which(table)}does not fit: {wrong}", _MAKE)

    def append(self, table: str, schema: pa.Schema, rows: Iterable[bytes]) -> None:
        """Append rows and wait until all are acknowledged.

        A few requests make one call; what of it is not acknowledged is sent again, and the
        deadline begins anew with the next call.

        Raises:
            RunError: refused, or not acknowledged in time; some may be applied.
        """
        client, stream = self._open(), _stream(table)
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

    def close(self) -> None:
        """Let go of the client."""
        client, self._client = self._client, None
        if client is not None:
            client.transport.close()

    def _open(self) -> Any:
        if self._client is None:
            try:
                self._client = self._make()
            except DpstreamError:
                raise
            except Exception as error:  # no credentials
                raise failed("sink.table", error, "cannot be reached") from None
        return self._client


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


def _misfits(schema: pa.Schema, found: Iterable[Any]) -> str:
    """What hinders a table from taking rows of a schema, in words; '': nothing."""
    there = {column.name.lower(): column for column in found}
    wrong = []
    for field in schema:
        column = there.pop(field.name.lower(), None)
        if column is None:
            wrong.append(f"no column {field.name}")
        elif column.type_.name != column_kind(field.type) or column.mode.name == "REPEATED":
            wrong.append(f"{field.name} is no {bigquery_type(field.type)}")
    if any(column.mode.name == "REQUIRED" for column in there.values()):
        wrong.append("it requires a column that no release has")
    return ", ".join(wrong)


def _stream(table: str) -> str:
    project, dataset, name = table.split(".")
    return f"projects/{project}/datasets/{dataset}/tables/{name}/streams/_default"


def _which(table: str) -> str:
    """Words for the second of the tables."""
    return "TABLE_seals " if table.endswith("_seals") else ""
