"""P7: canaries in, forced failures at every stage, and no canary in anything that is shown."""

import logging
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import apache_beam as beam
import pyarrow as pa
import pytest
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from click.testing import CliRunner

from dpstream.accounting.errors import DpstreamError, RunError
from dpstream.dp_transforms import batches, bounding, flow, release, step
from dpstream.dp_transforms.beam import workers
from dpstream.dp_transforms.flow import DPStream
from dpstream.dp_transforms.ingest import columns, records
from dpstream.dp_transforms.ingest.records import Canonicaliser
from dpstream.dp_transforms.noise.continuous import ContinuousGaussian
from dpstream.dp_transforms.telemetry import OPERATOR_COUNTERS, guarded
from dpstream.pipelines.cli import main as cli
from dpstream.pipelines.connectors import write as sinks
from dpstream.pipelines.connectors.files import sink as sink_files
from dpstream.pipelines.connectors.files import source as sources
from dpstream.pipelines.connectors.files.source import ReadFiles
from dpstream.pipelines.connectors.registry import sink_of
from dpstream.pipelines.formats.encodings import read_releases
from dpstream.pipelines.runners.errors import coded
from dpstream.pipelines.stream.begin import begin
from dpstream.pipelines.stream.run import run_job
from dpstream.state import arrow
from dpstream.state import open as stores
from dpstream.state.idtable import PairSet
from dpstream.state.sqlite import file as sqlite_file
from dpstream.state.sqlite import retention as sqlite
from dpstream.state.sqlite.database import sqlite3
from dpstream.state.sqlite.store import SqliteStore
from dpstream.state.store import KeyShard
from tests.audit.leaks import (
    KEY,
    UNIT,
    VALUE,
    Logs,
    contents,
    hits,
    leaked_files,
    make_job,
    opened,
    printed,
)
from tests.projects import typed
from tests.written import read_dead_letters

TEXT = f"cannot use {UNIT} at {KEY}: {VALUE}"
ERRORS: list[Callable[[], BaseException]] = [
    lambda: KeyError(KEY),
    lambda: ValueError(TEXT),
    lambda: AssertionError((UNIT, VALUE)),
    lambda: pa.ArrowInvalid(TEXT),
    lambda: UnicodeDecodeError("utf-8", UNIT.encode(), 0, 1, KEY),
    lambda: sqlite3.IntegrityError(TEXT),
    lambda: OSError(5, TEXT, f"/data/{KEY}"),
    lambda: MemoryError(TEXT),
]

#: Where a failure is forced: every stage of the flow, its libraries, the store and the sink.
PLACES: list[tuple[Any, str]] = [
    (sources, "read_piece"), (sources, "placed"),
    (Canonicaliser, "__call__"), (Canonicaliser, "_times"), (Canonicaliser, "_value"),
    (columns, "identity"), (columns, "measure"), (columns, "instant"), (records, "typed_ids"),
    (records.CanonicaliserFactory, "__call__"), (flow.BoundCallback, "__call__"),
    (flow.ReleaseCallback, "__call__"), (flow.SealFactory, "__call__"),
    (workers, "split_by_id"), (batches, "shard_of"), (flow, "concat"),
    (flow, "decide_records"), (bounding, "admit"), (bounding, "expand"), (bounding, "stamp_order"),
    (flow, "steps_through"), (step, "aggregate"), (step, "candidates"), (step, "select"),
    (step, "predict"), (step, "publish"), (step, "id_array"),
    (ContinuousGaussian, "draw"), (PairSet, "add"), (KeyShard, "intern"), (KeyShard, "key_columns"),
    (SqliteStore, "key_shard"), (SqliteStore, "commit_step"), (SqliteStore, "commit_units"),
    (SqliteStore, "_write_steps"), (SqliteStore, "unit_shard"), (arrow, "step_blobs"),
    (arrow, "unit_blobs"), (arrow, "to_bytes"),
    (flow, "seal"), (release, "concat"),
    (pa.ipc, "new_stream"), (pa.ipc, "open_stream"),
    (sink_files.FileSink, "write"), (sink_files, "encode_all"), (sink_files, "put_entries"),
    (sinks, "put_once"), (sinks, "write_dead_letters"),
]  # fmt: skip

FORCED = [
    pytest.param(place, ERRORS[(n + turn) % len(ERRORS)], id=f"{place[1]}-{n}-{turn}")
    for turn in (0, 3)
    for n, place in enumerate(PLACES)
]
CI_FORCED = FORCED[: len(PLACES)]


@pytest.fixture(autouse=True)
def clean_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(flow, "COMMIT_STEPS", 2)  # a group that closes its window writes no states
    yield
    stores.close_all()
    logging.disable(logging.NOTSET)


class Forced:
    """A function that raises once it was called, and how often it was."""

    def __init__(self, make: Callable[[], BaseException]) -> None:
        self.make, self.calls = make, 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        raise self.make()


def search(folder: Path, error: BaseException | None, *texts: str) -> None:
    """Fail if a canary is anywhere but where it may be."""
    matches = [canary for text in texts for canary in hits(text)]
    if error is not None:
        assert isinstance(error, DpstreamError)
        matches += hits(printed(error))
    assert matches == []
    assert list(leaked_files(folder)) == []


def failing_run(folder: Path) -> tuple[BaseException | None, str]:
    """The error a user of ``run_job`` gets, and all logs."""
    job = make_job(folder)
    with Logs() as logs:
        try:
            run_job(job)
        except DpstreamError as error:
            return error, logs.text
    return None, logs.text


@pytest.mark.parametrize(("place", "make"), CI_FORCED)
def test_forced_failures(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    place: tuple[Any, str],
    make: Callable[[], BaseException],
) -> None:
    forced = Forced(make)
    with mock.patch.object(*place, forced):
        error, logs = failing_run(tmp_path / "job")
    assert forced.calls, "the place was never reached"
    assert error is not None, "the failure was swallowed"
    out, err = capfd.readouterr()
    search(tmp_path / "job", error, logs, out, err)
    assert list(leaked_files(tmp_path / "tmp")) == []


@pytest.mark.slow
@pytest.mark.parametrize(("place", "make"), FORCED[len(PLACES) :])
def test_other_forced_failures(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    place: tuple[Any, str],
    make: Callable[[], BaseException],
) -> None:
    test_forced_failures(tmp_path, capfd, place, make)


def test_the_search_finds_what_is_there(tmp_path: Path) -> None:
    """Without the door for errors the same failure is found in logs and exception."""

    class Bare(beam.DoFn):
        def process(self, element: pa.RecordBatch) -> Iterator[Any]:
            yield Forced(ERRORS[1])()

    job = make_job(tmp_path)
    pipeline = beam.Pipeline(runner=FnApiRunner())
    _ = (pipeline | ReadFiles(job)).records | beam.ParDo(Bare())
    with Logs() as logs, pytest.raises(ValueError, match=UNIT) as caught:
        pipeline.run().wait_until_finish()
    assert hits(logs.text) and hits(printed(caught.value))
    (tmp_path / KEY).write_text(VALUE)
    assert len(list(leaked_files(tmp_path))) == 2


def test_a_good_run_shows_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job = make_job(tmp_path / "job")
    with Logs() as logs:
        result = run_job(job, progress=print)
    out, err = capfd.readouterr()
    search(tmp_path / "job", None, logs.text, out, err, repr(result))
    assert read_releases(job.sink.path).column("page").to_pylist().count(KEY) > 0
    dead = read_dead_letters(sinks.dead_letter_folder(job))
    assert dead.num_rows == 4 and not hits(repr(dead.to_pylist()))


def test_command_line(tmp_path: Path) -> None:
    """What a person at a terminal sees of a failure: account, warnings, one line; no canary."""
    for n, make in enumerate(ERRORS[:4]):
        job = make_job(tmp_path / str(n))
        options = ["--quiet", *["--json"][: n % 2]]
        with mock.patch.object(*PLACES[7 * n + 2], Forced(make)):
            result = CliRunner().invoke(cli.cli, typed("run", job.path, *options))
        assert result.exit_code == 4
        assert not hits(result.output) and not hits(result.stderr)
        *warnings, _ = result.stderr.splitlines()
        before = ("Project ", "Account ", "Warning: ")
        assert all(line.startswith(before) for line in warnings)
        assert not warnings or "--json" not in options
        assert not hits(CliRunner().invoke(cli.cli, typed("plan", job.path)).output)


def test_pipeline_and_its_pickles(tmp_path: Path) -> None:
    """Nothing private is part of the pipeline: graph, display data, pickled functions."""
    job = make_job(tmp_path)
    run, _ = begin(job)
    pipeline = beam.Pipeline(runner=FnApiRunner())
    output = (pipeline | ReadFiles(job)).records | DPStream(run.plan, run)
    _ = output.releases | sinks.WriteReleases(sink_of(job))
    graph = pipeline.to_runner_api().SerializeToString()
    assert not hits(opened(graph))
    assert not hits(pickle.dumps((run, run.plan, job.plan))) and not hits(repr(run))
    ring = run.keys.ring()
    for secret in (ring, ring.node, ring.unit):
        with pytest.raises(TypeError, match="never pickled"):
            pickle.dumps(secret)


def test_metrics_are_on_the_list(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    run, _ = begin(job)
    pipeline = beam.Pipeline(runner=FnApiRunner())
    _ = (pipeline | ReadFiles(job)).records | DPStream(run.plan, run)
    result = pipeline.run()
    result.wait_until_finish()
    metrics = result.metrics().query()
    names = {m.key.metric.name for kind in metrics.values() for m in kind}
    assert names <= set(OPERATOR_COUNTERS) and not hits(repr(metrics))
    assert not metrics["distributions"]


@pytest.fixture(scope="module")
def store_pages(tmp_path_factory: pytest.TempPathFactory) -> int:
    """Pages of the store of a run that has room."""
    job = make_job(tmp_path_factory.mktemp("room") / "job")
    run_job(job)
    with sqlite3.connect(job.path.parent / "state" / "s.db") as db:
        return int(db.execute("PRAGMA page_count").fetchone()[0])


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_full_disk(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], store_pages: int, missing: int
) -> None:
    """SQLite has no room; afterwards the run goes on from the same store."""
    real, pages = sqlite_file.connect, store_pages - missing

    def connect(path: Any) -> Any:
        db = real(path)
        db.execute(f"PRAGMA max_page_count = {pages}")
        return db

    job = make_job(tmp_path / "job")
    full = mock.patch.object(sqlite, "connect", connect)
    with Logs() as logs, full, pytest.raises(RunError) as caught:
        run_job(job)
    search(tmp_path / "job", caught.value, logs.text, *capfd.readouterr())
    assert run_job(job).resumed
    assert list(leaked_files(tmp_path / "job")) == []


CORRUPT = [
    b"user,page,time,value\n\xff\xfe" + UNIT.encode() + b"," + KEY.encode() + b",x,1\n",
    f'user,page,time,value\n"{UNIT},{KEY}'.encode(),
    f"user,page,time,value\n{UNIT},{KEY},{KEY},{VALUE},{VALUE}\n".encode(),
    f"user,page,value\n{UNIT},{KEY},{VALUE}\n".encode(),
    f"{UNIT},{KEY},{VALUE}\n{UNIT},{KEY},{VALUE}\n".encode(),
    f"user,page,time,value\n{UNIT},{KEY},2024-13-45T00:00:00Z,{VALUE}\n".encode() + b"\0" * 9,
]


@pytest.mark.parametrize("content", CORRUPT, ids=range(len(CORRUPT)))
def test_corrupt_input(tmp_path: Path, capfd: pytest.CaptureFixture[str], content: bytes) -> None:
    job = make_job(tmp_path / "job")
    (tmp_path / "job" / "in" / "rows.csv").write_bytes(content)
    error = None
    with Logs() as logs:
        try:
            run_job(job)
        except DpstreamError as refused:
            error = refused
    search(tmp_path / "job", error, logs.text, *capfd.readouterr())


def test_errors_hold_nothing_either() -> None:
    """The coded error does not keep the private one behind a curtain (debuggers look there)."""

    class Fails(beam.DoFn):
        @guarded("test")
        def process(self, element: str) -> Iterator[str]:
            raise ValueError(element)
            yield element

        @guarded("test")
        def finish_bundle(self) -> None:
            raise ValueError(TEXT)

    for call in (lambda: list(Fails().process(TEXT)), Fails().finish_bundle):
        with pytest.raises(RunError) as caught:
            call()
        assert not hits(contents(caught.value))
    with pytest.raises(RunError) as caught:
        raise coded(ValueError(TEXT)) from None
    assert not hits(contents(caught.value))
