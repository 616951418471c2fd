"""Spanner's limits, counted from what is sent: mutations and bytes of a commit, bytes of a cell.

The emulator does not enforce them; the real database refuses what exceeds them.

What only a database shared by many workers can show: reads that another worker's commit
splits, decisions cut short, workers of an old generation.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting import limits
from dpstream.accounting.limits import MAX_CONTRIBUTIONS
from dpstream.state.arrow import id_array
from dpstream.state.spanner import client as spanner_client
from dpstream.state.spanner import rows as spanner_rows
from dpstream.state.spanner import schema as spanner_batch
from dpstream.state.spanner import shards as spanner_keys
from dpstream.state.spanner import store as spanner
from dpstream.state.spanner.client import commit, connect, read_rows
from dpstream.state.spanner.rows import UNIT_HEADER, Layout
from dpstream.state.spanner.schema import BOUND, create_identity, create_tables
from dpstream.state.spanner.store import SpannerStore
from dpstream.state.store import Admitted, OvertakenError, StepResult
from tests import emulator
from tests.state.conformance import IDENTITY, counts, decide, ids, look, take_step
from tests.state.spanner.bench import SpannerBench

pytestmark = pytest.mark.usefixtures("running")

#: Spanner's own: mutations of a commit, bytes of a commit, bytes of a cell.
MOST_MUTATIONS, MOST_BYTES, MOST_CELL = 80_000, 100 << 20, 10 << 20
WIDE = pa.schema([pa.field(f"c{n}", pa.string(), nullable=False) for n in range(8)])
NO_UNITS = np.empty((0, 2), np.uint64)


@contextlib.contextmanager
def database(scale: int = 1) -> Iterator[str]:
    """A run's database behind a client whose commits are checked; all limits divided."""
    made = emulator.fresh_url()
    create_tables(connect(made))
    create_identity(connect(made), IDENTITY)
    with (
        mock.patch.object(spanner_batch, "COMMIT_MUTATIONS", limits.COMMIT_MUTATIONS // scale),
        mock.patch.object(spanner, "COMMIT_MUTATIONS", limits.COMMIT_MUTATIONS // scale),
        mock.patch.object(spanner_batch, "COMMIT_BYTES", limits.COMMIT_BYTES // scale),
        mock.patch.object(spanner_keys, "CELL_BYTES", limits.CELL_BYTES // scale),
        mock.patch.object(spanner_rows, "CELL_BYTES", limits.CELL_BYTES // scale),
        mock.patch.object(spanner_client, "READ_KEYS", limits.READ_KEYS // scale),
        counted(made, scale),
    ):
        yield made
    emulator.drop(made)


class Sent:
    """Sizes of a commit, read from its protos."""

    def __init__(self, request: Any) -> None:
        self.bytes = int(type(request).pb(request).ByteSize())
        self.mutations = self.cell = 0
        for mutation in type(request).pb(request).mutations:
            kind = mutation.WhichOneof("operation")
            if kind == "delete":
                keys = mutation.delete.key_set
                self.mutations += len(keys.ranges) + len(keys.keys)
                continue
            write = getattr(mutation, kind)
            self.mutations += len(write.columns) * len(write.values)
            cells = [len(v.string_value) for row in write.values for v in row.values]
            self.cell = max(self.cell, max(cells) * 3 // 4)


SENT: list[Sent] = []


@contextlib.contextmanager
def counted(url: str, scale: int) -> Iterator[None]:
    """Every commit to a database is checked before it is sent."""
    api = connect(url).spanner_api
    real = api.commit
    SENT.clear()

    def commit(request: Any, metadata: Any) -> Any:
        SENT.append(Sent(request))
        assert SENT[-1].mutations <= MOST_MUTATIONS // scale
        assert SENT[-1].bytes <= MOST_BYTES // scale
        assert SENT[-1].cell <= MOST_CELL // scale
        return real(request=request, metadata=metadata)

    with mock.patch.object(api, "commit", commit):
        yield


def distinct_ids(rng: np.random.Generator, size: int) -> Any:
    return rng.integers(0, 2**63, (size, 2)).astype(np.uint64)


def wide_keys(rng: np.random.Generator, sizes: Any) -> tuple[pa.RecordBatch, Any]:
    """Keys whose eight columns have ``sizes`` characters each, and their ids."""
    columns = [
        pa.array([f"{n:07d}{c}".ljust(int(size), "x") for n, size in enumerate(sizes)])
        for c in range(8)
    ]
    ids = distinct_ids(rng, len(sizes))
    schema = WIDE.append(pa.field("_id", pa.binary(16)))
    return pa.RecordBatch.from_arrays([*columns, id_array(ids)], schema=schema), ids


def big_step(
    store: SpannerStore, trigger: int, keys: pa.RecordBatch, ids: Any, due: Any, pairs: Any
) -> pa.RecordBatch:
    """A step that changes and releases all keys; ``pairs`` are (rows of keys, unit ids)."""
    states = store.key_shard(0, 0)
    store.load_keys(0, 0, trigger, states, ids)
    slots = states.intern(ids, keys)
    states.units[slots] += 1
    states.values[slots, 0] += trigger
    states.due[slots] = due
    out = keys.append_column("n", pa.array(np.full(len(ids), float(trigger))))
    touched, owner = np.unique(slots), slots[pairs[0]]
    fresh = states.pairs.add(owner, pairs[1])
    assert fresh.all()
    result = StepResult(touched, touched, owner, pairs[1], out, slots, False)
    return store.commit_step(0, 0, trigger, states, result)


def large_steps(url: str, large: int, small: int, lists: int = 1 << 20) -> str:
    """Two steps with keys of 8 KiB in front of small ones, due at ``lists`` triggers, read back;
    returns figures."""
    rng = np.random.default_rng(1)
    sizes = np.concatenate([np.full(large, 1024), rng.integers(8, 60, small)])
    keys, ids = wide_keys(rng, sizes)
    # Every key on a list of its own costs most.
    due, no_pairs = 10 + np.arange(len(ids)) % lists, (np.zeros(0, np.int64), NO_UNITS)
    store = SpannerStore(url, WIDE, 1)
    began = time.perf_counter()
    for trigger in (1, 2):
        big_step(store, trigger, keys, ids, due, no_pairs)
    took = time.perf_counter() - began
    other = SpannerStore(url, WIDE, 1)
    states = other.key_shard(0, 0)
    assert (states.committed, states.size) == (2, 0)
    other.load_keys(0, 0, 3, states, ids)
    slots = states.table.find(ids)
    assert states.size == len(ids) and (states.values[slots, 0] == 3).all()
    assert (states.due[slots] == due).all()
    assert states.key_columns(slots).equals(pa.Table.from_batches([keys]).select(WIDE.names))
    table, expected = (
        pa.Table.from_batches([batch]).sort_by("c0")
        for batch in (
            other.committed_releases(0, 0, 2),
            keys.append_column("n", pa.array(np.full(len(ids), 2.0))),
        )
    )
    assert table.equals(expected)
    most = {name: max(getattr(s, name) for s in SENT) for name in ("mutations", "bytes", "cell")}
    return f"{len(ids)} keys, two steps in {took:.1f} s: {len(SENT)} commits of at most {most}"


def test_large_steps_stay_within_every_limit() -> None:
    with database(16) as url:
        large_steps(url, 300, 1_200)
        assert len(SENT) >= 8


@pytest.mark.slow
def test_large_steps_stay_within_every_limit_at_size() -> None:
    with database() as url:
        print(f"\n{large_steps(url, 5_000, 12_000)}")
        assert limits.READ_KEYS < 17_000 and len(SENT) >= 8


def average_sizes(rows: pa.RecordBatch | pa.Table) -> Any:
    """Sabotaged sizes: all rows count as equally large, which cuts cells that are too large."""
    return np.full(rows.num_rows, rows.nbytes // max(rows.num_rows, 1))


def no_columns(keys: pa.RecordBatch | pa.Table) -> Any:
    """Sabotaged sizes: keys and releases are left out."""
    return np.full(keys.num_rows, 8)


@pytest.mark.parametrize("sabotaged", [average_sizes, no_columns], ids=lambda f: f.__name__)
def test_sizes_that_are_guessed_exceed_a_limit(
    sabotaged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (spanner_keys, spanner_rows):
        monkeypatch.setattr(module, "row_sizes", sabotaged)
    with database(16) as url, pytest.raises(AssertionError, match="cell"):
        large_steps(url, 120, 280, lists=1)


def one_large_set(url: str, units: int) -> None:
    """A key that a great many units join in one step, and again in the next."""
    rng = np.random.default_rng(2)
    keys, ids = wide_keys(rng, np.full(3, 20))
    joined = distinct_ids(rng, 2 * units)
    store = SpannerStore(url, WIDE, 1)
    for trigger in (1, 2):
        new = joined[(trigger - 1) * units : trigger * units]
        big_step(store, trigger, keys, ids, 9, (np.ones(units, np.int64), new))
        store.forget(0, 0)
    states = SpannerStore(url, WIDE, 1).key_shard(0, 0)
    store.load_keys(0, 0, 3, states, ids)
    slot = states.table.find(ids[1:2])
    again = states.pairs.add(np.repeat(slot, len(joined)), joined)
    assert not again.any(), "a unit would count twice"
    assert states.pairs.add(slot, distinct_ids(rng, 1)).all()


def test_a_key_with_many_units() -> None:
    with database(32) as url:
        one_large_set(url, 150_000)
        assert len(SENT) > 6


@pytest.mark.slow
def test_a_key_with_millions_of_units() -> None:
    with database() as url:
        one_large_set(url, 4_000_000)
        most = [max(getattr(s, name) for s in SENT) >> 20 for name in ("bytes", "cell")]
        print(f"\n8,000,000 units of one key: {len(SENT)} commits of at most {most} MiB")


def test_a_unit_with_as_many_records_as_any_may_have() -> None:
    """A unit's row holds its C records: it must fit into a cell at the largest C."""
    with database() as url:
        full_units(url)


def full_units(url: str) -> None:
    assert UNIT_HEADER.itemsize + MAX_CONTRIBUTIONS * Layout(named=True).record.itemsize < MOST_CELL
    store, rng = SpannerStore(url, WIDE, 1), np.random.default_rng(3)
    units, ids = store.unit_shard(0), distinct_ids(rng, 20)
    store.load_units(0, units, ids)
    slots, c = units.intern(ids), MAX_CONTRIBUTIONS
    many = np.repeat(slots.astype(np.int32), c)
    units.counts[slots] += c
    ones, trigger_time = np.ones(len(many), np.int32), np.full(len(many), 5, np.int32)
    offset = np.arange(len(many))
    store.commit_units(0, 5, units, Admitted(ones, offset, many, ones, trigger_time))
    other = SpannerStore(url, WIDE, 1)
    shard = other.unit_shard(0)
    other.load_units(0, shard, ids[:2])
    assert shard.counts[shard.table.find(ids[:2])].tolist() == [c, c]
    _, admitted = other.admitted_before(0, shard)
    assert sorted(admitted.offset.tolist()) == list(range(2 * c))
    assert len(SENT) >= 2 and max(sent.cell for sent in SENT) > 2_000_000
    assert len(list(read_rows(connect(url), "Units", ("UnitId",)))) == 20


def in_between(store: SpannerStore, act: Callable[[], object]) -> None:
    """``act`` happens after the store has read progress, before it reads what is beyond."""
    todo = [act]

    def delayed(real: Callable[..., Any]) -> Callable[..., Any]:
        def beyond(*where: int) -> Any:
            if todo:
                todo.pop()()
            return real(*where)

        return beyond

    for name in ("_rows_of_steps", "_decision"):
        setattr(store, name, delayed(getattr(store, name)))


def torn(store: SpannerStore) -> None:
    """Sabotaged: a reader that believes two reads to be one."""

    def keys(part: int, window: int) -> tuple[int | None, dict[int, int]]:
        reached = store._reached(part, window)
        return reached, store._rows_of_steps(part, window, (reached or 0) + 1)

    def units(part: int) -> tuple[dict[int, int], list[int]]:
        progress = store._unit_reached(part)
        return progress, store._decision(part, progress.get(BOUND, 0))

    store._key_progress, store._unit_rows = keys, units  # type: ignore[method-assign]


def late_worker(bench: SpannerBench, sabotaged: bool) -> list[str]:
    """Pages released at trigger 2, which one worker commits while another begins to read."""
    winner, loser = bench.open(), bench.open()
    take_step(winner, 1, [1, 2], 1)
    if sabotaged:
        torn(loser)
    in_between(loser, lambda: take_step(winner, 2, [2, 3], 2))
    assert loser.key_shard(0, 0).committed == (1 if sabotaged else 2)
    if sabotaged:
        take_step(loser, 2, [2, 3], 2)  # passes the fence: its row is another one
    releases = bench.open().committed_releases(0, 0, 2)
    assert releases is not None
    return sorted(releases.column("page").to_pylist())


def test_progress_and_parts_are_read_as_one(bench: SpannerBench) -> None:
    assert late_worker(bench, sabotaged=False) == ["p2", "p3"]


def test_two_reads_are_not_one(bench: SpannerBench) -> None:
    assert late_worker(bench, sabotaged=True) == ["p2", "p2", "p3", "p3"]


def test_a_decision_and_its_parts_are_read_as_one(bench: SpannerBench) -> None:
    winner, loser = bench.open(), bench.open()
    in_between(loser, lambda: decide(winner, 4, [1, 2], [1, 1], first=0))
    units = loser.unit_shard(0)
    assert (units.decided, units.ahead) == (4, False)
    reader = bench.open()
    torn(reader)
    in_between(reader, lambda: decide(winner, 6, [3], [1], first=5))
    assert (reader.unit_shard(0).decided, reader.unit_shard(0).ahead) == (4, True)


def cut_short(bench: SpannerBench, trigger_time: int, units: list[int], many: int) -> None:
    """A worker dies after ``many`` commits of a decision."""
    store, remaining = bench.open(), [many]
    real = store._commit_once

    def commit_once(*args: Any) -> None:
        if not remaining[0]:
            raise InterruptedError
        remaining[0] -= 1
        real(*args)

    vars(store)["_commit_once"] = commit_once
    with pytest.raises(InterruptedError):
        decide(store, trigger_time, units, [1] * len(units), first=100)


def test_a_decision_cut_short_is_known_as_far_as_it_went(
    bench: SpannerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next decision may end at an earlier trigger time; what was decided beyond stays known."""
    monkeypatch.setattr("dpstream.state.spanner.schema.COMMIT_MUTATIONS", 8)
    cut_short(bench, 9, list(range(6)), 2)
    store = bench.open()
    unit_counts = counts(store)
    assert 0 < len(unit_counts) < 6
    assert store.unit_shard(0).ahead
    decide(store, 4, [10], [1], first=0)
    for handle in (store, bench.open()):
        units = handle.unit_shard(0)
        assert units.decided == 4
        handle.load_units(0, units, ids(list(range(6))))
        assert units.ahead, "records of trigger time 9 would be taken for new ones"
        _, admitted = handle.admitted_before(0, units)
        assert sorted(admitted.trigger_time.tolist()).count(9) == len(unit_counts)
    decide(store, 9, [11], [1], first=1)
    assert not store.unit_shard(0).ahead
    assert {unit: counts(bench.open())[unit] for unit in unit_counts} == unit_counts


def bump(bench: SpannerBench) -> None:
    """What a restore or a reshard does last."""
    row = [("generation", "1")]
    commit(connect(bench.url), lambda batch: batch.update("Meta", ("Name", "Value"), row))


def test_a_worker_of_an_old_generation_writes_where_nobody_reads(bench: SpannerBench) -> None:
    zombie = bench.open()
    take_step(zombie, 1, [1, 2], 1)
    decide(zombie, 2, [1], [1], first=0)
    bump(bench)
    store = bench.open()
    first = take_step(store, 1, [5], 7)
    decide(store, 3, [2], [2], first=0)
    before = look(bench.open()), counts(bench.open())
    take_step(zombie, 2, [1, 3], 2)  # it believes that it goes on
    take_step(zombie, 3, [], 3, closes=True)  # and even that it closes the window
    decide(zombie, 5, [2], [1], first=9)
    other = bench.open()
    assert (look(other), counts(other)) == before
    assert other.key_shard(0, 0).committed == 1
    assert other.committed_releases(0, 0, 2) is None
    assert other.committed_releases(0, 0, 1) == first
    assert other.completed(1) == {0: 1}
    take_step(store, 2, [5], 8)


def test_generations_that_share_rows_meet(bench: SpannerBench) -> None:
    """Sabotaged: the worker of the old generation goes on where the new one stands."""
    zombie = bench.open()
    store = bench.open()
    bump(bench)
    assert store._first_part == zombie._first_part != bench.open()._first_part
    take_step(store, 1, [5], 7)
    with pytest.raises(OvertakenError):
        take_step(zombie, 1, [1], 1)
