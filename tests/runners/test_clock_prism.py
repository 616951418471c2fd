"""The public clock on Prism: no stage takes a trigger time before the stage that feeds it."""

import time
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow as pa
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from dpstream.dp_transforms.beam import buffer
from dpstream.dp_transforms.beam.buffer import BufferUntilTriggerTime
from dpstream.dp_transforms.beam.clock import ClockTick, WallClock, clock_tick_of
from dpstream.dp_transforms.flow import CATCH_UP_LIMIT, DPStream
from dpstream.dp_transforms.telemetry import forget_error
from dpstream.pipelines.runners.table import PRISM_WHOLE_BUNDLES
from dpstream.state import open as stores
from tests.dp_transforms.beam.test_workers import Once
from tests.dp_transforms.runs import PLANS, stream_of
from tests.runners.feed import Collect, Feed, collected
from tests.runners.prism import binary, engine
from tests.streams import STEP, begin, generate, make_plan, released

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
