"""The sink of BigQuery against the messages it sends: the service itself was never asked."""

import functools
import secrets
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pyarrow as pa
import pytest

from accounting.errors import PolicyError, RunError, UsageError
from dp_transforms.batches import release_schema
from pipelines.jobs.job import Job, load_job
from pipelines.sinks import bigquery as sink_bigquery
from pipelines.sinks import bigquery_rows, bigquery_table
from pipelines.sinks.bigquery import BigQuerySink, ddl
from pipelines.sinks.messages import digest_of, messages_of
from pipelines.sinks.sink import sink_of
from state import open as stores
from tests.bigquery_server import (
    ANSWER_ERROR,
    LOSE_ANSWER,
    REFUSE,
    ROW_ERROR,
    WriteServer,
    client,
    running,
)
from tests.published import RUN_ID, RUNS, Published

TABLE = "my-project.my_set.visits"
SINK = f'kind = "bigquery"\ntable = "{TABLE}"'
#: The run id as its releases show it: it was given, not drawn.
RUN = f"INSECURE-{RUN_ID}"
UNAVAILABLE, INVALID, PERMISSION, ABORTED = 14, 3, 7, 10
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Published, Job, pa.Table]:
    published = Published(tmp_path_factory.mktemp("made"))
    return published, *published.files()


@pytest.fixture
def server() -> WriteServer:
    return WriteServer(visits="release_id", visits_seals="name")


@pytest.fixture
def sink(server: WriteServer, made: tuple[Published, Job, pa.Table]) -> Iterator[BigQuerySink]:
    with running(server) as address:
        made_sink = BigQuerySink(TABLE, made[1].plan, RUN, functools.partial(client, address), 5.0)
        yield made_sink
        made_sink.close()


def held(server: WriteServer, job: Job) -> pa.Table:
    """The table as it stands, in the release's form, each release held against its seal."""
    schema = release_schema(job.plan)
    rows = []
    for row in server.tables["visits"].values():
        whole = {f.name: row.get(f.name) for f in schema}
        for field in schema:
            if pa.types.is_timestamp(field.type):
                whole[field.name] = datetime.fromtimestamp(whole[field.name] / 1e6, UTC)
            if pa.types.is_fixed_size_binary(field.type):
                whole[field.name] = bytes.fromhex(whole[field.name])
        rows.append(whole)
    table = pa.Table.from_pylist(rows, schema=schema)
    table = table.sort_by([(n, "ascending") for n in ("window_start", "trigger", "page")])
    seals = [msgspec.json.decode(s["value"]) for s in server.tables["visits_seals"].values()]
    assert sum(seal["rows"] for seal in seals) == table.num_rows, "rows without a seal"
    return table


def test_the_table_holds_what_the_files_hold(
    server: WriteServer, sink: BigQuerySink, made: tuple[Published, Job, pa.Table]
) -> None:
    batches = made[0].batches("of-files")
    assert sink.write(batches) == [(w, t) for w in range(2) for t in range(1, 5)]
    assert held(server, made[1]).equals(made[2]) and made[2].num_rows > 10
    assert len(server.tables["visits_seals"]) == RUNS
    for batch in batches:
        messages = messages_of(batch)
        name = f"{RUN}/seal-{messages.name[0]:06d}-{messages.name[1]:06d}"
        found = msgspec.json.decode(server.tables["visits_seals"][name]["value"])
        assert found["digest"] == digest_of(zip(messages.keys, messages.values, strict=True))
    # Rows before seals, each to the default stream of its table, named in the header too.
    streams = [stream for stream, *_ in server.requests]
    assert [s.split("/")[5] for s in streams] == ["visits", "visits_seals"]
    for stream, where, *_ in server.requests:
        assert where == [f"write_stream={stream}"]


def test_repetition_changes_nothing_and_sends_the_same(
    server: WriteServer, sink: BigQuerySink, made: tuple[Published, Job, pa.Table]
) -> None:
    batches = made[0].batches("of-files")
    sink.write(batches)
    before = {name: dict(rows) for name, rows in server.tables.items()}
    sink.write(batches)
    assert server.tables == before
    assert set(server.applied["visits"].values()) == {2}
    assert server.requests[0][2:] == server.requests[2][2:]


@pytest.mark.parametrize(
    "fault",
    [(REFUSE, UNAVAILABLE), (LOSE_ANSWER, 0), (ANSWER_ERROR, UNAVAILABLE), (ANSWER_ERROR, ABORTED)],
)
@pytest.mark.parametrize("call", [0, 1])
def test_what_may_pass_is_sent_again(
    server: WriteServer,
    sink: BigQuerySink,
    made: tuple[Published, Job, pa.Table],
    fault: tuple[str, int],
    call: int,
) -> None:
    server.faults = [("", 0)] * call + [fault, fault]
    sink.write(made[0].batches("of-files"))
    assert held(server, made[1]).equals(made[2])
    times = 3 if fault[0] == LOSE_ANSWER else 1
    applied = server.applied["visits_seals" if call else "visits"]
    assert set(applied.values()) == {times}


@pytest.mark.parametrize(
    "fault", [(REFUSE, PERMISSION), (ANSWER_ERROR, INVALID), (ROW_ERROR, 0), (REFUSE, INVALID)]
)
def test_a_refusal_is_a_coded_error_without_its_text(
    server: WriteServer,
    sink: BigQuerySink,
    made: tuple[Published, Job, pa.Table],
    fault: tuple[str, int],
) -> None:
    server.faults = [fault]
    with pytest.raises(RunError, match=r"sink\.table: did not take a release: ") as caught:
        sink.write(made[0].batches("of-files"))
    assert "CANARY" not in str(caught.value) and caught.value.__cause__ is None
    assert not server.tables["visits_seals"]
    sink.write(made[0].batches("of-files"))
    assert held(server, made[1]).equals(made[2])


def test_a_service_that_stays_away_is_a_coded_error(
    server: WriteServer, made: tuple[Published, Job, pa.Table]
) -> None:
    with running(server) as address:
        sink = BigQuerySink(TABLE, made[1].plan, RUN, functools.partial(client, address), 1.0)
        server.faults = [(REFUSE, UNAVAILABLE)] * 100
        with pytest.raises(RunError, match="did not take a release: ServiceUnavailable"):
            sink.write(made[0].batches("of-files"))
        server.faults = []
        sink.write(made[0].batches("of-files"))
        assert held(server, made[1]).equals(made[2])
        sink.close()


def test_cut_off_between_rows_and_seal(
    server: WriteServer, sink: BigQuerySink, made: tuple[Published, Job, pa.Table]
) -> None:
    class Killed(BaseException):
        pass

    batches = made[0].batches("of-files")
    with mock.patch.object(sink, "_put_marks", side_effect=Killed), pytest.raises(Killed):
        sink.write(batches)
    assert server.tables["visits"] and not server.tables["visits_seals"]
    with pytest.raises(AssertionError, match="without a seal"):
        held(server, made[1])
    sink.write(batches)
    assert held(server, made[1]).equals(made[2])


def test_a_twin_with_new_ids_at_each_attempt_is_caught(
    server: WriteServer, sink: BigQuerySink, made: tuple[Published, Job, pa.Table]
) -> None:
    real: Callable[[pa.RecordBatch], list[bytes]] = bigquery_rows.rows_of

    def random_ids(batch: pa.RecordBatch) -> list[bytes]:
        if "release_id" in batch.schema.names:
            ids = pa.array([secrets.token_bytes(16) for _ in range(batch.num_rows)], pa.binary(16))
            batch = batch.set_column(0, batch.schema.field(0), ids)
        return real(batch)

    server.faults = [(LOSE_ANSWER, 0)]
    with mock.patch.object(sink_bigquery, "rows_of", random_ids):
        sink.write(made[0].batches("of-files"))
        sink.write(made[0].batches("of-files"))
    with pytest.raises(AssertionError):
        held(server, made[1])


def test_requests_are_small_and_cover_every_row(
    server: WriteServer,
    sink: BigQuerySink,
    made: tuple[Published, Job, pa.Table],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bigquery_rows, "_REQUEST_BYTES", 1000)
    sink.write(made[0].batches("of-files"))
    assert len(server.requests) > 4
    assert sum(rows for stream, _, rows, _ in server.requests if "seals" not in stream) == (
        made[2].num_rows
    )
    assert held(server, made[1]).equals(made[2])


def test_rows_are_functions_of_the_release(made: tuple[Published, Job, pa.Table]) -> None:
    for batch in made[0].batches("of-files"):
        assert bigquery_rows.rows_of(batch) == bigquery_rows.rows_of(batch.slice(0))


def test_nulls_are_left_out() -> None:
    schema = pa.schema([("release_id", pa.binary(16)), ("mean", pa.float64()), ("n", pa.int64())])
    batch = pa.RecordBatch.from_pylist([{"release_id": b"x" * 16, "n": 0}], schema=schema)
    made = bigquery_rows.message_type(schema)
    row = made.FromString(bigquery_rows.rows_of(batch)[0])
    assert not row.HasField("mean") and row.HasField("n") and row.n == 0


def test_a_run_publishes_to_it(tmp_path: Path, made: tuple[Published, Job, pa.Table]) -> None:
    server = served_tables(made[1])
    published = Published(tmp_path / "place")
    with running(server) as address, _served(address):
        job = published.run(SINK)
        assert held_without_manifest(server, job).equals(made[2])
        published.run(SINK)
        assert held_without_manifest(server, job).equals(made[2])
    stores.close_all()


def served_tables(job: Job) -> WriteServer:
    """A service with both tables of a job, and no rows."""
    server = WriteServer(visits="release_id", visits_seals="name")
    server.define("visits", release_schema(job.plan))
    server.define("visits_seals", bigquery_rows.SEAL_SCHEMA)
    return server


def _served(address: str) -> Any:
    return mock.patch.object(bigquery_table, "write_client", functools.partial(client, address))


def held_without_manifest(server: WriteServer, job: Job) -> pa.Table:
    manifest = msgspec.json.decode(server.tables["visits_seals"].pop(f"{RUN}/run")["value"])
    assert manifest["kind"] == "bigquery"
    return held(server, job)


def test_a_restored_store_is_refused(made: tuple[Published, Job, pa.Table]) -> None:
    sink = sink_of(made[0].job(SINK))
    with pytest.raises(PolicyError, match="'bigquery' cannot be read back"):
        sink.prepare(restoring=True)
    with pytest.raises(PolicyError, match="'bigquery' cannot be read back"):
        sink.write([], only_compare=True)


def test_names_of_columns_and_tables(made: tuple[Published, Job, pa.Table]) -> None:
    with pytest.raises(UsageError, match=r"sink\.table.*write project\.dataset\.table"):
        made[0].job('kind = "bigquery"\ntable = "visits"')
    plan = made[1].plan
    key = (msgspec.structs.replace(plan.key[0], column="a page"),)
    with pytest.raises(UsageError, match=r"schema\.key\.a page"):
        BigQuerySink(TABLE, msgspec.structs.replace(plan, key=key))


def test_the_definition_of_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """``deploy/bigquery/schema.sql`` is that of the example job."""
    job = load_job(ROOT / "pipelines" / "examples" / "flights.toml")
    assert (ROOT / "deploy" / "bigquery" / "schema.sql").read_text() == ddl(
        job.plan, "project.dataset.flights"
    )
