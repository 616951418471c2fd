"""The public clock, and the stage that waits for it.

What the clock announces, when, and behind which watermark; one stop for all shards, rows that wait.
"""

import dataclasses
import pickle
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from apache_beam.io.watermark_estimators import ManualWatermarkEstimator
from apache_beam.runners.sdf_utils import RestrictionTrackerView, ThreadsafeRestrictionTracker

from dpstream.dp_transforms.batches import record_schema
from dpstream.dp_transforms.beam import buffer as module
from dpstream.dp_transforms.beam import clock as clock_module
from dpstream.dp_transforms.beam.buffer import BufferUntilTriggerTime, Held
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
from dpstream.dp_transforms.beam.workers import Threads, Workers
from dpstream.dp_transforms.telemetry import forget_error, step_done, steps_done, wait_for_step
from tests.golden.refusals import Refused
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


HELD_LINE = make_plan(triggers=4, windows=5).timeline
SCHEMA = pa.schema([("due", pa.int64())])


class State:
    """Beam's state and timer of one shard, as a runner would keep them."""

    def __init__(self) -> None:
        self.rows: list[pa.RecordBatch] = []
        self.progress: list[int] | None = None
        self.set_to: list[Any] = []

    def add(self, batch: pa.RecordBatch) -> None:
        self.rows.append(batch)

    def clear(self) -> None:
        self.rows = []

    def read(self) -> list[pa.RecordBatch]:
        return self.rows

    def set(self, at: Any) -> None:
        self.set_to.append(at)


class Progress:
    def __init__(self, state: State) -> None:
        self.state = state

    def read(self) -> list[int] | None:
        return self.state.progress

    def write(self, value: list[int]) -> None:
        self.state.progress = value


class Shard:
    """A stage with one shard; the callback emits rows that are due, the others wait."""

    def __init__(self, **options: Any) -> None:
        self.calls: list[tuple[int, int, int]] = []
        self.state, self.stage = (
            State(),
            BufferUntilTriggerTime(HELD_LINE, self._make, 2, **options),
        )
        self.stage.setup()

    def _make(self) -> Any:
        def callback(shard: int, batches: Iterable[pa.RecordBatch], upto: int, since: int) -> Held:
            self.calls.append((shard, upto, since))
            due = [n for batch in batches for n in batch.column("due").to_pylist()]
            return Held(iter(n for n in due if n <= upto), rows(*(n for n in due if n > upto)))

        return callback

    def give(self, batch: pa.RecordBatch) -> None:
        state = self.state
        self.stage.process((7, batch), state, Progress(state), state)

    def tick(self, first: int, begin: int, through: int) -> None:
        for _, batch in ToShards(1, SCHEMA).process((first, begin, through)):
            self.give(batch)

    def fire(self) -> list[int]:
        state = self.state
        return list(self.stage.fire(7, state, Progress(state), state))

    @property
    def armed(self) -> Any:
        return self.state.set_to[-1] if self.state.set_to else None


def rows(*due: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"due": list(due)}, SCHEMA)


def test_a_tick_arms_the_timer_and_rows_wait_for_it() -> None:
    shard = Shard()
    shard.give(rows(1, 5))
    shard.give(rows())
    assert shard.armed is None and len(shard.state.rows) == 1, "an empty batch is not kept"
    shard.tick(1, 1, 2)
    assert shard.armed == instant(HELD_LINE, 2, 2)
    shard.give(rows(2))
    assert shard.fire() == [1, 2] and shard.calls == [(7, 2, 0)]
    assert [b.column("due").to_pylist() for b in shard.state.rows] == [[5]]
    shard.tick(1, 3, 6)
    assert shard.armed == instant(HELD_LINE, 6, 2)
    assert shard.fire() == [5] and shard.calls[-1] == (7, 6, 2) and not shard.state.rows


def test_a_shard_that_is_behind_takes_few_trigger_times_at_once() -> None:
    shard = Shard(catch_up_limit=3)
    shard.tick(1, 1, 7)
    stops = list[int]()
    while len(stops) < 9 and (not stops or shard.calls[-1][1] < 7):
        shard.fire()
        stops.append(shard.calls[-1][1])
    assert stops == [3, 6, 7] and [c[2] for c in shard.calls] == [0, 3, 6]
    assert shard.state.set_to == [instant(HELD_LINE, stop, 2) for stop in stops]


def test_a_tick_that_is_missing_is_waited_for() -> None:
    """It is on its way, and holds the watermark."""
    shard = Shard()
    shard.tick(1, 4, 5)
    assert shard.armed is None
    shard.tick(1, 1, 3)
    assert shard.armed == instant(HELD_LINE, 3, 2)
    shard.fire()
    assert shard.armed == instant(HELD_LINE, 5, 2) and shard.calls == [(7, 3, 0)]


def test_a_tick_that_comes_again_changes_nothing() -> None:
    shard = Shard()
    shard.tick(1, 1, 2)
    shard.tick(1, 1, 2)
    assert len(shard.state.set_to) == 1
    shard.fire()
    shard.tick(1, 1, 2)
    assert len(shard.state.set_to) == 1 and shard.fire() == [] and len(shard.calls) == 1


@pytest.mark.parametrize(("anew", "since"), [(False, 8), (True, 0)])
def test_a_pipeline_that_begins_later_knows_what_was_emitted(anew: bool, since: int) -> None:
    shard = Shard(anew=anew)
    shard.tick(9, 9, 10)
    shard.fire()
    assert shard.calls == [(7, 10, since)]


class Shards:
    """A stage with several shards on two threads, whose timers fire in one bundle."""

    def __init__(self, count: int, per_shard: bool = False) -> None:
        self.made, self.threads = 0, dict[int, set[int]]()
        self.states = [State() for _ in range(count)]
        self.stage = BufferUntilTriggerTime(
            HELD_LINE,
            self._make,
            2,
            catch_up_limit=3,
            threads=Threads(2, "test"),
            per_shard=per_shard,
        )
        self.stage.setup()
        self.barrier = threading.Barrier(2)

    def _make(self) -> Any:
        self.made += 1
        number = self.made

        def callback(shard: int, batches: Iterable[pa.RecordBatch], upto: int, since: int) -> Held:
            self.threads.setdefault(number, set()).add(shard)
            due = [n for batch in batches for n in batch.column("due").to_pylist()]
            self.barrier.wait(10)
            return Held(
                iter([(shard, sum(n <= upto for n in due))]), rows(*(n for n in due if n > upto))
            )

        return callback

    def give(self, shard: int, batch: pa.RecordBatch) -> None:
        state = self.states[shard]
        self.stage.process((shard, batch), state, Progress(state), state)

    def fire(self, shard: int) -> list[Any]:
        state = self.states[shard]
        return list(self.stage.fire(shard, state, Progress(state), state))


def many(due: int) -> pa.RecordBatch:
    """As many rows as are worth a thread."""
    return rows(*([due] * 5_000))


@pytest.mark.parametrize("per_shard", [False, True])
def test_shards_of_a_bundle_work_at_once_and_their_rows_wait(per_shard: bool) -> None:
    """The barrier is passed by two calls at a time; outputs are at each shard's own instant."""
    shards = Shards(4, per_shard)
    for shard in range(4):
        shards.give(shard, many(2))
        shards.give(shard, rows(4, 4, 9))
        for _, batch in ToShards(1, SCHEMA).process((1, 1, 2 if shard < 2 else 3)):
            shards.give(shard, batch)
    assert [shards.fire(shard) for shard in range(4)] == [[]] * 4
    assert not any(state.rows for state in shards.states)
    outputs = list(shards.stage.finish_bundle())
    assert [value.value for value in outputs] == [(shard, 5_000) for shard in range(4)]
    assert [value.timestamp for value in outputs] == [
        instant(HELD_LINE, 2 if shard < 2 else 3, 2) for shard in range(4)
    ]
    waiting = [[b.column("due").to_pylist() for b in state.rows] for state in shards.states]
    assert waiting == [[[4, 4, 9]]] * 4
    if per_shard:
        assert sorted(map(len, shards.threads.values())) == [1, 1, 1, 1]
    else:
        assert shards.made == 2


def test_a_shard_that_fires_twice_in_a_bundle_has_its_waiting_rows() -> None:
    shards = Shards(2)
    for shard in range(2):
        shards.give(shard, many(2))
        shards.give(shard, many(6))
        for _, batch in ToShards(1, SCHEMA).process((1, 1, 6)):
            shards.give(shard, batch)
        assert shards.fire(shard) == []
    again = [value.value for value in shards.fire(0)]
    assert again == [(0, 5_000), (1, 5_000)]
    assert shards.fire(1) == []
    assert [v.value for v in shards.stage.finish_bundle()] == [(0, 5_000), (1, 5_000)]
    assert not any(state.rows for state in shards.states)


def test_batches_are_let_go_of_as_they_are_taken() -> None:
    held = [rows(1), rows(2), rows(3)]
    taken = [batch.column("due")[0].as_py() for batch in module._drained(held)]
    assert taken == [1, 2, 3] and held == []


def test_an_error_of_the_callback_leaves_the_rows(refused: Refused) -> None:
    shard = Shard()

    def fails(*_: object) -> Held:
        raise KeyError("user-4711")

    shard.give(rows(1))
    shard.tick(1, 1, 2)
    shard.stage._workers = Workers(lambda: fails, Threads())
    refused(shard.fire)
    forget_error()
    assert len(shard.state.rows) == 1 and shard.state.progress == [0, 0, 2, 1, 2]
