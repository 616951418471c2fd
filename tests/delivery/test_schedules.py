"""Schedules of deliveries: no release is lost or doubled, here and on Prism."""

import time
from collections import Counter
from pathlib import Path

import apache_beam as beam
import pyarrow as pa
import pytest

from dpstream.accounting.errors import RunError
from dpstream.accounting.plan.timeline import Timeline
from dpstream.dp_transforms.beam.clock import WallClock
from dpstream.dp_transforms.flow import DPStream
from dpstream.pipelines.runners.table import make_runner
from tests.audit.neighbours import PARTITIONS, batch_of, skipping_name
from tests.delivery.audit import audit, promised
from tests.delivery.sabotaged import SABOTAGED
from tests.delivery.schedules import Back, Deliver, Schedule, WatermarkEvent, make
from tests.delivery.world import World, live
from tests.lanes import few_first
from tests.runners.feed import Collect, Feed, collected
from tests.runners.prism import binary
from tests.streams import STEP

CI, TOGETHER, LONG = 200, 10, 5_000
#: Schedules of jobs that skip what is published.
SKIPPING, FEWER = 100, 5


def audited(seeds: range, skipping: bool = False) -> Counter[str]:
    totals = Counter[str]()
    for seed in seeds:
        problems, came = audit(seed, name=skipping_name(seed) if skipping else None)
        assert problems == [], f"seed {seed}"
        totals += Counter(fired=came.fired, restores=came.restores)
    return totals


@pytest.mark.parametrize("first", few_first(range(0, CI, TOGETHER), fast=2))
def test_schedules(first: int) -> None:
    totals = audited(range(first, first + TOGETHER))
    assert totals["fired"] > 5 * TOGETHER and totals["restores"] > 0


@pytest.mark.parametrize("first", few_first(range(0, SKIPPING, FEWER), fast=2))
def test_schedules_of_jobs_that_skip(first: int) -> None:
    totals = audited(range(first, first + FEWER), skipping=True)
    assert totals["fired"] > 5 * FEWER


@pytest.mark.slow
def test_schedules_long() -> None:
    print(audited(range(CI, LONG)), audited(range(SKIPPING, LONG // 5), skipping=True))


@pytest.mark.parametrize("name", SABOTAGED)
def test_sabotage_is_caught(name: str) -> None:
    patch, rule, kind, plan = SABOTAGED[name]
    for seed in range(80):
        with patch():
            try:
                problems = audit(seed, kind, plan)[0]
            except RunError as error:
                problems = [error.rule]
        if any(rule in problem for problem in problems):
            # It is the sabotage that is caught: the product passes the same schedule.
            assert audit(seed, kind, plan)[0] == []
            return
    raise AssertionError(f"{name} was not caught")


def test_the_schedules_reach_what_they_claim() -> None:
    made = [make(seed) for seed in range(CI)]
    assert {pair.kind for pair, _ in made} >= {"far_future", "far_past", "late", "straddle"}
    backs = [e for _, s in made for e in s.events if isinstance(e, Back)]
    assert {back.nth is None for back in backs} == {True, False}
    assert sum(bool(s.tardy) for _, s in made) == CI // 2
    for pair, _ in made:
        timeline = pair.plan.timeline
        assert timeline.instant_of(1) % 1000 != 0


class Fast:
    """A clock on the wall that begins when it is first looked at, and runs fast.

    Every trigger time takes 20 ms: some are announced before the source gets there, some after.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.start, self.since = timeline.start / 1e6, 0.0

    def __call__(self) -> float:
        self.since = self.since or time.time()
        return self.start + (time.time() - self.since) * STEP / 1e6 / 0.02


def feed(schedule: Schedule) -> Feed:
    """The deliveries of a schedule and its watermarks."""
    of = {r.serial: r for r in schedule.records}
    place = {}
    for partition in range(PARTITIONS):
        own = (r for r in schedule.records if r.serial % PARTITIONS == partition)
        for offset, record in enumerate(sorted(own, key=lambda r: (r.stamp, r.serial))):
            place[record.serial] = partition, offset
    batches, watermarks, watermark = (
        list[pa.RecordBatch](),
        list[int](),
        schedule.plan.timeline.start - STEP,
    )
    for event in schedule.events:
        if isinstance(event, WatermarkEvent):
            watermark = event.micros
        elif isinstance(event, Deliver):
            run: list[int] = []
            for serial in sorted(set(event.serials), key=place.__getitem__):
                partition, offset = place[serial]
                if run and place[run[-1]] != (partition, offset - 1):
                    batches.append(batch_of([of[s] for s in run], *place[run[0]]))
                    run = []
                run.append(serial)
            batches.append(batch_of([of[s] for s in run], *place[run[0]]))
            watermarks += [watermark] * (len(batches) - len(watermarks))
    return Feed(batches, "arrived", hold=max(2, len(batches) // 25), watermarks=watermarks)


@pytest.mark.parametrize("seed", few_first(range(10)))
def test_schedules_on_prism(seed: int, tmp_path: Path) -> None:
    _, schedule = make(seed)

    def on_prism(world: World) -> None:
        run, timeline = world.run, world.plan.timeline
        flags = ["--streaming", f"--prism_location={binary()}", "--prism_log_level=warn"]
        engine = make_runner("PrismRunner", flags)
        with beam.Pipeline(runner=engine.runner, options=engine.options) as pipeline:
            clock = WallClock(timeline, 1, Fast(timeline))
            output = pipeline | feed(schedule) | DPStream(run.plan, run, clock=clock)
            _ = output.releases | Collect(tmp_path)
        world.sink = collected(tmp_path)

    came = live(schedule, on_prism)
    assert promised(schedule, came) == []
