"""The stage that waits: armed by clock ticks, one stop for all shards, rows that wait on."""

import threading
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pytest

from dpstream.accounting.errors import RunError
from dpstream.dp_transforms.beam import buffer as module
from dpstream.dp_transforms.beam.buffer import BufferUntilTriggerTime, Held
from dpstream.dp_transforms.beam.clock import ToShards, instant
from dpstream.dp_transforms.beam.workers import Threads, Workers
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
    stops = list[int]()
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


class Shards:
    """A stage with several shards on two threads, whose timers fire in one bundle."""

    def __init__(self, count: int, per_shard: bool = False) -> None:
        self.made, self.threads = 0, dict[int, set[int]]()
        self.states = [State() for _ in range(count)]
        self.stage = BufferUntilTriggerTime(
            LINE, self._make, 2, catch_up_limit=3, threads=Threads(2, "test"), per_shard=per_shard
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
        instant(LINE, 2 if shard < 2 else 3, 2) for shard in range(4)
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


def test_an_error_of_the_callback_leaves_the_rows() -> None:
    shard = Shard()

    def fails(*_: object) -> Held:
        raise KeyError("user-4711")

    shard.give(rows(1))
    shard.tick(1, 1, 2)
    shard.stage._workers = Workers(lambda: fails, Threads())
    with pytest.raises(RunError, match="failed with KeyError"):
        shard.fire()
    forget_error()
    assert len(shard.state.rows) == 1 and shard.state.progress == [0, 0, 2, 1, 2]
