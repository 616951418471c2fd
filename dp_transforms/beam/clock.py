"""The public clock: which trigger times have been reached.

A step of a trigger time runs when the clock has announced it and the watermark has passed it.
What is announced is a function of the plan and of a clock on the wall (or, for input
whose extent is known, of the plan alone), never of a record; and it decides only when a step may
run.  A runner that drains a pipeline lifts its watermarks to infinity: steps of trigger times that
nobody announced are then left for the run that goes on.

A *clock tick* is ``(first, begin, through)``: trigger times ``begin`` .. ``through`` may be
stepped through; ``first`` is the first trigger time of the pipeline.  Every shard gets each clock
tick as an empty batch with the three numbers in its schema's metadata.  All shards of all stages
stop at the same trigger times, which the clock ticks alone decide: a stage that stood at other
trigger times than those before it would step through a trigger time whose rows are still to come.
A runner may deliver clock ticks in any order.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import apache_beam as beam
import pyarrow as pa
from apache_beam.io.restriction_trackers import OffsetRange, OffsetRestrictionTracker
from apache_beam.io.watermark_estimators import ManualWatermarkEstimator
from apache_beam.transforms.core import RestrictionProvider, WatermarkEstimatorProvider
from apache_beam.transforms.window import TimestampedValue
from apache_beam.utils.timestamp import Duration, Timestamp

from dpstream.accounting.errors import UsageError
from dpstream.accounting.plan.timeline import Timeline
from dpstream.dp_transforms.batches import BEGIN, FIRST, THROUGH, empty
from dpstream.dp_transforms.telemetry import guarded, steps_done, wait_for_step

ClockTick = tuple[int, int, int]
#: Runners keep time in milliseconds.
TICK = 1_000
#: A clock without end; about 10^10 trigger times.
_FOREVER = 1 << 40
#: Longest wait between two looks at the clock on the wall, in micros.
_LOOK = 200_000
#: A clock that waits for steps: seconds that it spends in one call, and between two looks at the
#: store, which has steps of other processes too.
PACED_SECONDS, _PACED_LOOK_SECONDS = 0.2, 0.02
_HERE_SECONDS = 0.02


def instant(timeline: Timeline, trigger_time: int, ticks: int = 0) -> Timestamp:
    """Return the instant of a trigger time, rounded up to a millisecond, plus ``ticks``
    milliseconds.
    """
    return Timestamp(micros=-(-timeline.instant_of(trigger_time) // TICK) * TICK + ticks * TICK)


class Announced(beam.PTransform):
    """Announces all trigger times at once, for input whose extent is known when the run begins.

    Args:
        through: the last trigger time.
        first: the first one.
    """

    def __init__(self, through: int, first: int = 1) -> None:
        super().__init__()
        self.first, self.through = first, through

    def expand(self, begin: Any) -> beam.PCollection:
        """Return one clock tick."""
        clock_ticks = beam.Create([(self.first, self.first, self.through)], reshuffle=False)
        return begin | clock_ticks.with_output_types(ClockTick)


class WallClock(beam.PTransform):
    """Announces a trigger time when a wall clock has reached it.

    Args:
        timeline: public time axis.
        first: first trigger time to announce; those of the past come in one clock tick.
        now: the clock, in seconds since the epoch.
        pace: the last trigger time that may be announced, for the next one to announce: of a run
            whose records wait for what was released before them.
        last: the last trigger time, if it is not the plan's.
    """

    def __init__(
        self,
        timeline: Timeline,
        first: int = 1,
        now: Callable[[], float] = time.time,
        pace: Callable[[int], int] | None = None,
        last: int | None = None,
    ) -> None:
        super().__init__()
        self._given, self._last = (timeline, first, now), last
        self._clock = _PublicClock(timeline, first, now, pace, last)

    def paced(self, pace: Callable[[int], int]) -> "WallClock":
        """Return the same clock with waiting."""
        return WallClock(*self._given, pace, self._last)

    def expand(self, begin: Any) -> beam.PCollection:
        """Return a clock tick for each trigger time, while the pipeline and the plan last."""
        ticks = beam.ParDo(self._clock).with_output_types(ClockTick)
        return begin | "Clock" >> beam.Create([0], reshuffle=False) | "Ticks" >> ticks


def paced_clock(
    clock: beam.PTransform, timeline: Timeline, pace: Callable[[int], int]
) -> beam.PTransform:
    """Return a clock that emits no trigger time after the one that ``pace`` allows.

    Raises:
        UsageError: the clock is not one of this module's.
    """
    if isinstance(clock, Announced):
        clock = WallClock(timeline, clock.first, Ended(timeline), last=clock.through)
    if not isinstance(clock, WallClock):
        raise UsageError(
            "clock",
            "cannot wait, and the plan skips what is published",
            "give a WallClock, or none, or a plan with mechanism.skip = false",
        )
    return clock.paced(pace)


class Ended:
    """A clock that shows the end of a job."""

    def __init__(self, timeline: Timeline) -> None:
        self._end = timeline.instant_of(timeline.last_trigger_time) / 1e6 + 1

    def __call__(self) -> float:
        """Return that time."""
        return self._end


class _PublicClock(beam.DoFn, RestrictionProvider, WatermarkEstimatorProvider):  # type: ignore[misc]
    """Announces trigger times as they are reached; the restriction is the trigger times that are
    left.

    Its watermark stays before the timers of the next trigger time, so that none of them fires
    before its clock tick is there.
    """

    def __init__(
        self,
        timeline: Timeline,
        first: int,
        now: Callable[[], float],
        pace: Callable[[int], int] | None = None,
        last: int | None = None,
    ) -> None:
        self._timeline, self._first, self._now, self._pace = timeline, first, now, pace
        self._last = last

    @beam.DoFn.unbounded_per_element()
    @guarded("clock")
    def process(
        self,
        element: int,
        tracker: Any = beam.DoFn.RestrictionParam(),  # noqa: B008 - Beam's way to ask for it
        estimator: Any = beam.DoFn.WatermarkEstimatorParam(),  # noqa: B008
    ) -> Iterator[Any]:
        """Announce what has been reached, then wait for the next trigger time."""
        timeline, left = self._timeline, tracker.current_restriction()
        now = int(self._now() * 1_000_000)
        through = min(timeline.passed(now), left.stop - 1)
        if self._pace is not None and through >= left.start:
            through = min(through, _allowed(self._pace, left.start))
        if through >= left.start:
            if not tracker.try_claim(through):
                return
            # Until a shard has it, no stage may pass the first of its trigger times.
            at = instant(timeline, left.start, -1)
            yield TimestampedValue((self._first, left.start, through), at)
            estimator.set_watermark(instant(timeline, through + 1, -1))
        if through + 1 < left.stop:
            due = timeline.instant_of(max(through, left.start - 1) + 1)
            wait = min(_LOOK, max(0, due - now))
            give_back(tracker, wait / 1_000_000)

    def initial_restriction(self, element: int) -> OffsetRange:
        """From the first trigger time on."""
        timeline = self._timeline
        last = _FOREVER if timeline.end is None else self._last or timeline.last_trigger_time
        return OffsetRange(self._first, max(self._first, last + 1))

    def create_tracker(self, restriction: OffsetRange) -> OffsetRestrictionTracker:
        """Return a tracker whose claims are trigger times."""
        return OffsetRestrictionTracker(restriction)

    def split(self, element: int, restriction: OffsetRange) -> Iterator[OffsetRange]:
        """Yield the restriction whole: there is one clock."""
        yield restriction

    def restriction_size(self, element: int, restriction: OffsetRange) -> int:
        """No work to speak of."""
        return 1

    def truncate(self, element: int, restriction: OffsetRange) -> None:
        """Nothing is announced any more when the pipeline is drained."""

    def initial_estimator_state(self, element: int, restriction: OffsetRange) -> Timestamp:
        """Just before the timers of the first trigger time."""
        return instant(self._timeline, restriction.start, -1)

    def create_watermark_estimator(self, state: Timestamp) -> ManualWatermarkEstimator:
        """Set by the clock itself."""
        return ManualWatermarkEstimator(state)

    def estimator_state_coder(self) -> beam.coders.Coder:
        """Instants."""
        return beam.coders.registry.get_coder(Timestamp)


def _allowed(pace: Callable[[int], int], first: int) -> int:
    """What ``pace`` allows, once it allows ``first``, or after a while: a finished step of this
    process is heard of at once."""
    until = time.monotonic() + PACED_SECONDS
    while True:
        seen = steps_done()
        through, left = pace(first), until - time.monotonic()
        if through >= first or left <= 0:
            return through
        wait_for_step(seen, min(left, _PACED_LOOK_SECONDS))


def give_back(tracker: Any, seconds: float) -> None:
    """Give the rest of a splittable element back to the runner, for a little later.

    A part of the wait is spent here: a runner may floor delays to whole seconds, as Beam's job
    server for Flink does, and would come back at once.
    """
    here = min(seconds, _HERE_SECONDS)
    time.sleep(here)
    tracker.defer_remainder(Duration(seconds - here))


class ToShards(beam.DoFn):
    """Turns a clock tick into an empty batch for every shard."""

    def __init__(self, shards: int, schema: pa.Schema) -> None:
        self._shards, self._schema = shards, schema

    @guarded("clock")
    def process(self, element: ClockTick) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield one clock tick for each shard."""
        first, begin, through = element
        metadata = {FIRST: str(first), BEGIN: str(begin), THROUGH: str(through)}
        batch = empty(self._schema).replace_schema_metadata(metadata)
        for shard in range(self._shards):
            yield shard, batch


def clock_tick_of(batch: pa.RecordBatch) -> ClockTick | None:
    """Return the clock tick that an element of a shard carries, if it is one."""
    metadata = batch.schema.metadata
    if not metadata or THROUGH not in metadata:
        return None
    return int(metadata[FIRST]), int(metadata[BEGIN]), int(metadata[THROUGH])
