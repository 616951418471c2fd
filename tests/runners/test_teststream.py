"""What is released when, with the watermark and the clock in the test's hands (Beam's TestStream).

Prism runs a TestStream in real bundles and timers; nothing here waits for a wall clock.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.testing import test_stream
from apache_beam.utils.timestamp import Timestamp

from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms import flow
from dpstream.dp_transforms.batches import ArrowBatchCoder
from dpstream.dp_transforms.beam.clock import Announced
from dpstream.dp_transforms.flow import CATCH_UP_LIMIT, DPStream
from dpstream.pipelines.runners.table import PRISM_WHOLE_BUNDLES
from dpstream.state import open as stores
from tests.runners.feed import Collect, Feed, collected
from tests.runners.prism import binary, engine
from tests.streams import STEP, Stream, begin, generate, make_plan, released

PLAN = make_plan(triggers=8, windows=2, lateness=2, skew=STEP // 4, stamped=True)
LINE = PLAN.timeline


def play(
    plan: Plan, folder: Path, events: Sequence[pa.RecordBatch | int], through: int
) -> dict[tuple[int, int], bytes]:
    """Releases of a stream of batches and watermarks (micros), announced ``through``."""
    script = test_stream.TestStream(coder=ArrowBatchCoder())
    for event in events:
        if isinstance(event, int):
            script = script.advance_watermark_to(Timestamp(micros=event // 1000 * 1000))
        else:
            script = script.add_elements([event])
    script = script.advance_watermark_to_infinity()
    run, out = begin(plan, folder / "stream.db"), folder / "out"
    out.mkdir()
    flags = ["--streaming", f"--prism_location={binary()}", PRISM_WHOLE_BUNDLES]
    with engine() as runner, beam.Pipeline(runner, PipelineOptions(flags)) as pipeline:
        records = pipeline | script | beam.Map(_same).with_output_types(pa.RecordBatch)
        output = records | DPStream(plan, run, clock=Announced(through))
        _ = output.releases | Collect(out)
    stores.close_all()
    return collected(out)


def _same(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


@pytest.fixture(scope="module")
def stream() -> Stream:
    return generate(PLAN, 8, records=3000)


@pytest.fixture(scope="module")
def calm(stream: Stream, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], bytes]:
    return released(PLAN, stream.batches(500), tmp_path_factory.mktemp("calm") / "a.db")


def by_trigger_time(stream: Stream, trigger_time: int) -> list[pa.RecordBatch]:
    """Batches of the records whose stamps belong to a trigger time."""
    rows = LINE.trigger_time_of(stream.stamp).clip(1) == trigger_time
    return stream.take(rows.nonzero()[0]).batches(100)


def test_one_trigger_time_at_a_time(
    stream: Stream, calm: dict[tuple[int, int], bytes], tmp_path: Path
) -> None:
    events: list[pa.RecordBatch | int] = []
    for trigger_time in range(1, LINE.last_trigger_time + 1):
        events += [*by_trigger_time(stream, trigger_time), LINE.instant_of(trigger_time) + 2_000]
    assert play(PLAN, tmp_path, events, LINE.last_trigger_time) == calm


def test_a_watermark_that_jumps(
    stream: Stream, calm: dict[tuple[int, int], bytes], tmp_path: Path
) -> None:
    events: list[pa.RecordBatch | int] = [*stream.batches(300, seed=1)]
    events.append(LINE.instant_of(LINE.last_trigger_time) + 2_000)
    assert play(PLAN, tmp_path, events, LINE.last_trigger_time) == calm


def test_what_comes_after_its_trigger_time_counts_in_the_next(tmp_path: Path) -> None:
    """Nothing is lost: it is as if these records had been stamped then."""
    plan = make_plan(triggers=20, windows=1, lateness=2, stamped=True, contributions=60)
    timeline, late, comes = plan.timeline, 5, 12
    assert late < CATCH_UP_LIMIT < comes
    stream, events = generate(plan, 9, records=3000), list[pa.RecordBatch | int]()
    for trigger_time in range(1, timeline.last_trigger_time + 1):
        events += by_trigger_time(stream, trigger_time) if trigger_time != late else []
        events += by_trigger_time(stream, late) if trigger_time == comes else []
        events.append(timeline.instant_of(trigger_time) + 2_000)
    missed = timeline.trigger_time_of(stream.stamp) == late
    # A callback has taken the first CATCH_UP_LIMIT trigger times together; the next trigger time
    # begins where it ended.
    stamp = np.where(missed, timeline.instant_of(CATCH_UP_LIMIT), stream.stamp)
    moved = dataclasses.replace(stream, stamp=stamp)
    want = released(plan, moved.batches(500), tmp_path / "moved.db")
    assert play(plan, tmp_path, events, timeline.last_trigger_time) == want
    assert want != released(plan, stream.batches(500), tmp_path / "calm.db")


def test_trigger_times_that_nobody_announced_are_not_taken(
    stream: Stream, calm: dict[tuple[int, int], bytes], tmp_path: Path
) -> None:
    """A drained pipeline lifts its watermark to infinity; what is to come must not be decided."""
    events = [
        batch for trigger_time in range(1, 6) for batch in by_trigger_time(stream, trigger_time)
    ]
    got = play(PLAN, tmp_path, events, 5)
    assert got == {n: b for n, b in calm.items() if LINE.base(n[0]) + n[1] <= 5} and got


@pytest.mark.parametrize("hold", [4, 1_000])
def test_rows_gathered_before_a_split_wait_for_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hold: int
) -> None:
    """A bundle with rows of many trigger times: those of the first must be there for its step."""
    plan = make_plan(triggers=12, windows=3, stamped=True)
    stream, last = generate(plan, 8, records=3000), plan.timeline.last_trigger_time
    assert last > 4 * CATCH_UP_LIMIT
    order = np.argsort(stream.stamp, kind="stable")
    rows = np.split(
        order, np.flatnonzero(np.diff(plan.timeline.trigger_time_of(stream.stamp[order]))) + 1
    )
    batches = [batch for row_numbers in rows for batch in stream.take(row_numbers).batches(40)]
    want, out = released(plan, batches, tmp_path / "calm.db"), tmp_path / "out"
    monkeypatch.setattr(flow, "SPLIT_BUFFER_ROWS", 700)
    run = begin(plan, tmp_path / "a.db")
    out.mkdir()
    flags = ["--streaming", f"--prism_location={binary()}", PRISM_WHOLE_BUNDLES]
    with engine() as runner, beam.Pipeline(runner, PipelineOptions(flags)) as pipeline:
        records = pipeline | Feed(batches, "arrived", hold)
        output = records | DPStream(plan, run, clock=Announced(last))
        _ = output.releases | Collect(out)
    stores.close_all()
    assert collected(out) == want
