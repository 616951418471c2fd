"""The sink of BigQuery against the messages it sends: the service itself was never asked.

Rows of BigQuery's tables: types, bytes, parts of a request, and tables that do not fit.
"""

import functools
import pickle
import re
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import pyarrow as pa
import pytest
from google.api_core import exceptions
from google.cloud.bigquery_storage_v1.types import AppendRowsResponse

from dpstream.dp_transforms.batches import release_schema
from dpstream.pipelines.connectors.bigquery import sink as bigquery_table
from dpstream.pipelines.connectors.bigquery import sink as module
from dpstream.pipelines.connectors.bigquery import sink as sink_bigquery
from dpstream.pipelines.connectors.bigquery.sink import (
    UPSERT,
    BigQuerySink,
    BigQueryTables,
    bigquery_type,
    ddl,
    default_stream,
    message_prefix,
    message_type,
    misfits,
    request_parts,
    rows_of,
)
from dpstream.pipelines.connectors.registry import sink_of
from dpstream.pipelines.connectors.sink import RunManifest, digest_of, messages_of
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.stream.begin import begin
from dpstream.state import open as stores
from tests.bigquery_server import (
    ANSWER_ERROR,
    LOSE_ANSWER,
    REFUSE,
    ROW_ERROR,
    WriteServer,
    client,
    running,
)
from tests.fixed_runs import RUN_ID
from tests.golden.refusals import Refused
from tests.pipelines.connectors.files.test_sink import SCHEMA, release
from tests.published import RUNS, Published


def test_types_and_what_has_none(refused: Refused) -> None:
    assert bigquery_type(pa.int32()) == ("INT64", "INT64", "TYPE_INT64")
    assert bigquery_type(pa.binary(16)).sql == bigquery_type(pa.string()).sql == "STRING"
    refused(lambda: bigquery_type(pa.list_(pa.int8())))


def test_rows_are_upserts_and_the_same_for_the_same_row() -> None:
    batch = release(0, 1, ["a", "b"])
    first, second = rows_of(batch)
    assert rows_of(batch.slice(1)) == [second]
    row = message_type(SCHEMA).FromString(first)
    assert (row.key, row.trigger, row.window_start) == ("a", 1, 10**15)
    assert row.release_id == bytes(range(7, 23)).hex()
    assert getattr(row, "_CHANGE_TYPE") == UPSERT  # noqa: B009
    missing = pa.RecordBatch.from_pydict({"x": pa.array([None], pa.int64())})
    assert not message_type(missing.schema).FromString(rows_of(missing)[0]).HasField("x")


def test_no_request_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REQUEST_BYTES", 10)
    rows = [b"x" * n for n in (4, 6, 1, 20, 3)]
    parts = list(request_parts(rows))
    assert parts == [rows[:2], rows[2:3], rows[3:4], rows[4:]]
    assert list(request_parts([])) == []


def column(name: str, kind: str, mode: str = "NULLABLE") -> SimpleNamespace:
    def named(text: str) -> SimpleNamespace:
        return SimpleNamespace(name=text)

    return SimpleNamespace(name=name, type_=named(kind), mode=named(mode))


def test_what_hinders_a_table() -> None:
    schema = pa.schema([("key", pa.string()), ("n", pa.int64())])
    fits = [column("KEY", "STRING"), column("n", "INT64")]
    assert misfits(schema, fits) == ""
    assert misfits(schema, [*fits, column("more", "BOOL")]) == ""
    assert "requires a column" in misfits(schema, [*fits, column("more", "BOOL", "REQUIRED")])
    assert misfits(schema, fits[:1]) == "no column n"
    assert misfits(schema, [fits[0], column("n", "STRING")]) == "n is no INT64"
    assert "key is no STRING" in misfits(schema, [column("key", "STRING", "REPEATED"), fits[1]])


def test_names() -> None:
    assert default_stream("p.d.t") == "projects/p/datasets/d/tables/t/streams/_default"
    assert (message_prefix("p.d.t"), message_prefix("p.d.t_seals")) == ("", "TABLE_seals ")


TABLE = "my-project.my_set.visits"
SINK = f'kind = "bigquery"\ntable = "{TABLE}"'
#: The run id as its releases show it: it was given, not drawn.
RUN = f"INSECURE-{RUN_ID}"
UNAVAILABLE, INVALID, PERMISSION, ABORTED = 14, 3, 7, 10
ROOT = Path(__file__).parents[4]


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
        typed_row: dict[str, Any] = {f.name: row.get(f.name) for f in schema}
        for field in schema:
            if pa.types.is_timestamp(field.type):
                typed_row[field.name] = datetime.fromtimestamp(typed_row[field.name] / 1e6, UTC)
            if pa.types.is_fixed_size_binary(field.type):
                typed_row[field.name] = bytes.fromhex(typed_row[field.name])
        rows.append(typed_row)
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
        seal = msgspec.json.decode(server.tables["visits_seals"][name]["value"])
        assert seal["digest"] == digest_of(zip(messages.keys, messages.values, strict=True))
    # Rows before seals, each to the default stream of its table, named in the header too.
    streams = [stream for stream, *_ in server.requests]
    assert [s.split("/")[5] for s in streams] == ["visits", "visits_seals"]
    for stream, where, *_ in server.requests:
        assert where == [f"write_stream={stream}"]


def test_the_manifest_and_the_definition_have_the_facts(
    server: WriteServer, sink: BigQuerySink, made: tuple[Published, Job, pa.Table]
) -> None:
    """All of them in the manifest; as labels what their alphabet can write."""
    folder = Path(made[1].sink.path)
    facts = msgspec.json.decode((folder / "guarantee.json").read_bytes())
    manifest = msgspec.json.decode((folder / "run.json").read_bytes(), type=RunManifest)
    sink.put_manifest(msgspec.structs.replace(manifest, facts=facts))
    [row] = server.tables["visits_seals"].values()
    assert msgspec.json.decode(row["value"])["facts"] == facts
    assert (facts["guarantee"]["epsilon"], facts["contributions"]) == (20.0, 9)
    text = ddl(made[1].plan, TABLE)
    pairs = dict(re.findall(r'\("dpstream_([a-z_]+)", "([a-z0-9_-]*)"\)', text))
    assert pairs == {
        "plan": made[1].plan.hash, "epsilon": "20_0", "delta": "0_01", "covers": "lifetime",
        "unit": "user", "contributions": "9",
    }  # fmt: skip


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
    refused: Refused,
) -> None:
    server.faults = [fault]
    caught = refused(lambda: sink.write(made[0].batches("of-files")))
    assert "CANARY" not in str(caught) and caught.__cause__ is None
    assert not server.tables["visits_seals"]
    sink.write(made[0].batches("of-files"))
    assert held(server, made[1]).equals(made[2])


def test_a_service_that_stays_away_is_a_coded_error(
    server: WriteServer, made: tuple[Published, Job, pa.Table], refused: Refused
) -> None:
    with running(server) as address:
        sink = BigQuerySink(TABLE, made[1].plan, RUN, functools.partial(client, address), 1.0)
        server.faults = [(REFUSE, UNAVAILABLE)] * 100
        refused(lambda: sink.write(made[0].batches("of-files")))
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
    with (
        mock.patch.object(sink, "_put_control_messages", side_effect=Killed),
        pytest.raises(Killed),
    ):
        sink.write(batches)
    assert server.tables["visits"] and not server.tables["visits_seals"]
    with pytest.raises(AssertionError, match="without a seal"):
        held(server, made[1])
    sink.write(batches)
    assert held(server, made[1]).equals(made[2])


def test_one_with_new_ids_at_each_attempt_is_caught(
    server: WriteServer, sink: BigQuerySink, made: tuple[Published, Job, pa.Table]
) -> None:
    real: Callable[[pa.RecordBatch], list[bytes]] = bigquery_table.rows_of

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
    monkeypatch.setattr(bigquery_table, "_REQUEST_BYTES", 1000)
    sink.write(made[0].batches("of-files"))
    assert len(server.requests) > 4
    assert sum(rows for stream, _, rows, _ in server.requests if "seals" not in stream) == (
        made[2].num_rows
    )
    assert held(server, made[1]).equals(made[2])


def test_rows_are_functions_of_the_release(made: tuple[Published, Job, pa.Table]) -> None:
    """However the batch came to be: copied, cut out of another, or with other metadata."""
    for batch in made[0].batches("of-files"):
        rows = bigquery_table.rows_of(batch)
        assert len(set(rows)) == batch.num_rows
        copied = pa.RecordBatch.from_pylist(batch.to_pylist(), schema=batch.schema)
        twice = pa.concat_batches([batch, batch])
        for same in (copied, twice.slice(batch.num_rows), batch.replace_schema_metadata(None)):
            assert bigquery_table.rows_of(same) == rows
        back = pa.array(range(batch.num_rows - 1, -1, -1), pa.int64())
        assert bigquery_table.rows_of(batch.take(back)) == rows[::-1]


def test_nulls_are_left_out() -> None:
    schema = pa.schema([("release_id", pa.binary(16)), ("mean", pa.float64()), ("n", pa.int64())])
    batch = pa.RecordBatch.from_pylist([{"release_id": b"x" * 16, "n": 0}], schema=schema)
    made = bigquery_table.message_type(schema)
    row = made.FromString(bigquery_table.rows_of(batch)[0])
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
    server.define("visits_seals", bigquery_table.SEAL_SCHEMA)
    return server


def _served(address: str) -> Any:
    return mock.patch.object(bigquery_table, "write_client", functools.partial(client, address))


def held_without_manifest(server: WriteServer, job: Job) -> pa.Table:
    manifest = msgspec.json.decode(server.tables["visits_seals"].pop(f"{RUN}/run")["value"])
    assert manifest["kind"] == "bigquery"
    return held(server, job)


def test_a_restored_store_is_refused(
    made: tuple[Published, Job, pa.Table], refused: Refused
) -> None:
    sink = sink_of(made[0].job(SINK))
    refused(sink.prepare, restoring=True)
    refused(sink.write, [], only_compare=True)


def test_names_of_columns_and_tables(
    made: tuple[Published, Job, pa.Table], refused: Refused
) -> None:
    refused(made[0].job, 'kind = "bigquery"\ntable = "visits"')
    plan = made[1].plan
    for name in ("a page", "_page", "1page", "Run_ID", "p" * 301):
        key = (msgspec.structs.replace(plan.key[0], column=name),)
        refused(BigQuerySink, TABLE, msgspec.structs.replace(plan, key=key))


def test_two_runs_on_one_table(tmp_path: Path, made: tuple[Published, Job, pa.Table]) -> None:
    """The second run changes nothing of the first one's: readers take the rows of a run."""
    server = served_tables(made[1])
    with running(server) as address, _served(address):
        Published(tmp_path / "first").run(SINK)
        first = {name: dict(rows) for name, rows in server.tables.items()}
        Published(tmp_path / "second", "33" * 16).run(SINK)
    for name, rows_before in first.items():
        assert rows_before.items() < server.tables[name].items()
    seals = server.tables["visits_seals"].values()
    assert Counter(s["run_id"] for s in seals) == {RUN: RUNS + 1, f"INSECURE-{'33' * 16}": RUNS + 1}
    for run_id in {s["run_id"] for s in seals}:
        run_seals = [msgspec.json.decode(s["value"]) for s in seals if s["run_id"] == run_id]
        rows = [r for r in server.tables["visits"].values() if r["run_id"] == run_id]
        assert sum(seal.get("rows", 0) for seal in run_seals) == len(rows)


def test_a_release_without_rows_says_its_run(
    server: WriteServer, sink: BigQuerySink, made: tuple[Published, Job, pa.Table]
) -> None:
    sink.write([made[0].batches("of-files")[0].slice(0, 0)])
    [seal] = server.tables["visits_seals"].values()
    assert (seal["name"], seal["run_id"]) == (f"{RUN}/seal-000000-000001", RUN)
    assert not server.tables["visits"]


def test_a_sink_that_was_used_pickles(
    server: WriteServer, sink: BigQuerySink, made: tuple[Published, Job, pa.Table]
) -> None:
    batches = made[0].batches("of-files")
    sink.write(batches[:4])
    again = pickle.loads(pickle.dumps(sink))  # noqa: S301
    again.write(batches[4:])
    assert held(server, made[1]).equals(made[2])
    again.close()


#: What is wrong with the tables.
MISFITS: list[tuple[str, Callable[[WriteServer], Any]]] = [
    ("none", lambda s: s.columns.pop("visits")),
    ("no seals", lambda s: s.columns.pop("visits_seals")),
    ("no column", lambda s: s.columns["visits"].pop("n")),
    ("type", lambda s: s.columns["visits"].update(n=("STRING", "NULLABLE"))),
    ("mode", lambda s: s.columns["visits"].update(n=("DOUBLE", "REPEATED"))),
    ("old seals", lambda s: s.columns["visits_seals"].pop("run_id")),
    ("required", lambda s: s.columns["visits"].update(x=("STRING", "REQUIRED"))),
]


@pytest.mark.parametrize("change", [m[1] for m in MISFITS], ids=[m[0] for m in MISFITS])
def test_tables_are_looked_at_before_the_charge(
    tmp_path: Path,
    made: tuple[Published, Job, pa.Table],
    change: Callable[[WriteServer], Any],
    refused: Refused,
) -> None:
    server, published = served_tables(made[1]), Published(tmp_path / "place")
    change(server)
    with running(server) as address, _served(address):
        caught = refused(lambda: begin(published.job(SINK, ledger=True)))
        stores.close_all()
        assert "CANARY" not in str(caught) and not server.requests
        assert published.place.entries() == []
        server.columns = served_tables(made[1]).columns
        server.columns["visits"]["more"] = ("STRING", "NULLABLE")
        server.columns["visits"]["N"] = server.columns["visits"].pop("n")
        begin(published.job(SINK, ledger=True))
        stores.close_all()
    assert len(published.place.entries()) == 1


class Slow:
    """A client whose service takes a request in a tenth of a second, and loses a connection after
    three of them."""

    def __init__(self) -> None:
        self.calls, self.taken, self.given = 0, 0, list[int]()

    def append_rows(self, requests: Iterator[Any], timeout: float, **_: Any) -> Iterator[Any]:
        """AppendRows."""
        held = list(requests)
        self.calls += 1
        self.given.append(len(held))
        for _request in held[:3]:
            time.sleep(0.1)
            self.taken += 1
            yield AppendRowsResponse(append_result={})
        if len(held) > 3:
            raise exceptions.DeadlineExceeded("CANARY7741")


def test_a_deadline_counts_time_without_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 requests take 2 s in calls of 8, each of which goes on where it was cut off."""
    monkeypatch.setattr(bigquery_table, "_REQUEST_BYTES", 1000)
    slow, given = Slow(), list[int]()

    def rows() -> Iterator[bytes]:
        for number in range(20):
            given.append(number - slow.taken)
            yield b"x" * 900

    tables = BigQueryTables(lambda: slow, 1.8)
    tables.append("p.d.t", bigquery_table.SEAL_SCHEMA, rows())
    assert slow.taken == 20 and slow.given == [8, 5, 2, 8, 5, 2, 4, 1]
    assert max(given) <= bigquery_table.CALL_REQUESTS, "all rows were held at once"


def test_codes_that_nobody_knows(
    server: WriteServer, sink: BigQuerySink, made: tuple[Published, Job, pa.Table], refused: Refused
) -> None:
    server.faults = [(ANSWER_ERROR, 99)]
    refused(lambda: sink.write(made[0].batches("of-files")))


@pytest.mark.parametrize(
    "missing", ["google.cloud.bigquery_storage_v1", "google.api_core.exceptions"]
)
def test_a_client_that_is_not_installed(
    missing: str, made: tuple[Published, Job, pa.Table], refused: Refused
) -> None:
    sink = BigQuerySink(TABLE, made[1].plan, RUN)
    with mock.patch.dict(sys.modules, {missing: None}):
        refused(sink.prepare)


def test_the_definition_of_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """``deploy/bigquery/schema.sql`` is that of the example job."""
    job = load_job(ROOT / "pipelines" / "examples" / "flights.toml")
    assert (ROOT / "deploy" / "bigquery" / "schema.sql").read_text() == ddl(
        job.plan, "project.dataset.flights"
    )
