"""What every store must do for its own life; a store's tests inherit ``RetentionConformance``.

Beside the ``Bench`` of the other suite it needs ``fresh(identity)``: a new, empty store of another
identity, to be filled.
"""

from abc import abstractmethod
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.arrays import Ids
from dpstream.accounting.plan.timeline import Timeline
from dpstream.state.arrow import id_array, id_view, position_ids
from dpstream.state.idtable import shard_of
from dpstream.state.retention import reached
from dpstream.state.retention_store import ReshardProgress, RetainedWindows, UnitProgress
from dpstream.state.store import NEVER, Admitted, OvertakenError, RunIdentity, StepResult, Store
from dpstream.state.transfer import Abandon, copy_store
from tests.state.conformance import (
    IDENTITY,
    UNIVERSE,
    Bench,
    change,
    ids,
    picture,
)

#: Two triggers a window, windows one after the other.
LINE = Timeline(0, None, 2, 2, 1)
SHARDS = 2
OLD = msgspec.structs.replace(IDENTITY, shards=SHARDS)
ALL = list(range(UNIVERSE))


class RetentionBench(Bench):
    """A bench that also makes other stores."""

    @abstractmethod
    def fresh(self, identity: RunIdentity) -> Store:
        """A new empty store."""


def rows_of(keys: list[int], seed: int) -> pa.RecordBatch:
    """Releases that say their keys, as the flow's do."""
    return pa.RecordBatch.from_arrays(
        [pa.array([f"p{k}" for k in keys]), id_array(spread(keys)), pa.array([seed] * len(keys))],
        names=["page", "_id", "n"],
    )


def spread(numbers: list[int]) -> Ids:
    """Ids whose shards are the numbers' remainders."""
    out = ids(numbers)
    out[:, 1] = np.array(numbers, np.uint64) << np.uint64(32)
    return out


def fill_step(
    store: Store, window: int, shard: int, trigger: int, keys: list[int], selects: bool = False
) -> None:
    """Commit a step that changes and releases (and selects) keys (numbers of this shard)."""
    states = store.key_shard(window, shard)
    store.load_keys(window, shard, trigger, states, spread(keys))
    changed, slots, units = change(states, keys, trigger, spread(keys))
    result = StepResult(
        changed,
        changed,
        slots,
        units,
        rows_of(keys, trigger),
        states.table.find(spread(keys)),
        trigger == LINE.triggers,
        states.table.find(spread(keys)) if selects else None,
        LINE.base(window) + trigger,
    )
    store.commit_step(window, shard, trigger, states, result)


def log_by_key(store: Store, shards: int) -> list[tuple[int, int, str]]:
    """(trigger time, window, key) of everything that was selected, each on its own shard."""
    out = []
    for shard in range(shards):
        for time, window, keys in store.selections(shard, -1):
            assert (shard_of(id_view(keys.column("_id")), shards) == shard).all()
            out += [(time, window, page) for page in keys["page"].to_pylist()]
    return out


def decide_units(
    store: Store, shard: int, trigger_time: int, units: list[int], until: list[int] | None = None
) -> None:
    """Admit one record of one pair for each unit, at trigger times up to one."""
    states = store.unit_shard(shard)
    store.load_units(shard, states, spread(units))
    slots = states.intern(spread(units))
    states.counts[slots] += 1
    if until is not None:
        states.period_end[slots] = until
    where = np.full(len(units), 3, np.int32), np.array(units, np.int64) + 100 * trigger_time
    one, trigger_times = np.ones(len(units), np.int32), np.full(len(units), trigger_time, np.int32)
    admitted = Admitted(*where, slots.astype(np.int32), one, trigger_times, one * 7)
    store.commit_units(shard, trigger_time, states, admitted)


def unit_counts(store: Store, shard: int) -> dict[int, int]:
    """Number of the unit -> count, of those that have one."""
    states = store.unit_shard(shard)
    store.load_units(shard, states, spread(ALL))
    at = states.table.find(spread(ALL))
    return {u: int(states.counts[s]) for u, s in zip(ALL, at, strict=True) if s >= 0}


def positions(store: Store, shard: int) -> set[tuple[int, int]]:
    """(unit, trigger time) of the positions that are found, decided after ``forgotten``."""
    states = store.unit_shard(shard)
    store.load_units(shard, states, spread(ALL))
    index, admitted = store.admitted_before(shard, states)
    slots = states.table.find(spread(ALL))
    unit_times = set()
    for unit, slot in zip(ALL, slots.tolist(), strict=True):
        for trigger_time in range(1, 9):
            place = np.array([3]), np.array([unit + 100 * trigger_time]), np.array([slot])
            at = int(index.find(position_ids(*place))[0]) if slot >= 0 else -1
            if at >= 0 and admitted.trigger_time[at] > states.forgotten:
                assert admitted.rank is not None
                assert (admitted.pairs[at], admitted.rank[at]) == (1, 7)
                unit_times.add((unit, trigger_time))
    return unit_times


def everything_of(store: Store) -> dict[str, Any]:
    """All that a later step or decision could see, however it is spread over shards."""
    keys, released = dict[Any, Any](), dict[Any, Any]()
    progress = dict[int, list[int]]()
    for window, shard, last in store.progress():
        progress.setdefault(window, []).append(last)
        states = store.key_shard(window, shard)
        store.load_keys(window, shard, last + 1, states, spread(ALL))
        keys |= {(window, k): v for k, v in picture(states)["keys"].items()}
        store.forget(window, shard)
        for trigger in range(1, LINE.triggers + 1):
            rows = store.committed_releases(window, shard, trigger)
            rows = rows or store.released_ahead(window, shard, trigger)
            for row in [] if rows is None else rows.to_pylist():
                released[window, trigger, row["page"]] = row["n"]
    shards = range(store.identity.shards)
    units = {u: c for shard in shards for u, c in unit_counts(store, shard).items()}
    places = set().union(*(positions(store, shard) for shard in shards))
    return {"keys": keys, "released": released, "units": units, "positions": places}


def sample(store: Store, uneven: bool = False) -> None:
    """A complete window, one under way (its shards apart or not), and decisions."""
    for shard in range(SHARDS):
        fill_step(store, 0, shard, 1, [shard, 4 + shard])
        fill_step(store, 0, shard, 2, [shard])
        if not (uneven and shard):
            fill_step(store, 1, shard, 1, [2 + shard, 8 + shard, 12 + shard])
        decide_units(store, shard, 2, [shard, 2 + shard])
        decide_units(store, shard, 3 + (uneven and not shard), [shard, 6 + shard])


class RetentionConformance:
    """Inherit and give a fixture ``life`` with a ``RetentionBench`` of identity ``OLD``."""

    def test_notes_are_swapped_by_comparison(self, life: RetentionBench) -> None:
        one, other = life.open(), life.open()
        assert one.metadata("x") is None and not one.restoring
        assert one.swap_metadata("x", None, "a") and not other.swap_metadata("x", None, "b")
        assert (
            other.metadata("x") == "a"
            and other.swap_metadata("x", "a", None)
            and one.metadata("x") is None
        )
        one.begin_restoring()
        one.retained_windows = RetainedWindows(2, 5, ((0, 5),))
        assert other.restoring and other.retained_windows.first == 5
        other.finish_restoring()
        assert not one.restoring

    def test_positions_go_and_counts_stay(self, life: RetentionBench) -> None:
        store = life.open()
        sample(store)
        before = unit_counts(store, 0)
        other = life.open()
        other.unit_shard(0)
        store.forget_positions(0, 2)
        store.forget_positions(0, 1)  # never back
        for handle in (store, life.open()):
            assert handle.unit_progress(0) == UnitProgress(3, 2, 3)
            assert handle.unit_shard(0).forgotten == 2
            assert positions(handle, 0) == {(0, 3), (6, 3)}
            assert unit_counts(handle, 0) == before == {0: 2, 2: 1, 6: 1}
        # Whoever had the counters in memory goes on with them, or is refused; none is lost.
        try:
            decide_units(other, 0, 4, [0, 2])
        except Exception:
            decide_units(other, 0, 4, [0, 2])
        assert unit_counts(life.open(), 0) == {0: 3, 2: 2, 6: 1}
        store.forget_units(0)
        store.forget_positions(0, 4)
        assert positions(life.open(), 0) == set()
        assert unit_counts(life.open(), 0) == {0: 3, 2: 2, 6: 1}
        assert life.open().unit_shard(0).decided == 4

    def test_counters_of_closed_periods_go(self, life: RetentionBench) -> None:
        store = life.open()
        decide_units(store, 0, 2, [0, 2, 4, 6], [2, 2, 5, 5])
        decide_units(store, 0, 3, [2, 8], [2, 5])
        other = life.open()
        other.unit_shard(0)
        store.forget_positions(0, 2)
        # Unit 2's period is closed too, but a late decision of it is still under way.
        for handle in (store, life.open()):
            assert {u: c for u, c in unit_counts(handle, 0).items() if c} == {
                2: 2,
                4: 1,
                6: 1,
                8: 1,
            }
            assert positions(handle, 0) == {(2, 3), (8, 3)}
        # A worker that still has the old slots finds what is left, and must not write them.
        assert positions(other, 0) >= {(2, 3), (8, 3)}
        try:
            decide_units(other, 0, 4, [8, 6], [5, 5])
        except Exception:
            decide_units(other, 0, 4, [8, 6], [5, 5])
        assert {u: c for u, c in unit_counts(life.open(), 0).items() if c} == {
            2: 2, 4: 1, 6: 2, 8: 2
        }  # fmt: skip
        store.forget_units(0)
        store.forget_positions(0, 5)
        assert not any(unit_counts(life.open(), 0).values())

    def test_dropped_releases_are_gone(self, life: RetentionBench) -> None:
        store = life.open()
        sample(store)
        store.retained_windows = RetainedWindows(1)
        store.drop_releases(1)
        for handle in (store, life.open()):
            assert handle.committed_releases(0, 0, 1) is None
            assert handle.committed_releases(1, 0, 1) is not None
            assert handle.completed(SHARDS, 1) == {1: 1}
            assert handle.completed(SHARDS).get(0) in (None, 2)

    @pytest.mark.parametrize("windows", [5, 8])
    def test_windows_that_were_dropped_leave_nothing(
        self, life: RetentionBench, windows: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """And whoever was asleep in the midst of one of them does not wake up in it."""
        monkeypatch.setattr("dpstream.state.spanner.schema.EPOCH_LENGTH", 2)
        asleep, first = life.open(), life.open()
        fill_step(asleep, 1, 0, 1, [0])
        first.key_shard(0, 0)
        store = life.open()
        for window in range(windows):
            for shard in range(SHARDS):
                for trigger in (1, 2):
                    if (window, shard, trigger) != (1, 0, 1):
                        fill_step(store, window, shard, trigger, [shard])
        store.retained_windows = RetainedWindows(windows - 1)
        store.drop_releases(windows - 1)
        gone = (windows - 1) // 2 * 2
        assert {p.window for p in store.parts() if p.name == "outbox"} <= set(range(gone, windows))
        for handle in (store, life.open()):
            assert handle.completed(SHARDS, windows - 1) == {windows - 1: 2}
            assert reached(handle, LINE) == (windows, {})
        for zombie, window, trigger in ((asleep, 1, 2), (first, 0, 1)):
            with pytest.raises(OvertakenError):
                fill_step(zombie, window, 0, trigger, [0, 2])
            with pytest.raises(OvertakenError), zombie.grouped():
                fill_step(zombie, window, 0, 1, [0, 2])
        assert {p.window for p in store.parts() if p.name == "keys"} == set()
        fill_step(life.open(), windows, 0, 1, [0])  # life goes on

    def test_progress_is_read_from_a_window_on(self, life: RetentionBench) -> None:
        store = life.open()
        sample(store, uneven=True)
        assert sorted(store.progress(1)) == [(1, 0, 1)] and store.progress(2) == []
        assert sorted(store.progress()) == [(0, 0, 2), (0, 1, 2), (1, 0, 1)]
        assert reached(store, LINE) == (1, {1: 0}), "shard 1 has not begun"

    def test_decisions_of_long_ago_leave_nothing(
        self, life: RetentionBench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """And whoever was asleep does not decide where it fell asleep."""
        monkeypatch.setattr("dpstream.state.spanner.schema.EPOCH_LENGTH", 4)
        asleep, store = life.open(), life.open()
        decide_units(asleep, 0, 1, [0])
        asleep.load_units(0, asleep.unit_shard(0), spread([2]))
        sizes = []
        for trigger_time in range(2, 40):
            decide_units(store, 0, trigger_time, [0])
            store.forget_positions(0, trigger_time - 1)
            store.forget_units(0)
            sizes.append(sum(p.rows for p in store.parts()))
        assert max(sizes) <= 16 and sizes[-1] <= sizes[9]
        with pytest.raises(OvertakenError):
            decide_units(asleep, 0, 2, [2])
        assert unit_counts(life.open(), 0) == {0: 39}

    def test_compaction_changes_nothing(self, life: RetentionBench) -> None:
        store = life.open()
        sample(store)
        store.forget_positions(1, 2)
        expected, other = everything_of(store), life.open()
        assert everything_of(other) == expected
        store.compact()
        for handle in (store, life.open()):
            assert everything_of(handle) == expected
        fill_step(store, 1, 0, 2, [2])
        for handle in (other, store):
            handle.forget_units(1)
            decide_units(handle, 1, 5 + (handle is store), [1, 3])
        assert unit_counts(life.open(), 1)[1] == expected["units"][1] + 2

    def test_selections_are_forgotten_by_time(self, life: RetentionBench) -> None:
        store = life.open()
        assert store.selections(0, -1) == []
        store.forget_selections(3)  # of a store that has none
        for window in range(3):
            for shard in range(SHARDS):
                fill_step(store, window, shard, 1, [shard, shard + 2 * window], True)
                fill_step(store, window, shard, 2, [shard + 4 * window], True)
        assert [s[:2] for s in store.selections(1, -1)] == [
            (1, 0), (2, 0), (3, 1), (4, 1), (5, 2), (6, 2)
        ]  # fmt: skip
        store.retained_windows = RetainedWindows(2)
        store.drop_releases(2)  # the list outlives the releases
        assert len(store.selections(0, -1)) == 6
        store.forget_selections(4)
        store.forget_selections(2)
        for handle in (store, life.open()):
            assert [s[:2] for s in handle.selections(0, -1)] == [(5, 2), (6, 2)]
            assert [s[:2] for s in handle.selections(1, 5)] == [(6, 2)]

    @pytest.mark.parametrize("shards", [1, 2, 5])
    def test_selections_are_copied(self, life: RetentionBench, shards: int) -> None:
        store = life.open()
        fill_step(store, 0, 0, 1, [0, 2, 4], True)
        fill_step(store, 0, 1, 1, [1, 3, 5], True)
        fill_step(store, 0, 0, 2, [6, 8], True)  # shard 1 is behind
        expected = sorted(log_by_key(store, SHARDS))
        assert len(expected) == 8
        new = life.fresh(msgspec.structs.replace(OLD, shards=shards))
        copy_store(store, new, LINE)
        assert sorted(log_by_key(new, shards)) == expected
        # And the new store goes on at the time that a part of its keys has been at.
        mine = [k for k in (1, 3, 5) if shard_of(spread([k]), shards)[0] == 1 % shards]
        fill_step(new, 0, 1 % shards, 2, mine, True)
        assert len(log_by_key(new, shards)) == 8 + len(mine)
        back = life.fresh(OLD)
        copy_store(new, back, LINE)
        assert sorted(log_by_key(back, SHARDS)) == sorted(log_by_key(new, shards))
        gone = life.fresh(msgspec.structs.replace(OLD, epoch=1))
        copy_store(store, gone, LINE, abandon=Abandon(5, 9))
        assert sorted(log_by_key(gone, SHARDS)) == expected  # published is published

    def test_sizes_are_told_by_part(self, life: RetentionBench) -> None:
        store = life.open()
        sample(store)
        parts = {(p.name, p.window): p for p in store.parts()}
        assert {name for name, _ in parts} == {"outbox", "keys", "units", "positions"}
        assert parts["outbox", 0].bytes > 0 and parts["keys", 1].bytes > 0
        assert ("keys", 0) not in parts
        fill_step(store, 2, 0, 1, [0, 2], True)
        (size,) = (p for p in store.parts() if p.name == "selections")
        assert size.window is None and size.rows == 1 and size.bytes > 32
        before = parts["positions", None].bytes
        for shard in range(SHARDS):
            store.forget_positions(shard, 3)
        after = {(p.name, p.window): p for p in store.parts()}
        assert after["positions", None].bytes < before

    @pytest.mark.parametrize("uneven", [False, True])
    @pytest.mark.parametrize("shards", [1, 2, 5])
    def test_copies_hold_the_same(self, life: RetentionBench, shards: int, uneven: bool) -> None:
        store = life.open()
        sample(store, uneven)
        store.retained_windows = RetainedWindows(0, 0)
        expected = everything_of(store)
        new = life.fresh(msgspec.structs.replace(OLD, shards=shards))
        progress: list[tuple[int, int]] = []
        copy_store(store, new, LINE, lambda done, of: progress.append((done, of)))
        assert everything_of(new) == expected
        assert progress[-1][0] == progress[-1][1] == 2 + SHARDS
        assert new.completed(shards)[0] == 2 and new.completed(shards).get(1, 0) == 1 - uneven
        assert new.reshards == ({1: [ReshardProgress((1, 0))]} if uneven else {})
        for shard in range(shards):
            assert new.unit_progress(shard) == UnitProgress(3, 0, 3 + uneven)
            assert new.unit_shard(shard).ahead == uneven
            unit_ids = [u for u in ALL if u in unit_counts(new, shard)]
            assert (shard_of(spread(unit_ids), shards) == shard).all()
        # And back, through a store that was itself resharded.
        back = life.fresh(OLD)
        copy_store(new, back, LINE)
        assert everything_of(back) == expected
        assert back.reshards == new.reshards

    def test_an_abandoned_store_has_spent_units_and_no_open_window(
        self, life: RetentionBench
    ) -> None:
        store = life.open()
        sample(store)
        store.unit_shard(0)
        decide_units(store, 0, 4, [20, 22], [3, NEVER])
        new = life.fresh(msgspec.structs.replace(OLD, epoch=1))
        copy_store(store, new, LINE, abandon=Abandon(5, 9))
        assert new.retained_windows == RetainedWindows(0, 3, ((0, 3),))
        assert new.identity.epoch == 1
        contents = everything_of(new)
        assert contents["keys"] == {} and contents["positions"] == set()
        assert contents["released"] == everything_of(store)["released"]
        assert contents["units"] == dict.fromkeys([0, 2, 6, 22, 1, 3, 7], 9)
        assert new.unit_progress(1) == UnitProgress(5, 5, 5)

    def test_a_snapshot_sees_one_state(self, life: RetentionBench) -> None:
        store, other = life.open(), life.open()
        sample(store)
        with store.snapshot():
            assert sum(len(p.ids) for p in store.unit_pieces(0)) == 3
            decide_units(other, 0, 5, [10], None)
            fill_step(other, 1, 0, 2, [2])
            assert sum(len(p.ids) for p in store.unit_pieces(0)) == 3
            assert store.unit_progress(0).decided == 3
            assert sum(len(p.units) for p in store.key_pieces(1, 0)) == 3
        store.forget_units(0)
        assert unit_counts(store, 0)[10] == 1 and store.unit_progress(0).decided == 5
