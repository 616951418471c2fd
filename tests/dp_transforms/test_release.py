"""Steps in their order, runs of them that share a commit, and one sealed object of each."""

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.budget.calibration import calibrate
from dpstream.dp_transforms import release
from dpstream.dp_transforms.batches import SHARD, release_schema, shard_release_schema
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.state.arrow import id_array
from dpstream.state.store import RunIdentity
from tests.state.conformance import ids
from tests.streams import COUNT, MEAN, make_plan


def test_a_group_ends_when_it_has_enough_steps_or_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "COMMIT_STEPS", 3)
    monkeypatch.setattr(release, "COMMIT_ROWS", 10)
    rows = [0, 0, 0, 0, 10, 4, 6, 0, 25, 1]
    batches = [pa.RecordBatch.from_arrays([pa.nulls(n)], names=["x"]) for n in rows]
    steps = [(0, trigger, batch) for trigger, batch in enumerate(batches, 1)]
    groups = list(release.commit_groups(steps))
    assert [step for group in groups for step in group] == steps
    assert [[step[1] for step in group] for group in groups] == [
        [1, 2, 3], [4, 5], [6, 7], [8, 9], [10],
    ]  # fmt: skip


def pairs(*rows: tuple[int, int]) -> pa.RecordBatch:
    """Admitted pairs of these (window, trigger)s; ``n`` says their place."""
    window, trigger = np.array(rows, np.int32).reshape(-1, 2).T
    return pa.RecordBatch.from_pydict({"window": window, "trigger": trigger, "n": range(len(rows))})


@pytest.mark.parametrize("together", [1, 2, 1000])
def test_steps_come_by_trigger_time_and_then_by_window(
    together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of 4 triggers begin every 2; rows keep their order within a step."""
    monkeypatch.setattr(release, "COMMIT_ROWS", together)
    timeline = make_plan(triggers=4, slide=2, windows=3).timeline
    rows = pairs((1, 1), (0, 3), (1, 1), (0, 1), (1, 2), (2, 1))
    steps = [
        (window, trigger, batch.column("n").to_pylist())
        for window, trigger, batch in release.steps_through(timeline, rows, 5, since=1)
    ]
    assert steps == [
        (0, 2, []), (0, 3, [1]), (1, 1, [0, 2]), (0, 4, []), (1, 2, [4]), (1, 3, []), (2, 1, [5]),
    ]  # fmt: skip
    assert list(release.steps_through(timeline, pairs(), 1, since=1)) == []


def test_rows_ahead_of_their_stamps_wait() -> None:
    timeline = make_plan(triggers=4, slide=2, windows=3).timeline
    rows = pairs((0, 4), (1, 3), (1, 2), (2, 1))
    due, later = release.due_by(timeline, rows, 4)
    assert (due.column("n").to_pylist(), later.column("n").to_pylist()) == ([0, 2], [1, 3])
    due, later = release.due_by(timeline, rows, 9)
    assert due is rows and later.num_rows == 0


PLAN = make_plan(aggregates=(COUNT, MEAN), windows=3)
IDENTITY = RunIdentity(
    "ab" * 16, "22" * 16, 0, 2, "key", "source", "{}", calibration=calibrate(PLAN)
)


def part(*keys: str) -> pa.RecordBatch:
    """A shard's rows, with a mean over nothing."""
    named = id_array(ids([ord(key) for key in keys]))
    size, one = len(keys), np.ones(len(keys))
    columns = [list(keys), named, one, one, np.full(size, np.nan), np.full(size, np.nan)]
    arrays = [pa.array(column) for column in columns]
    return pa.RecordBatch.from_arrays(arrays, schema=shard_release_schema(PLAN))


def sealed(ring: KeyRing, *parts: pa.RecordBatch, window: int = 1, trigger: int = 3):  # type: ignore[no-untyped-def]
    prefix = np.array([1, 2], np.uint64)
    return release.seal(PLAN, IDENTITY, ring.release, prefix, window, trigger, parts)


def test_a_release_is_sorted_by_key_whatever_the_shards(ring: KeyRing) -> None:
    one = sealed(ring, part("c", "a"), part("b"))
    other = sealed(ring, part("b", "a", "c"), part())
    assert one.equals(other, check_metadata=True) and one.schema.names == release_schema(PLAN).names
    assert one.column("page").to_pylist() == ["a", "b", "c"]
    assert one.column("level").null_count == one.column("level_sd").null_count == 3
    assert one.schema.metadata == {b"dpstream.window": b"1", b"dpstream.trigger": b"3"}
    begin, end = PLAN.timeline.window_bounds(1)
    row = one.slice(0, 1)
    micros = [row.column(n).cast(pa.int64())[0].as_py() for n in ("window_start", "window_end")]
    assert micros == [begin, end] and set(one.column("plan_hash").to_pylist()) == {"ab" * 16}
    assert sealed(ring).num_rows == 0


def test_a_row_has_an_id_of_its_key_window_and_trigger(ring: KeyRing) -> None:
    names = [
        tuple(sealed(ring, part("a", "b"), window=w, trigger=t).column("release_id").to_pylist())
        for w, t in ((0, 1), (0, 2), (1, 1))
    ]
    assert len({name for group in names for name in group}) == 6


def test_an_insecure_run_says_so_in_every_release() -> None:
    assert release.stamped_run_id(PLAN, IDENTITY) == "22" * 16
    insecure = msgspec.structs.replace(IDENTITY, insecure=True)
    assert release.stamped_run_id(PLAN, insecure) == "INSECURE-" + "22" * 16


class State:
    """Beam's state of one key: a bag, and a value."""

    def __init__(self) -> None:
        self.rows: list[pa.RecordBatch] = []
        self.value: bytes | None = None

    def add(self, row: pa.RecordBatch) -> None:
        self.rows.append(row)

    def read(self) -> list[pa.RecordBatch] | bytes | None:
        return self.value

    def write(self, value: bytes) -> None:
        self.value = value

    def clear(self) -> None:
        self.rows, self.value = [], None


class Bag(State):
    def read(self) -> list[pa.RecordBatch]:
        return self.rows


def test_a_release_waits_for_all_shards_and_counts_each_once() -> None:
    gather, bag, seen = release.Gather(3), Bag(), State()

    def give(shard: int) -> list[tuple[tuple[int, int], list[pa.RecordBatch]]]:
        batch = part(str(shard)).replace_schema_metadata({SHARD: str(shard)})
        return list(gather.process(((1, 3), batch), bag, seen))

    assert [give(shard) for shard in (2, 0, 2, 0)] == [[]] * 4
    ((name, parts),) = give(1)
    assert name == (1, 3)
    assert [batch.column("page")[0].as_py() for batch in parts] == ["2", "0", "1"]
    assert not bag.rows and seen.value is None
