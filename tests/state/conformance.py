"""What every store must do; a store's tests inherit ``StoreConformance``.

A ``Bench`` makes stores of one run that are opened independently of each other, as by
different processes.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpstream.accounting.arrays import Ids
from dpstream.state.arrow import id_array, id_view, position_ids
from dpstream.state.store import (
    NEVER,
    Admitted,
    KeyShard,
    OvertakenError,
    RunIdentity,
    StepResult,
    Store,
)

KEY_SCHEMA = pa.schema(
    [pa.field("page", pa.string(), nullable=False), pa.field("lang", pa.int64(), nullable=False)]
)
STREAMS = 2
#: Keys and units of the suite have numbers below this.
UNIVERSE = 64
IDENTITY = RunIdentity("aa" * 16, "22" * 16, 0, 4, "key", "source", "{}")


class Bench(ABC):
    """One run's database."""

    @abstractmethod
    def open(self) -> Store:
        """A new handle on the same state, as another process would get it."""


def ids(numbers: list[int]) -> Ids:
    """(n, 2) ids of small numbers."""
    return np.array([[n, n * 7 + 1] for n in numbers], np.uint64).reshape(-1, 2)


def releases(*rows: tuple[str, float]) -> pa.RecordBatch:
    """A batch that stands for a step's releases."""
    return pa.RecordBatch.from_pydict(
        {
            "page": pa.array([page for page, _ in rows], pa.string()),
            "n": pa.array([n for _, n in rows], pa.float64()),
        }
    )


def change(
    states: KeyShard, keys: list[int], seed: int, named: Ids | None = None
) -> tuple[npt.NDArray[Any], npt.NDArray[Any], Ids]:
    """Give keys data that depend on ``seed``; (slots, pair slots, pair units)."""
    named = ids(keys) if named is None else named
    rows = pa.RecordBatch.from_arrays(
        [pa.array([f"p{k}" for k in keys]), pa.array(keys, pa.int64()), id_array(named)],
        names=["page", "lang", "_id"],
    )
    slots = states.intern(named, rows)
    changed = np.unique(slots)
    states.units[changed] += seed
    states.values[changed] += [seed, -3 * seed]
    states.selected[changed] += seed % 2
    odd = states.table.ids[changed, 0] % 2 == 1  # of the key, not of the slot it happens to have
    states.due[changed] = np.where(odd, seed + 1, NEVER)
    units = ids([1000 + seed] * len(changed))
    fresh = states.pairs.add(changed, units)
    return changed, changed[fresh], units[fresh]


def take_step(
    store: Store,
    trigger: int,
    keys: list[int],
    seed: int,
    closes: bool = False,
    shard: int = 0,
    selected: list[int] | None = None,
) -> pa.RecordBatch:
    """Load, change and commit one step; returns what is committed.

    Args:
        selected: keys that are noted as selected, of those that change.
    """
    states = store.key_shard(0, shard)
    store.load_keys(0, shard, trigger, states, ids(keys))
    changed, pair_slots, pair_units = change(states, keys, seed)
    out = releases(*((f"p{k}", float(seed)) for k in keys))
    published = states.table.find(ids(keys))
    chosen = None if selected is None else states.table.find(ids(selected))
    pairs = pair_slots, pair_units
    result = StepResult(changed, changed, *pairs, out, published, closes, chosen, 10 * trigger)
    return store.commit_step(0, shard, trigger, states, result)


def in_group(
    store: Store, take: Callable[[], None], before: Callable[[], None] = lambda: None
) -> None:
    """Take steps as a worker does: together, and each by itself where that is too large.

    Args:
        before: looks at the store before the group is committed.
    """
    try:
        with store.grouped():
            take()
            before()
    except OvertakenError:
        take()


def loaded(store: Store, shard: int = 0) -> KeyShard:
    """The states of window 0 with all keys that the suite uses in memory."""
    states = store.key_shard(0, shard)
    store.load_keys(0, shard, states.committed + 1, states, ids(list(range(UNIVERSE))))
    return states


def released(store: Store, window: int, shard: int, trigger: int) -> pa.RecordBatch:
    """What was committed of a step, which is there."""
    batch = store.committed_releases(window, shard, trigger)
    assert batch is not None
    return batch


def picture(states: KeyShard) -> dict[str, Any]:
    """Everything a later step could see of key states, in whatever order they are held."""
    keys = states.key_columns(np.arange(states.size)).to_pylist()
    by_key = {}
    for slot, key in enumerate(states.table.ids.tolist()):
        # What a unit set holds shows in what it takes for new.
        unit_probes = [
            bool(states.pairs.add(np.array([slot]), ids([1000 + seed]))[0]) for seed in range(12)
        ]
        by_key[tuple(key)] = (
            keys[slot],
            int(states.units[slot]),
            states.values[slot].tolist(),
            int(states.selected[slot]),
            int(states.due[slot]),
            bool(states.done[slot]),
            unit_probes,
        )
    return {"committed": states.committed, "keys": by_key}


def log_of(
    store: Store, shard: int = 0, after: int = -1, upto: int | None = None
) -> list[tuple[int, int, list[tuple[str, int]]]]:
    """(trigger time, window, sorted keys) of what was selected."""
    out = []
    for selection in store.selections(shard, after, upto):
        keys = selection.keys
        assert [i % UNIVERSE for i in id_view(keys.column("_id"))[:, 0]] == keys["lang"].to_pylist()
        pairs = sorted(zip(keys["page"].to_pylist(), keys["lang"].to_pylist(), strict=True))
        out.append((selection.trigger_time, selection.window, pairs))
    return out


def named(*keys: int) -> list[tuple[str, int]]:
    """Keys as ``log_of`` says them."""
    return sorted((f"p{key}", key) for key in keys)


def look(store: Store, shard: int = 0) -> dict[str, Any]:
    """The picture of all states of a shard."""
    return picture(loaded(store, shard))


def decide(store: Store, trigger_time: int, units: list[int], pairs: list[int], first: int) -> None:
    """Admit ``pairs[i]`` pairs of a record of ``units[i]`` at offsets first, first + 1, ..."""
    shard = store.unit_shard(0)
    store.load_units(0, shard, ids(units))
    slots = shard.intern(ids(units))
    count = np.array(pairs, np.int32)
    np.add.at(shard.counts, slots, count)
    offset = np.arange(first, first + len(units))
    where = np.full(len(units), 3, np.int32), offset
    decided = Admitted(
        *where, slots.astype(np.int32), count, np.full(len(units), trigger_time, np.int32)
    )
    store.commit_units(0, trigger_time, shard, decided)


def counts(store: Store) -> dict[tuple[int, ...], int]:
    """Unit id -> admitted pairs, of the units that have any."""
    shard = store.unit_shard(0)
    store.load_units(0, shard, ids(list(range(UNIVERSE))))
    unit_ids = shard.table.ids.tolist()
    by_unit = {tuple(unit): int(shard.counts[i]) for i, unit in enumerate(unit_ids)}
    return {unit: by_unit[unit] for unit in sorted(by_unit) if by_unit[unit]}


class StoreConformance:
    """Inherit and give a fixture ``bench``."""

    unused_shards = itertools.count(100)

    def test_a_new_store_is_empty(self, bench: Bench) -> None:
        store = bench.open()
        assert store.identity == IDENTITY
        states, units = store.key_shard(0, 0), store.unit_shard(0)
        assert (states.size, states.committed, units.table.size, units.decided) == (0, 0, 0, 0)
        assert store.committed_releases(0, 0, 1) is None
        index, admitted = store.admitted_before(0, units)
        assert index.size == len(admitted.trigger_time) == 0

    def test_steps_are_read_back(self, bench: Bench) -> None:
        store = bench.open()
        first = take_step(store, 1, [5, 6, 5, 7], 1)
        second = take_step(store, 2, [], 2)
        third = take_step(store, 3, [7, 8], 3)
        other = bench.open()
        for trigger, expected in enumerate((first, second, third), 1):
            assert released(store, 0, 0, trigger).equals(expected)
            assert released(other, 0, 0, trigger).equals(expected)
        for name in ((0, 0, 4), (0, 1, 1), (1, 0, 1)):
            assert other.committed_releases(*name) is None
        assert look(other) == look(store)
        assert other.key_shard(0, 0).committed == 3
        assert loaded(other, 1).size == other.key_shard(1, 0).size == 0

    # Several classes inherit the test on purpose.
    @settings(
        max_examples=25,
        suppress_health_check=[
            HealthCheck.function_scoped_fixture,
            HealthCheck.differing_executors,
        ],
        deadline=None,
    )
    @given(
        steps=st.lists(
            st.tuples(st.lists(st.integers(0, 6), max_size=6), st.booleans()), max_size=9
        )
    )
    def test_any_history_survives_restarts(
        self, bench: Bench, steps: list[tuple[list[int], bool]]
    ) -> None:
        shard = next(self.unused_shards)
        store, model = bench.open(), KeyShard(KEY_SCHEMA, STREAMS)
        for trigger, (keys, restart) in enumerate(steps, 1):
            take_step(store, trigger, keys, trigger, shard=shard)
            change(model, keys, trigger)
            model.committed = trigger
            if restart:
                store.close()
                store = bench.open()
        assert look(store, shard) == picture(model)
        reopened = loaded(bench.open(), shard)
        model.pairs.__init__()  # type: ignore[misc]
        for trigger, (keys, _) in enumerate(steps, 1):
            slots = np.unique(model.table.find(ids(keys)))
            model.pairs.add(slots, ids([1000 + trigger] * len(slots)))
        assert picture(reopened) == picture(model)

    def test_whoever_loses_a_race_returns_what_was_committed(self, bench: Bench) -> None:
        winner, loser = bench.open(), bench.open()
        take_step(winner, 1, [1, 2], 1)
        late = loaded(loser)
        assert late.size == 2
        committed = take_step(winner, 2, [2, 3], 2)
        with pytest.raises(OvertakenError):
            take_step(loser, 2, [4, 5, 6], 9)
        answer = released(loser, 0, 0, 2)
        assert answer.equals(committed) and answer.num_rows == 2
        expected = look(bench.open())
        assert list(expected["keys"]) == [tuple(i) for i in ids([1, 2, 3]).tolist()]
        assert loser.key_shard(0, 0) is not late
        assert look(loser) == expected

    def test_a_step_from_old_states_is_refused(self, bench: Bench) -> None:
        """It would count from where the steps between had not been taken."""
        winner, loser = bench.open(), bench.open()
        take_step(winner, 1, [1, 2], 1)
        assert loaded(loser).committed == 1
        take_step(winner, 2, [2, 3], 2)
        for handle in (loser, winner):
            with pytest.raises(OvertakenError):
                take_step(handle, 3 + (handle is winner), [1], 9)
        assert bench.open().committed_releases(0, 0, 3) is None
        assert look(loser) == look(winner) == look(bench.open())
        take_step(loser, 3, [1], 3)
        assert look(bench.open())["committed"] == 3

    def test_forgotten_states_are_loaded_again(self, bench: Bench) -> None:
        store = bench.open()
        take_step(store, 1, [1], 1)
        change(loaded(store), [1, 2], 5)
        store.forget(0, 0)
        assert look(store) == look(bench.open())
        shard = store.unit_shard(0)
        slots = shard.intern(ids([4]))
        shard.counts[slots] += 1
        store.forget_units(0)
        assert counts(store) == {}

    def test_a_closed_window_leaves_its_releases_only(self, bench: Bench) -> None:
        store = bench.open()
        first = take_step(store, 1, [1, 2], 1)
        last = take_step(store, 2, [2], 2, closes=True)
        for handle in (store, bench.open()):
            states = handle.key_shard(0, 0)
            assert (states.size, states.committed) == (0, 2)
            assert released(handle, 0, 0, 1).equals(first)
            assert released(handle, 0, 0, 2).equals(last)

    def test_a_group_becomes_visible_as_one(self, bench: Bench) -> None:
        store, other, model = bench.open(), bench.open(), KeyShard(KEY_SCHEMA, STREAMS)

        def take() -> None:
            for trigger in (1, 2, 3):
                take_step(store, trigger, [trigger, 7], trigger)

        def unseen() -> None:
            assert other.committed_releases(0, 0, 1) is None

        in_group(store, take, unseen)
        for trigger in (1, 2, 3):
            change(model, [trigger, 7], trigger)
        model.committed = 3
        assert all(other.committed_releases(0, 0, t) is not None for t in (1, 2, 3))
        assert look(store) == picture(model)
        with store.grouped():
            last = take_step(store, 4, [2], 4, closes=True)
        states = other.key_shard(0, 0)
        assert (states.size, states.committed) == (0, 4)
        assert released(other, 0, 0, 4).equals(last)

    def test_a_window_that_begins_and_closes_in_a_group_leaves_no_states(
        self, bench: Bench
    ) -> None:
        store = bench.open()

        def take() -> None:
            take_step(store, 1, [1, 2], 1)
            take_step(store, 2, [2], 2, closes=True)

        in_group(store, take)
        for handle in (store, bench.open()):
            assert (handle.key_shard(0, 0).size, handle.key_shard(0, 0).committed) == (0, 2)

    def test_a_group_that_fails_leaves_nothing(self, bench: Bench) -> None:
        store = bench.open()
        take_step(store, 1, [1], 1)
        with pytest.raises(InterruptedError), store.grouped():
            take_step(store, 2, [1, 2], 2)
            take_step(store, 1, [4], 5, shard=1)
            raise InterruptedError
        expected = bench.open()
        assert expected.committed_releases(0, 0, 2) is None
        for shard in (0, 1):
            assert look(store, shard) == look(expected, shard)
        take_step(store, 2, [3], 3)  # and steps outside a group are their own again
        assert bench.open().committed_releases(0, 0, 2) is not None

    def test_an_overtaken_group_writes_nothing(self, bench: Bench) -> None:
        winner, loser = bench.open(), bench.open()
        with pytest.raises(OvertakenError), loser.grouped():
            take_step(loser, 1, [1], 1)
            take_step(loser, 2, [2], 2)
            committed = take_step(winner, 1, [5], 9)
        assert bench.open().committed_releases(0, 0, 2) is None
        assert released(loser, 0, 0, 1).equals(committed)
        assert look(loser) == look(bench.open())

    def test_what_was_selected_is_read_back(self, bench: Bench) -> None:
        store = bench.open()
        assert log_of(store) == []
        take_step(store, 1, [1, 2], 1, selected=[2])
        take_step(store, 2, [2, 3], 2, selected=[])
        take_step(store, 3, [3, 1, 4], 3, selected=[1, 4], closes=True)
        take_step(store, 1, [6], 1, shard=1, selected=[6])
        expected = [(10, 0, named(2)), (30, 0, named(1, 4))]
        for handle in (store, bench.open()):
            assert log_of(handle) == expected
            assert log_of(handle, after=10) == expected[1:]
            assert log_of(handle, after=9, upto=29) == expected[:1]
            assert log_of(handle, after=30) == [] and log_of(handle, 2) == []
            assert log_of(handle, 1) == [(10, 0, named(6))]

    def test_a_selection_is_committed_with_its_step(self, bench: Bench) -> None:
        store, other = bench.open(), bench.open()

        def take() -> None:
            take_step(store, 1, [1], 1, selected=[1])
            take_step(store, 2, [2], 2, selected=[2])
            take_step(store, 1, [5], 2, shard=1, selected=[5])

        def unseen() -> None:
            # The group's own thread builds on it; nobody else sees it.
            assert log_of(store) == [(10, 0, named(1)), (20, 0, named(2))]
            assert log_of(store, after=10) == [(20, 0, named(2))]
            assert log_of(store, upto=10) == [(10, 0, named(1))]
            assert log_of(other) == []

        in_group(store, take, unseen)
        assert log_of(other) == log_of(store) == [(10, 0, named(1)), (20, 0, named(2))]
        with pytest.raises(InterruptedError), store.grouped():
            take_step(store, 3, [7], 3, selected=[7])
            raise InterruptedError
        assert log_of(store, after=20) == log_of(other, after=20) == []
        take_step(other, 3, [8], 3, selected=[8])
        with pytest.raises(OvertakenError):
            take_step(store, 3, [9], 3, selected=[9])
        assert log_of(store, after=20) == [(30, 0, named(8))]

    def test_decisions_are_read_back(self, bench: Bench) -> None:
        store = bench.open()
        decide(store, 2, [1, 2, 1], [1, 3, 2], first=10)
        decide(store, 5, [], [], first=0)
        decide(store, 7, [3, 2], [1, 1], first=40)
        for handle in (store, bench.open()):
            assert handle.unit_shard(0).decided == 7
            assert list(counts(handle).values()) == [3, 4, 1]
            assert list(counts(handle)) == [tuple(i) for i in ids([1, 2, 3]).tolist()]
            units = handle.unit_shard(0)
            handle.load_units(0, units, ids([1, 2, 3]))
            index, admitted = handle.admitted_before(0, units)
            # The last one: the same position of another unit is another record.
            rows = [(1, 10), (2, 11), (1, 12), (3, 40), (2, 41), (1, 9), (3, 41)]
            slots = units.table.find(ids([unit for unit, _ in rows]))
            offsets = np.array([offset for _, offset in rows])
            at = index.find(position_ids(np.full(len(rows), 3), offsets, slots))
            assert at[-2:].tolist() == [-1, -1]
            assert admitted.pairs[at[:5]].tolist() == [1, 3, 2, 1, 1]
            assert admitted.trigger_time[at[:5]].tolist() == [2, 2, 2, 7, 7]
            assert admitted.offset[at[:5]].tolist() == [10, 11, 12, 40, 41]
            assert admitted.unit[at[:5]].tolist() == slots[:5].tolist()

    def test_two_workers_never_both_decide(self, bench: Bench) -> None:
        winner, loser = bench.open(), bench.open()
        decide(winner, 2, [1], [1], first=0)
        assert counts(loser) == counts(winner)
        decide(winner, 4, [1, 2], [1, 1], first=1)
        with pytest.raises(OvertakenError):
            decide(loser, 4, [1], [5], first=9)
        assert counts(loser) == counts(winner) == counts(bench.open())
        assert loser.unit_shard(0).decided == 4
        decide(loser, 6, [2], [1], first=3)
        assert bench.open().unit_shard(0).decided == 6

    def test_notes_are_swapped_by_comparison(self, bench: Bench) -> None:
        store, other = bench.open(), bench.open()
        assert store.metadata("x") is None and store.token() == ""
        assert not store.swap_metadata("x", "a", "b") and store.metadata("x") is None
        assert store.swap_metadata("x", None, "a") and not other.swap_metadata("x", None, "b")
        assert other.swap_metadata("x", "a", "c") and not store.swap_metadata("x", "a", "d")
        assert [handle.metadata("x") for handle in (store, other, bench.open())] == ["c"] * 3
        assert store.swap_metadata("x", "c", None) and other.metadata("x") is None
        assert store.renew_token("", "t1") and not other.renew_token("", "t2")
        assert other.renew_token("t1", "t2") and bench.open().token() == "t2"
        assert bench.open().identity == IDENTITY  # notes change nothing else
