"""What every store hands out: key states and counters by slot, and one lock for a stage's shard."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from dpstream.state.sqlite.file import create_store
from dpstream.state.sqlite.store import SqliteStore
from dpstream.state.store import CHANGED, NEVER, READING, KeyShard, RunIdentity, UnitShard
from tests.state.conformance import IDENTITY, KEY_SCHEMA, STREAMS, ids, take_step


def rows(keys: list[int]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {"other": keys, "lang": pa.array(keys, pa.int64()), "page": [f"p{k}" for k in keys]}
    )


def test_a_key_has_one_slot_and_the_columns_of_its_first_row() -> None:
    states = KeyShard(KEY_SCHEMA, STREAMS)
    assert states.intern(ids([5, 5, 6]), rows([5, 7, 6])).tolist() == [0, 0, 1]
    assert states.intern(ids([6, 8]), rows([6, 8])).tolist() == [1, 2]
    assert states.size == 3 and (states.due[:3] == NEVER).all() and not states.units[:3].any()
    columns = states.key_columns(np.array([2, 0, 1]))
    assert columns.schema == KEY_SCHEMA and columns.to_pylist() == [
        {"page": "p8", "lang": 8},
        {"page": "p5", "lang": 5},
        {"page": "p6", "lang": 6},
    ]


def test_columns_survive_any_growth() -> None:
    """Chunks are merged as they grow; none is lost and none out of place."""
    states = KeyShard(KEY_SCHEMA, STREAMS)
    for first in range(0, 3000, 37):
        numbers = list(range(first, first + 37))
        slots = states.intern(ids(numbers), rows(numbers))
        states.values[slots, 1] = numbers
        states.due[slots] = np.array(numbers) + 1
    every = list(range(states.size))
    assert states.key_columns(np.array(every)).column("lang").to_pylist() == every
    assert states.values[: states.size, 1].tolist() == every and len(states._chunks) < 12
    assert states.due_at(3).tolist() == [0, 1, 2]


def test_what_was_committed_is_fresh_no_more() -> None:
    states = KeyShard(KEY_SCHEMA, STREAMS)
    states.intern(ids([1]), rows([1]))
    states.done[0] = True
    assert states.fresh_keys().num_rows == 1 and states.logged == 0
    states.mark_committed(4)
    assert (states.committed, states.logged, states.fresh_keys().num_rows) == (4, 1, 0)
    assert not states.done.any()
    states.intern(ids([1, 2]), rows([1, 2]))
    assert states.fresh_keys().column("lang").to_pylist() == [2]


def test_a_unit_has_one_counter() -> None:
    units = UnitShard()
    slots = units.intern(ids([3, 4, 3]))
    assert slots.tolist() == [0, 1, 0]
    np.add.at(units.counts, slots, 1)
    units.until[0] = 9
    assert units.intern(ids(list(range(100)))).max() == 99
    assert units.counts[:3].tolist() == [2, 1, 0] and units.until[:3].tolist() == [9, NEVER, NEVER]


def test_an_identity_has_no_word_that_nobody_reads() -> None:
    text = msgspec.json.encode(IDENTITY)
    assert msgspec.json.decode(text, type=RunIdentity) == IDENTITY
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text[:-1] + b',"later":1}', type=RunIdentity)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    create_store(tmp_path / "s.db", IDENTITY)
    made = SqliteStore(tmp_path / "s.db", KEY_SCHEMA, STREAMS)
    yield made
    made.close()


def test_a_stages_shard_has_one_lock(store: SqliteStore) -> None:
    bound = store.at_work("bound", 1)
    assert store.at_work("bound", 1) is bound
    assert store.at_work("bound", 2) is not bound and store.at_work("release", 1) is not bound
    with bound:
        assert not store.at_work("bound", 1).acquire(blocking=False)  # type: ignore[attr-defined]


def test_a_window_is_as_far_as_its_last_shard(store: SqliteStore) -> None:
    take_step(store, 1, [1], 1, shard=0)
    take_step(store, 2, [1], 1, shard=0)
    assert store.completed(2) == {0: 0}, "shard 1 has not begun"
    take_step(store, 1, [2], 1, shard=1)
    assert store.completed(2) == {0: 1} and store.completed(2, first=1) == {}


def test_a_token_is_renewed_by_comparison(store: SqliteStore) -> None:
    assert store.token() == "" and not store.renew_token("a", "b")
    assert store.renew_token("", "b") and store.token() == "b" == store.metadata("token")


def test_the_verdict_on_an_input_is_final(store: SqliteStore) -> None:
    assert not store.reading and not store.input_changed
    assert store.compared_input is None
    store.note_input(READING)
    assert store.reading and store.compared_input is None
    store.note_input("2024-01-05T00:00:00Z")
    assert not store.reading and store.compared_input == "2024-01-05T00:00:00Z"
    store.note_input(READING)
    assert store.reading and store.compared_input is None
    store.note_input(CHANGED)
    store.note_input(READING)
    store.note_input("2024-01-05T00:00:00Z")
    assert store.input_changed and not store.reading and store.compared_input is None
