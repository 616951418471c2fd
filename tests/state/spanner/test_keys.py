"""Key states in memory: rows that the next commit writes, unit sets that grow, rounds that end."""

from base64 import b64decode
from typing import Any

import numpy as np
import pytest

from dpstream.state import arrow
from dpstream.state.spanner import keys as module
from dpstream.state.spanner.batch import Mutations
from dpstream.state.spanner.keys import SpannerKeyShard
from dpstream.state.spanner.rows import ids_in, unpack_states
from dpstream.state.store import NEVER, StepResult
from tests.state.conformance import KEY_SCHEMA, STREAMS, change, ids, releases


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


def test_new_keys_are_written_with_their_columns_and_known_ones_without() -> None:
    states, out = states_of(), Mutations()
    step(states, 1, [1, 2], 2)
    states.write_keys(out, states.waiting(), 1)
    rows = written(out)["Keys"]
    assert all({"Columns", "State", "UnitIds"} <= row.keys() and row["Part"] == 7 for row in rows)
    stored_states = unpack_states([row["State"].encode() for row in rows], STREAMS)
    assert stored_states["taken"].tolist() == [1, 1] and stored_states["units"].tolist() == [2, 2]
    assert [units_in(row) for row in rows] == [[1002], [1002]]
    states.settled()
    assert not len(states.waiting()) and not states.pending
    step(states, 2, [2, 3], 4)
    again = Mutations()
    states.write_keys(again, states.waiting(), 2)
    assert sorted("Columns" in row for row in written(again)["Keys"]) == [False, True]


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


def test_lists_name_the_keys_that_wait() -> None:
    """Keys of odd ids wait for the trigger after the seed, the others for none."""
    states, out, past = states_of(), Mutations(), Mutations()
    step(states, 4, [1, 2, 3], 6)
    states.write_due(out, np.arange(3), 4, piece=2)
    (row,) = written(out)["KeysByDue"]
    assert (row["Due"], row["Step"], row["Piece"]) == (7, 4, 2 << 20)
    assert ids_in(b64decode(row["KeyIds"]))[:, 0].tolist() == [1, 3]
    states.write_due(past, np.arange(3), 7, piece=0)
    assert past.count == 0


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


def test_releases_of_a_part_are_those_of_its_keys() -> None:
    states = states_of()
    step(states, 1, [4, 5, 6], 2)
    mask = np.array([True, False, True])
    for slots, pages in ((None, ["p4", "p5", "p6"]), (mask, ["p4", "p6"])):
        (cell,) = states.outbox(states.pending[0], slots)
        assert arrow.from_bytes(b64decode(cell)).column("page").to_pylist() == pages


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
