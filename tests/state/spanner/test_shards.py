"""Units in memory: a row is what has gone and the records, and counts are the sum of both.

Key states in memory: rows that the next commit writes, unit sets that grow, rounds that end.

Rows of what tests selected: numbers that no two commits share, large steps in parts.
"""

from base64 import b64decode
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest

from dpstream.state import arrow
from dpstream.state.spanner import shards as module
from dpstream.state.spanner import store as spanner_store
from dpstream.state.spanner.rows import PLAIN, Layout, UnitRows, admitted_of, ids_in, unpack_states
from dpstream.state.spanner.schema import Mutations
from dpstream.state.spanner.shards import (
    COPIED,
    ROW_MUTATIONS,
    SpannerKeyShard,
    SpannerUnitShard,
    piece_of,
)
from dpstream.state.store import NEVER, Admitted, PerKey, StepResult
from tests.state.conformance import (
    KEY_SCHEMA,
    STREAMS,
    Bench,
    change,
    ids,
    log_of,
    named,
    releases,
    take_step,
)


def records(unit: list[int], pairs: list[int], first: int) -> Admitted:
    """Records at offsets first, first + 1, ... of partition 3, decided at 9."""
    three, nine = (np.full(len(unit), n, np.int32) for n in (3, 9))
    offset = np.arange(first, first + len(unit))
    return Admitted(three, offset, np.array(unit, np.int32), np.array(pairs, np.int32), nine)


def rows_of(units: SpannerUnitShard, slots: list[int], layout: Layout = PLAIN) -> UnitRows:
    """What is written of some units, read again."""
    out = Mutations()
    units.write(out, np.array(slots))
    assert out.count == ROW_MUTATIONS * len(slots)
    ((table, columns, rows),) = out._upsert
    assert table == "Units" and {row[0] for row in rows} == {7} and len(columns) == ROW_MUTATIONS
    return UnitRows.of([b64decode(row[2]) for row in rows], layout)


def per_key(*fresh: int) -> PerKey:
    """Records of keys 40, 41, ..., two windows each from window 6 on."""
    rows = len(fresh)
    both = np.full(rows, 3, np.uint64)
    first = np.full(rows, 6, np.int32)
    return PerKey(
        np.arange(40, 40 + rows, dtype=np.uint64), first, both, np.array(fresh, np.uint64)
    )


def test_a_bound_per_key_is_kept_in_the_rows() -> None:
    """Which windows of a key, and first pairs, also of records that have expired."""
    units = SpannerUnitShard(7, complete=True, layout=Layout(per_key=True))
    slots = units.put(ids([1, 2]), np.array([9, 4]), np.full(2, NEVER), np.array([5, 3]))
    mine = msgspec.structs.replace(records([0, 1, 0], [2, 2, 2], 10), per_key=per_key(3, 1, 0))
    units.put_records(mine)
    unit_rows = rows_of(units, slots.tolist(), Layout(per_key=True))
    assert unit_rows.counts.tolist() == [9, 4] and unit_rows.expired_pairs.tolist() == [5, 2]
    assert unit_rows.indices.tolist() == [5, 3]
    assert unit_rows.expired_first_pairs is not None and unit_rows.expired_first_pairs.tolist() == [
        3,
        2,
    ]
    back = admitted_of(unit_rows.records, unit_rows.owner)
    assert back.per_key is not None and back.unit.tolist() == [0, 0, 1]
    assert back.per_key.keys.tolist() == [40, 42, 41]
    assert back.per_key.fresh.tolist() == [3, 0, 1] and back.per_key.first.tolist() == [6] * 3


def test_a_row_is_as_large_as_its_records() -> None:
    units = SpannerUnitShard(7, complete=True)
    units.intern(ids([1, 2]))
    units.take(records([0, 0], [1, 1], 10))
    few, none = units.row_bytes(np.array([0, 1])).tolist()
    assert few - none == 2 * PLAIN.record.itemsize and none > 16 + 16


def states_of(window_sets: bool = False) -> SpannerKeyShard:
    return SpannerKeyShard(KEY_SCHEMA, STREAMS, (7, 3), True, window_sets)


def step(states: SpannerKeyShard, trigger: int, keys: list[int], seed: int) -> None:
    """Change keys and note the step."""
    changed, slots, units = change(states, keys, seed)
    out = releases(*((f"p{k}", float(seed)) for k in keys))
    published = states.table.find(ids(keys))
    states.take(trigger, StepResult(changed, changed, slots, units, out, published, False))


def written(out: Mutations) -> dict[str, list[dict[str, Any]]]:
    """Rows by table."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for table, columns, upsert_rows in out._upsert:
        rows.setdefault(table, []).extend(
            dict(zip(columns, row, strict=True)) for row in upsert_rows
        )
    return rows


def units_in(row: dict[str, Any]) -> list[int]:
    return ids_in(b64decode(row["UnitIds"]))[:, 0].tolist()


def test_what_was_only_looked_at_is_not_written() -> None:
    states, none = states_of(), np.zeros(0, np.int64)
    step(states, 1, [1, 2], 2)
    states.settled()
    states.take(2, StepResult(none, np.array([1]), none, ids([]), releases(), none, False))
    assert states.looked_at().tolist() == [1] and states.waiting().tolist() == []


@pytest.mark.parametrize("window_sets", [False, True])
def test_a_rounds_units_go_with_it(window_sets: bool) -> None:
    """An odd seed ends the round of the keys it changes."""
    states, out = states_of(window_sets), Mutations()
    step(states, 1, [1], 2)
    step(states, 2, [1], 3)
    states.write_keys(out, states.waiting(), 2)
    (row,) = written(out)["Keys"]
    assert units_in(row) == ([1002, 1003] if window_sets else [])


def test_a_large_unit_set_moves_to_rows_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INLINE_PAIRS", 3)
    monkeypatch.setattr(module, "CELL_BYTES", 32)
    states, out = states_of(window_sets=True), Mutations()
    for trigger in range(1, 9):
        step(states, trigger, [1], 2 * trigger)
    (first,) = states.chunks_ahead()
    assert not list(states.chunks_ahead())
    # The key's row, which does not own them before its own commit.
    (empty,) = written(first)["Keys"]
    assert unpack_states([empty["State"].encode()], STREAMS)["due"].tolist() == [NEVER]
    chunks = written(first)["KeyUnits"]
    states.write_keys(out, states.waiting(), 8)
    (row,) = written(out)["Keys"]
    (state,) = unpack_states([row["State"].encode()], STREAMS)
    assert [chunk["Chunk"] for chunk in chunks] == list(range(state["chunk"], state["chunks"]))
    units = [unit for unit_row in (*chunks, row) for unit in units_in(unit_row)]
    assert units == [1000 + 2 * trigger for trigger in range(1, 9)]
    assert len(units_in(row)) <= 3


def test_sizes_count_releases_and_the_columns_of_new_keys() -> None:
    states = states_of()
    step(states, 1, [1, 2], 2)
    before = states.row_bytes(np.array([0, 1]))
    states.settled()
    after = states.row_bytes(np.array([0, 1]))
    assert (after >= 500 + 16).all()
    both = 2 * 8 + len("p1")  # of the key's two columns, and of a release's
    assert (before - after).tolist() == [2 * both] * 2


def test_rows_left_by_a_commit_cut_short_are_counted_from() -> None:
    states = states_of()
    states.left = {1: 4, 2: 1, 3: 2}
    step(states, 1, [1], 2)
    assert states.pieces == 4
    states.pieces = 5
    assert states.left[1] == 5
    step(states, 2, [1], 4)
    states.settled()
    assert states.left == {3: 2}


def test_rows_of_an_ended_round_belong_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INLINE_PAIRS", 3)
    monkeypatch.setattr(module, "CELL_BYTES", 32)
    states, out = states_of(), Mutations()
    for trigger in range(1, 9):
        step(states, trigger, [1], 2 * trigger)
    step(states, 9, [1], 19)
    states.write_keys(out, states.waiting(), 9)
    (row,) = written(out)["Keys"]
    (state,) = unpack_states([row["State"].encode()], STREAMS)
    assert state["chunk"] == state["chunks"] > 0 and units_in(row) == []
    assert "KeyUnits" not in written(out)


def test_numbers_keep_windows_and_copies_apart() -> None:
    numbers = [
        piece_of(window, number)
        for window in (0, 1, (1 << 31) - 1)
        for number in (0, 5 << 12, (5 << 12) + 4095, COPIED, (1 << 32) - 1)
    ]
    assert numbers == sorted(set(numbers)) and numbers[-1] < 1 << 63


def test_a_step_in_parts_notes_each_key_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut short after some commits: a key is in the log when it has taken its step."""
    monkeypatch.setattr("dpstream.state.spanner.schema.COMMIT_MUTATIONS", 60)
    store, keys = bench.open(), list(range(12))
    real, left = spanner_store.SpannerStore._commit, [2]

    def dies(self: object, *rest: object) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise InterruptedError
        real(self, *rest)  # type: ignore[arg-type]

    cut = mock.patch.object(spanner_store.SpannerStore, "_commit", dies)
    with cut, pytest.raises(InterruptedError):
        take_step(store, 1, keys, 1, selected=keys)
    there = log_of(bench.open())
    noted = sorted(key for _, _, selected_keys in there for key in selected_keys)
    assert noted and len(noted) < 12
    again = bench.open()
    states = again.key_shard(0, 0)
    again.load_keys(0, 0, 1, states, ids(keys))
    done = {int(k) for k in states.table.ids[states.done[: states.size].nonzero()[0], 0]}
    assert noted == named(*done)
    rest = [key for key in keys if key not in done]
    again.forget(0, 0)
    take_step(again, 1, rest, 1, selected=rest)
    assert sorted(
        k for _, _, selected_keys in log_of(bench.open()) for k in selected_keys
    ) == named(*keys)


def test_releases_of_a_part_are_those_of_its_keys() -> None:
    states = states_of()
    step(states, 1, [4, 5, 6], 2)
    mask = np.array([True, False, True])
    for slots, pages in ((None, ["p4", "p5", "p6"]), (mask, ["p4", "p6"])):
        (cell,) = states.outbox(states.pending[0], slots)
        assert arrow.from_bytes(b64decode(cell)).column("page").to_pylist() == pages
