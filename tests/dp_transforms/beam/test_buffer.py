"""The stage that waits: armed by clock ticks, one stop for all shards, rows that wait on."""

from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pytest

from dpstream.accounting.errors import RunError
from dpstream.dp_transforms.beam import buffer as module
from dpstream.dp_transforms.beam.buffer import BufferUntilTriggerTime, Held, _outputs
from dpstream.dp_transforms.beam.clock import ToShards, instant
from dpstream.dp_transforms.telemetry import forget_error
from tests.streams import make_plan

LINE = make_plan(triggers=4, windows=5).timeline
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
        self.state, self.stage = State(), BufferUntilTriggerTime(LINE, self._make, 2, **options)
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
    assert shard.armed == instant(LINE, 2, 2)
    shard.give(rows(2))
    assert shard.fire() == [1, 2] and shard.calls == [(7, 2, 0)]
    assert [b.column("due").to_pylist() for b in shard.state.rows] == [[5]]
    shard.tick(1, 3, 6)
    assert shard.armed == instant(LINE, 6, 2)
    assert shard.fire() == [5] and shard.calls[-1] == (7, 6, 2) and not shard.state.rows


def test_a_shard_that_is_behind_takes_few_trigger_times_at_once() -> None:
    shard = Shard(catch_up_limit=3)
    shard.tick(1, 1, 7)
    stops = []
    while len(stops) < 9 and (not stops or shard.calls[-1][1] < 7):
        shard.fire()
        stops.append(shard.calls[-1][1])
    assert stops == [3, 6, 7] and [c[2] for c in shard.calls] == [0, 3, 6]
    assert shard.state.set_to == [instant(LINE, stop, 2) for stop in stops]


def test_a_tick_that_is_missing_is_waited_for() -> None:
    """It is on its way, and holds the watermark."""
    shard = Shard()
    shard.tick(1, 4, 5)
    assert shard.armed is None
    shard.tick(1, 1, 3)
    assert shard.armed == instant(LINE, 3, 2)
    shard.fire()
    assert shard.armed == instant(LINE, 5, 2) and shard.calls == [(7, 3, 0)]


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


def test_a_thread_has_no_timer_for_rows_that_wait() -> None:
    def callback(shard: int, batches: Iterable[pa.RecordBatch], upto: int, since: int) -> Held:
        return Held(iter((1,)), rows(9))

    with pytest.raises(RunError) as caught:
        list(_outputs(7, [rows(1)], 2, 0, callback))
    assert caught.value.field == "performance.threads"


def test_batches_are_let_go_of_as_they_are_taken() -> None:
    held = [rows(1), rows(2), rows(3)]
    taken = [batch.column("due")[0].as_py() for batch in module._drained(held)]
    assert taken == [1, 2, 3] and held == []


def test_an_error_of_the_callback_leaves_the_rows() -> None:
    shard = Shard()

    def fails(*_: object) -> Held:
        raise KeyError("user-4711")

    shard.give(rows(1))
    shard.tick(1, 1, 2)
    shard.stage._callback = fails
    with pytest.raises(RunError, match="failed with KeyError"):
        shard.fire()
    forget_error()
    assert len(shard.state.rows) == 1 and shard.state.progress == [0, 0, 2, 1, 2]
