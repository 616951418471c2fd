"""Prism: what it does with state, timers, splits and clocks, and what it reports."""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from dpstream.accounting.errors import PolicyError
from dpstream.dp_transforms.beam import buffer
from dpstream.dp_transforms.beam.buffer import BufferUntilTriggerTime
from dpstream.dp_transforms.beam.clock import Announced, ClockTick, WallClock, clock_tick_of
from dpstream.dp_transforms.flow import CATCH_UP_LIMIT, DPStream
from dpstream.dp_transforms.telemetry import Deliveries, forget_error
from dpstream.pipelines.connectors.folder.store import close_files, rfc3339
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.operate.metrics import serving
from dpstream.pipelines.runners import table as runner_settings
from dpstream.pipelines.runners.errors import coded
from dpstream.pipelines.runners.job_servers import descendants
from dpstream.pipelines.runners.table import PRISM_WHOLE_BUNDLES, make_runner
from dpstream.pipelines.stream.run import run_job
from dpstream.state import open as stores
from tests.audit.leaks import hits, make_job
from tests.bench.common import tree_seconds
from tests.dp_transforms.beam.test_workers import Once
from tests.dp_transforms.runs import PLANS, stream_of
from tests.folders import CANARY, job_text, write
from tests.pipelines.operate.test_metrics import families, scrape
from tests.runners import prism
from tests.runners.engines import ROOT, results, started
from tests.runners.feed import Collect, Feed, collected
from tests.runners.prism import binary, engine
from tests.runners.spike import Shape, expected, outputs
from tests.streams import STEP, begin, generate, make_plan, released

#: A watermark that stops inside the millisecond before each trigger time, rows that come after it.
HOSTILE = Shape(
    start=1_700_000_000_000_000, step=20_000, every=120_000, batches=48, trigger_times=7,
    shift=-500, pace=0.02,
)  # fmt: skip


@pytest.fixture(scope="module")
def flags() -> list[str]:
    """Flags of an engine that is here."""
    return [f"--prism_location={prism.binary()}"]


@pytest.mark.parametrize(
    "shape",
    [Shape(), Shape(endless=True), HOSTILE, HOSTILE._replace(start=HOSTILE.start + 123)],
    ids=["ends", "endless", "hostile", "hostile, trigger times inside a millisecond"],
)
def test_every_row_is_in_its_trigger(tmp_path: Path, flags: list[str], shape: Shape) -> None:
    with started("PrismRunner", flags, shape, tmp_path) as result:
        assert results(shape, tmp_path, result) == expected(shape)
    _, off = outputs(tmp_path)
    assert all(0 < micros < 2_000 for micros in off), "timers fire just after their trigger time"


@pytest.mark.parametrize(
    "wrong",
    [{"first_at": -1_000, "second_at": 0}, {"first_at": 0, "second_at": 0}],
    ids=["first stage a tick early", "stages at one instant"],
)
def test_timers_too_early_lose_rows(
    tmp_path: Path, flags: list[str], wrong: dict[str, Any]
) -> None:
    shape = HOSTILE._replace(**wrong)
    with started("PrismRunner", flags, shape, tmp_path) as result:
        assert results(shape, tmp_path, result) != expected(shape)


class _Sleep(beam.DoFn):
    """Sleeps without output, and notes the CPU seconds that Prism spent meanwhile."""

    #: Workers are threads of this process.
    spent: ClassVar[list[float]] = []

    def process(self, element: int) -> None:
        before = _prism_seconds()
        time.sleep(2)
        self.spent.append(_prism_seconds() - before)


def _prism_seconds() -> float:
    (pid,) = (
        pid
        for pid in descendants(os.getpid())
        if Path(f"/proc/{pid}/comm").read_text() == "prism\n"
    )
    return tree_seconds(pid)


def test_waiting_for_a_bundle_costs_prism_nothing(flags: list[str]) -> None:
    """Beam's own build takes a whole core from the last output of a bundle to its response."""
    engine = make_runner("PrismRunner", flags)
    _Sleep.spent.clear()
    with beam.Pipeline(runner=engine.runner, options=engine.options) as pipeline:
        _ = pipeline | beam.Create([0], reshuffle=False) | beam.ParDo(_Sleep())
    engine.close()
    (spent,) = _Sleep.spent
    assert spent < 0.2


def test_an_endless_stream_is_cancelled(tmp_path: Path, flags: list[str]) -> None:
    shape = Shape(endless=True)
    with started("PrismRunner", flags, shape, tmp_path) as result:
        results(shape, tmp_path, result)
        assert str(result.state) == "RUNNING"
        result.cancel()
        with pytest.raises(RuntimeError, match="CANCELLED"):
            result.wait_until_finish()


def test_a_refusal_of_a_stage_comes_out(tmp_path: Path, flags: list[str]) -> None:
    forget_error()
    with (
        started("PrismRunner", flags, Shape(fails_at=3), tmp_path) as result,
        pytest.raises(RuntimeError) as caught,
    ):
        result.wait_until_finish()
    error = coded(caught.value)
    assert (type(error), error.field, error.rule) == (
        PolicyError, "store", "was refused for a test",
    )  # fmt: skip


def test_an_interrupt_ends_it_and_its_engine(tmp_path: Path, flags: list[str]) -> None:
    program = (
        "from pathlib import Path; from tests.runners.engines import *; "
        f"folder, shape = Path({str(tmp_path)!r}), spike.Shape(endless=True)\n"
        f"with started('PrismRunner', {flags!r}, shape, folder) as result:\n"
        "    results(shape, folder, result); print('there', flush=True)\n"
        "    result.wait_until_finish()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )  # fmt: skip
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == b"there\n"
        assert outputs(tmp_path)[0] == expected(Shape(endless=True))
        engine = _children(child.pid)
        assert engine
        child.send_signal(signal.SIGINT)
        child.wait(60)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    until = time.monotonic() + 30
    while any(Path(f"/proc/{number}").exists() for number in engine):
        assert time.monotonic() < until, "Prism outlives its program"
        time.sleep(0.1)


def _children(number: int) -> list[int]:
    text = Path(f"/proc/{number}/task/{number}/children").read_text()
    return [int(child) for child in text.split()]


@pytest.mark.parametrize("sabotaged", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_slow_stage_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sabotaged: bool
) -> None:
    plan = make_plan(triggers=12, windows=3, stamped=True)
    stream, last = generate(plan, 8, records=3000), plan.timeline.last_trigger_time
    order = np.argsort(stream.stamp, kind="stable")
    rows = np.split(
        order, np.flatnonzero(np.diff(plan.timeline.trigger_time_of(stream.stamp[order]))) + 1
    )
    batches = [batch for row_numbers in rows for batch in stream.take(row_numbers).batches(40)]
    want, out = released(plan, batches, tmp_path / "calm.db"), tmp_path / "out"
    calls = itertools.count(1)

    def slowly(batch: pa.RecordBatch) -> ClockTick | None:
        time.sleep(0.35 if next(calls) % 40 == 0 else 0)
        return clock_tick_of(batch)

    monkeypatch.setattr(buffer, "clock_tick_of", slowly)
    if sabotaged:
        monkeypatch.setattr(runner_settings, "PRISM_WHOLE_BUNDLES", "--streaming")
    engine = make_runner("PrismRunner", [f"--prism_location={binary()}", "--prism_log_level=error"])
    run = begin(plan, tmp_path / "a.db")
    out.mkdir()
    with beam.Pipeline(runner=engine.runner, options=engine.options) as pipeline:
        records = pipeline | Feed(batches, "arrived", 4)
        output = records | DPStream(plan, run, clock=Announced(last))
        _ = output.releases | Collect(out)
    stores.close_all()
    assert (collected(out) == want) != sabotaged


PLAN = make_plan(triggers=12, windows=3, stamped=True)


class Stalled:
    """A clock that stands at the start until BOUND has had all rows, then is far ahead."""

    last = 0.0

    def __call__(self) -> float:
        stands = not Stalled.last or time.monotonic() - Stalled.last < 1.5
        return PLAN.timeline.start / 1e6 if stands else time.time()


def test_a_clock_tick_of_many_trigger_times_that_bound_gets_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a stall a clock tick brings more trigger times than a stride; BOUND takes it slowly."""
    assert PLAN.timeline.last_trigger_time > 2 * CATCH_UP_LIMIT
    stream, out = generate(PLAN, 8, records=1500), tmp_path / "out"
    want = released(PLAN, stream.batches(500), tmp_path / "calm.db", shards=2)

    def slowly(batch: pa.RecordBatch) -> ClockTick | None:
        clock_tick = clock_tick_of(batch)
        if "stamp" in batch.schema.names:  # BOUND's, not RELEASE's
            Stalled.last = time.monotonic()
            time.sleep(0.0 if clock_tick is None else 1.5)
        return clock_tick

    monkeypatch.setattr(buffer, "clock_tick_of", slowly)
    run = begin(PLAN, tmp_path / "a.db", shards=2)
    out.mkdir()
    flags = ["--streaming", f"--prism_location={binary()}", PRISM_WHOLE_BUNDLES]
    with engine() as runner, beam.Pipeline(runner, PipelineOptions(flags)) as pipeline:
        records = pipeline | Feed(stream.batches(500), "arrived", hold=100)
        output = records | DPStream(PLAN, run, clock=WallClock(PLAN.timeline, now=Stalled()))
        _ = output.releases | Collect(out)
    stores.close_all()
    assert collected(out) == want


class Fast:
    """A clock that begins when it is first looked at; every trigger time takes 20 ms."""

    def __init__(self, start: int) -> None:
        self.start, self.since = start / 1e6, 0.0

    def __call__(self) -> float:
        self.since = self.since or time.monotonic()
        return self.start + (time.monotonic() - self.since) * STEP / 1e6 / 0.02


@pytest.mark.parametrize("name", ["skip late", "skip combined"])
@pytest.mark.parametrize("bounded", [False, True])
def test_records_wait_for_what_is_published_before_them(
    tmp_path: Path, name: str, bounded: bool
) -> None:
    """The clock asks the store, whether the input ends or a clock on the wall runs."""
    plan, out = PLANS[name], tmp_path / "out"
    batches = stream_of(plan).batches(500)
    want = released(plan, batches, tmp_path / "calm.db", shards=2)
    run = begin(plan, tmp_path / "a.db", shards=2)
    out.mkdir()
    flags = ["--streaming", f"--prism_location={binary()}", PRISM_WHOLE_BUNDLES]
    with engine() as runner, beam.Pipeline(runner, PipelineOptions(flags)) as pipeline:
        if bounded:
            records = pipeline | beam.Create(batches, reshuffle=False)
            output = records | DPStream(plan, run)
        else:
            stamps = "time" if plan.stamp == "event_time" else "arrived"
            records = pipeline | Feed(batches, stamps, hold=20)
            clock = WallClock(plan.timeline, now=Fast(plan.timeline.start))
            output = records | DPStream(plan, run, clock=clock)
        _ = output.releases | Collect(out)
    stores.close_all()
    assert collected(out) == want


@pytest.mark.parametrize("shared", [False, True])
def test_no_two_threads_use_a_shards_ciphers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """Noise goes on from stop to stop with the ciphers that it was begun with: those of a thread
    would be used by another one, which has the shard next.  The bytes are those of one thread."""
    real = BufferUntilTriggerTime.__init__

    def init(self: BufferUntilTriggerTime, *args: Any, **more: Any) -> None:
        real(self, *args, **{**more, "per_shard": more.get("per_shard", False) and not shared})

    monkeypatch.setattr(BufferUntilTriggerTime, "__init__", init)
    monkeypatch.setattr(buffer, "_WORTH_A_THREAD", 0)
    plan, out = PLANS["skip late"], tmp_path / "out"
    batches = stream_of(plan).batches(500)
    want = released(plan, batches, tmp_path / "calm.db", shards=8)
    run = begin(plan, tmp_path / "a.db", shards=8)
    run = run._replace(performance=run.performance._replace(threads=4))
    monkeypatch.setattr("dpstream.dp_transforms.noise.prf.Prf", Once)
    out.mkdir()
    flags = ["--streaming", f"--prism_location={binary()}", PRISM_WHOLE_BUNDLES]

    def through_prism() -> None:
        with engine() as runner, beam.Pipeline(runner, PipelineOptions(flags)) as pipeline:
            records = pipeline | beam.Create(batches, reshuffle=False)
            _ = (records | DPStream(plan, run)).releases | Collect(out)

    if shared:
        with pytest.raises(Exception, match="AssertionError"):
            through_prism()
        forget_error()
    else:
        through_prism()
        assert collected(out) == want
    stores.close_all()


SINCE = "dpstream_release_latency_seconds"
SECOND = 1_000_000


@pytest.fixture(autouse=True)
def deliveries(monkeypatch: pytest.MonkeyPatch) -> Iterator[Deliveries]:
    """Latencies of this test alone."""
    fresh = Deliveries()
    owners = ("dp_transforms.telemetry", "dp_transforms.beam.buffer", "pipelines.operate.metrics",
              "pipelines.connectors.write", "pipelines.runners.waiting")  # fmt: skip
    for owner in owners:
        monkeypatch.setattr(f"dpstream.{owner}.deliveries", fresh)
    yield fresh


def run_on_prism(job: Job, stop: threading.Event | None = None) -> str:
    """What the endpoint says after a run."""
    flags = [
        f"--prism_location={binary()}",
        "--prism_log_level=warn",
        "--streaming",
        PRISM_WHOLE_BUNDLES,
    ]
    with serving(job, 0) as port:
        run_job(job, "PrismRunner", flags, stop=stop)
        return scrape(port)


def test_every_release_has_a_latency(tmp_path: Path, deliveries: Deliveries) -> None:
    job = make_job(tmp_path / "job")
    text, triggers = run_on_prism(job), job.plan.timeline.triggers
    assert families(text)["dpstream_releases_delivered_total"] == triggers
    assert sum(deliveries.since_passed.counts) == triggers
    assert 0 < deliveries.since_passed.total < 10 * triggers
    assert not hits(text)
    assert sum(deliveries.since_trigger_time.counts) == 0, "a replay is not live"


def live_job(folder: Path, start: int, seconds: int) -> Job:
    """A job on a folder that grows, a trigger time every second from an instant on."""
    text = job_text("jsonl")
    for old, new in (
        ("2024-01-01T00:00:00Z", rfc3339(start)),
        ("2024-01-02T00:00:00Z", rfc3339(start + seconds * SECOND)),
        ('window = "1d"', f'window = "{seconds}s"'),
        ('release_every = "6h"', 'release_every = "1s"\nmax_skew = "1h"'),
    ):
        assert old in text
        text = text.replace(old, new)
    (folder / "dpstream.toml").write_text(text)
    (folder / "in").mkdir()
    return load_job(folder / "dpstream.toml")


def test_a_live_stream(tmp_path: Path, deliveries: Deliveries) -> None:
    """Files are closed as time passes; each release is late by no more than a few looks."""
    begin = (time.time_ns() // 1_000_000_000 + 4) * SECOND
    job, ended = live_job(tmp_path, begin, 5), threading.Event()

    def produce() -> None:
        number = 0
        while not ended.wait(0.25):
            now = rfc3339(begin + 2 * SECOND)
            rows = [{"user": CANARY, "key": "k", "time": now, "value": 1} for _ in range(10)]
            write(tmp_path / "in" / f"{number}.jsonl", rows)
            close_files(tmp_path / "in", [f"{number}.jsonl"])
            number += 1

    stop, producer = threading.Event(), threading.Thread(target=produce)
    limit = threading.Timer(60, stop.set)
    producer.start()
    limit.start()
    try:
        text = run_on_prism(job, stop)
    finally:
        ended.set()
        limit.cancel()
        producer.join()
    seen, passed = families(text), deliveries.since_passed
    assert not stop.is_set(), "it did not end by itself"
    assert seen[f"{SINCE}_count"] == sum(passed.counts) == 5
    assert "watermark" not in text, "the time of a step follows its records"
    assert 0 < passed.total < seen[f"{SINCE}_sum"] < 5 * 10
    assert seen[f"{SINCE}_sum"] == int(seen[f"{SINCE}_sum"])
    assert seen["dpstream_last_cut_timestamp_seconds"] == begin / SECOND + 5
    assert CANARY not in text
