"""The public clock: what it announces, when, and behind which watermark."""

import dataclasses
import pickle
import threading
import time
from collections.abc import Callable

import apache_beam as beam
import msgspec
import pytest
from apache_beam.io.watermark_estimators import ManualWatermarkEstimator
from apache_beam.runners.sdf_utils import RestrictionTrackerView, ThreadsafeRestrictionTracker

from dpstream.accounting.errors import UsageError
from dpstream.dp_transforms.batches import record_schema
from dpstream.dp_transforms.beam import clock as clock_module
from dpstream.dp_transforms.beam.buffer import BufferUntilTriggerTime
from dpstream.dp_transforms.beam.clock import (
    PACED_SECONDS,
    Announced,
    Ended,
    ToShards,
    WallClock,
    clock_tick_of,
    instant,
    paced_clock,
)
from dpstream.dp_transforms.telemetry import step_done, steps_done, wait_for_step
from tests.streams import START, STEP, make_plan

LINE = make_plan(triggers=4, windows=3).timeline
ENDLESS = msgspec.structs.replace(LINE, end=None)


@dataclasses.dataclass
class Hand:
    """A clock that is set by hand, in micros since the start of the plan."""

    at: int = 0

    def __call__(self) -> float:
        return (START + self.at) / 1e6


class Drive:
    """The clock's DoFn, bundle after bundle, with a runner's real tracker and estimator."""

    def __init__(
        self, line: object, first: int = 1, pace: Callable[[int], int] | None = None
    ) -> None:
        self.hand = Hand()
        clock = WallClock(line, first, self.hand)  # type: ignore[arg-type]
        self.clock = (clock if pace is None else clock.paced(pace))._clock
        self.left = self.clock.initial_restriction(0)
        self.estimator = self.clock.create_watermark_estimator(
            self.clock.initial_estimator_state(0, self.left)
        )
        self.ended = False

    def at(self, micros: int) -> tuple[list[tuple[int, int, int]], ManualWatermarkEstimator]:
        """The next bundle at an instant: what is announced, and the watermark."""
        self.hand.at = micros
        tracker = ThreadsafeRestrictionTracker(self.clock.create_tracker(self.left))
        view = RestrictionTrackerView(tracker)
        before, clock_ticks = self.estimator.current_watermark(), []
        for out in self.clock.process(0, tracker=view, estimator=self.estimator):
            # A stage that has not got the clock tick yet holds the others' watermarks before its
            # trigger times.
            assert before <= out.timestamp < instant(self.clock._timeline, out.value[1])
            clock_ticks.append(out.value)
        tracker.check_done()
        left = tracker.deferred_status()
        self.ended = left is None
        if left is not None:
            self.left, wait = left
            assert float(wait) <= 0.2
        return clock_ticks, self.estimator


def test_trigger_times_are_announced_when_they_are_reached() -> None:
    drive = Drive(LINE)
    for now, wanted in ((0, []), (STEP - 1, []), (STEP, [(1, 1, 1)]), (STEP + 1, [])):
        clock_ticks, _ = drive.at(now)
        assert clock_ticks == wanted
    assert drive.at(5 * STEP + 7)[0] == [(1, 2, 5)]  # a worker that slept
    assert drive.at(3 * STEP)[0] == [] and not drive.ended  # a clock that was set back


def test_the_watermark_stays_before_the_next_timers() -> None:
    drive = Drive(LINE, first=3)
    for now in range(0, 12 * STEP, STEP // 3):
        _, estimator = drive.at(now)
        following = max(3, now // STEP + 1)
        assert estimator.current_watermark() == instant(LINE, following, -1)
        assert estimator.current_watermark().micros < LINE.instant_of(following)


def test_the_last_trigger_time_ends_it_and_an_endless_plan_never() -> None:
    drive = Drive(LINE)
    assert drive.at(100 * STEP)[0] == [(1, 1, LINE.last_trigger_time)] and drive.ended
    endless = Drive(ENDLESS, first=7)
    assert endless.at(10**6 * STEP)[0] == [(7, 7, 10**6)] and not endless.ended


def test_a_paced_clock_waits_and_does_not_spin() -> None:
    allowed = [0]
    drive = Drive(LINE, pace=lambda first: allowed[0])
    for now in (STEP, 7 * STEP):
        assert drive.at(now)[0] == [] and not drive.ended
        assert drive.estimator.current_watermark() == instant(LINE, 1, -1)
    allowed[0] = 3
    assert drive.at(7 * STEP)[0] == [(1, 1, 3)]
    allowed[0] = 9
    assert drive.at(7 * STEP)[0] == [(1, 4, 7)]  # no further than the clock on the wall
    allowed[0] = 100
    assert drive.at(100 * STEP)[0] == [(1, 8, LINE.last_trigger_time)] and drive.ended


def test_a_clock_hears_of_a_finished_step_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one of this process: without a look at the store in between."""
    monkeypatch.setattr(clock_module, "PACED_SECONDS", 60.0)
    monkeypatch.setattr(clock_module, "_PACED_LOOK_SECONDS", 60.0)
    allowed, looks = [0], list[float]()

    def pace(first: int) -> int:
        looks.append(time.monotonic())
        return allowed[0]

    def finish() -> None:
        wait_until(lambda: len(looks) == 1)
        step_done()
        wait_until(lambda: len(looks) == 2)
        allowed[0] = 3
        step_done()

    thread = threading.Thread(target=finish)
    thread.start()
    begin = time.monotonic()
    assert Drive(LINE, pace=pace).at(7 * STEP)[0] == [(1, 1, 3)]
    thread.join()
    assert len(looks) == 3 and time.monotonic() - begin < 30


def test_no_step_between_a_look_and_the_wait_is_missed() -> None:
    """A step that is done while the store is asked ends the wait that follows."""
    seen = steps_done()
    step_done()
    begin = time.monotonic()
    wait_for_step(seen, 60.0)
    assert time.monotonic() - begin < 30


def test_steps_of_other_processes_are_looked_for() -> None:
    """Without any step here; and the call ends, whether there are some or not."""
    looks = list[int]()

    def pace(first: int) -> int:
        looks.append(first)
        return 2 if len(looks) == 3 else 0

    assert Drive(LINE, pace=pace).at(7 * STEP)[0] == [(1, 1, 2)]
    begin = time.monotonic()
    assert Drive(LINE, pace=lambda first: 0).at(7 * STEP)[0] == []
    assert time.monotonic() - begin >= PACED_SECONDS


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not condition() and time.monotonic() < until:
        time.sleep(0.001)


def test_a_clock_of_input_that_has_ended_waits_too() -> None:
    clock = paced_clock(Announced(LINE.last_trigger_time), LINE, lambda first: first)
    assert isinstance(clock, WallClock)
    seconds = pickle.loads(pickle.dumps(Ended(LINE)))()  # noqa: S301
    assert seconds * 1e6 > LINE.instant_of(LINE.last_trigger_time)
    with pytest.raises(UsageError, match="clock"):
        paced_clock(beam.Create([1]), LINE, lambda first: first)


def test_a_drain_announces_nothing_more() -> None:
    clock = Drive(ENDLESS).clock
    truncate: Callable[..., object] = clock.truncate
    assert truncate(0, clock.initial_restriction(0)) is None


@pytest.mark.parametrize("start", [START, START + 1, START + 999, START + 123_456])
def test_timers_are_not_before_their_trigger_time(start: int) -> None:
    """Runners floor every time to a millisecond."""
    line = msgspec.structs.replace(LINE, start=start)
    for trigger_time in range(1, 5):
        at = instant(line, trigger_time).micros
        assert at % 1000 == 0 and 0 <= at - line.instant_of(trigger_time) < 1000
        assert instant(line, trigger_time, 1).micros == at + 1000


def test_every_shard_gets_every_pulse() -> None:
    schema = record_schema(make_plan())
    spread = pickle.loads(pickle.dumps(ToShards(5, schema)))  # noqa: S301
    out = list(spread.process((3, 5, 9)))
    assert [shard for shard, _ in out] == [0, 1, 2, 3, 4]
    assert all(batch.num_rows == 0 and clock_tick_of(batch) == (3, 5, 9) for _, batch in out)
    assert clock_tick_of(out[0][1].replace_schema_metadata(None)) is None
    assert (
        BufferUntilTriggerTime.ROWS.coder.decode(
            BufferUntilTriggerTime.ROWS.coder.encode(out[0][1])
        )
        == out[0][1]
    )
