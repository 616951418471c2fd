"""What outlives a run: windows that are kept, notes of a restore, pieces of a store."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from dpstream.state.retention_store import (
    KeyPiece,
    ReshardProgress,
    RetainedWindows,
    piece_bounds,
    take_keys,
)
from dpstream.state.sqlite.file import create_store
from dpstream.state.sqlite.store import SqliteStore
from tests.state.conformance import IDENTITY, KEY_SCHEMA, STREAMS, ids


def test_a_run_takes_up_the_first_window_that_nobody_gave_up() -> None:
    assert RetainedWindows().first == 0
    assert RetainedWindows(dropped=3, abandoned=5).first == 5
    assert RetainedWindows(dropped=6, abandoned=5).first == 6


def test_a_windows_noise_is_of_the_epoch_that_began_it() -> None:
    retained = RetainedWindows(epochs=((0, 3), (1, 7)))
    assert [retained.epoch_of(window, 2) for window in (0, 2, 3, 6, 7, 99)] == [0, 0, 1, 1, 2, 2]
    assert RetainedWindows().epoch_of(0, 4) == 4


@pytest.mark.parametrize("rows", [0, 1, 4, 5, 9])
def test_pieces_cover_all_rows_once(rows: int) -> None:
    pieces = [list(range(rows))[piece] for piece in piece_bounds(rows, 4)]
    assert [row for piece in pieces for row in piece] == list(range(rows))
    assert all(0 < len(piece) <= 4 for piece in pieces)


def test_some_keys_take_their_pairs_along() -> None:
    number = np.arange(4)
    piece = KeyPiece(
        pa.table({"page": [f"p{n}" for n in number]}),
        number * 10,
        np.stack([number, -number], 1),
        number.astype(np.int32) + 1,
        number.astype(np.int32) + 2,
        number % 2 == 1,
        np.array([0, 3, 3, 2, 1]),
        ids([100, 103, 203, 102, 101]),
    )
    subset = take_keys(piece, np.array([3, 1]))
    assert subset.keys["page"].to_pylist() == ["p3", "p1"] and subset.units.tolist() == [30, 10]
    assert subset.values.tolist() == [[3, -3], [1, -1]] and subset.done.tolist() == [True, True]
    assert (subset.due.tolist(), subset.round.tolist()) == ([4, 2], [5, 3])
    assert subset.pair_rows.tolist() == [0, 0, 1]
    assert subset.pair_units.tolist() == ids([103, 203, 101]).tolist()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    create_store(tmp_path / "s.db", IDENTITY)
    made = SqliteStore(tmp_path / "s.db", KEY_SCHEMA, STREAMS)
    yield made
    made.close()


def test_notes_of_windows_and_reshards(store: SqliteStore) -> None:
    assert store.retained_windows == RetainedWindows() and store.reshards == {}
    store.retained_windows = RetainedWindows(1, 2, ((0, 2),))
    store.reshards = {4: [ReshardProgress((3, 1)), ReshardProgress((2,))]}
    assert store.retained_windows == RetainedWindows(1, 2, ((0, 2),))
    assert store.reshards == {4: [ReshardProgress((3, 1)), ReshardProgress((2,))]}
    store.reshards = {}
    assert store.reshards == {} and store.metadata("leads") is None


@pytest.mark.parametrize("anew", [False, True])
def test_a_restored_store_says_so_until_it_has_caught_up(store: SqliteStore, anew: bool) -> None:
    assert not store.restoring and not store.anew
    store.begin_restoring(anew)
    assert store.restoring and store.anew == anew
    store.finish_restoring()
    assert not store.restoring and not store.anew
