"""Notes of the embedded store: changed by comparison, apart from its own rows, checked."""

import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.state.sqlite.database import sqlite3
from dpstream.state.sqlite.metadata import read_metadata, swap_metadata
from dpstream.state.sqlite.tables import read_meta
from tests.state.sqlite.bench import SqliteBench


def test_a_note_is_replaced_if_it_is_what_was_thought(bench: SqliteBench) -> None:
    db = bench.open()._db
    assert read_metadata(db, "x") is None
    assert not swap_metadata(db, "x", "a", "b") and read_metadata(db, "x") is None
    assert swap_metadata(db, "x", None, "a") and not swap_metadata(db, "x", None, "b")
    assert swap_metadata(db, "x", "a", "b") and read_metadata(db, "x") == "b"
    assert not db.in_transaction
    assert swap_metadata(db, "x", "b", None) and read_metadata(db, "x") is None


def test_a_note_is_no_row_of_the_stores_own(bench: SqliteBench) -> None:
    db = bench.open()._db
    identity = read_meta(db, "identity")
    assert read_metadata(db, "identity") is None
    assert swap_metadata(db, "identity", None, "mine")
    assert read_meta(db, "identity") == identity and read_metadata(db, "identity") == "mine"


def test_a_note_that_was_changed_by_hand_is_damage(bench: SqliteBench) -> None:
    db = bench.open()._db
    swap_metadata(db, "x", None, "a")
    db.execute("UPDATE meta SET value = substr(value, 1, length(value) - 1) || 'b'")
    for touch in (lambda: read_metadata(db, "x"), lambda: swap_metadata(db, "x", "b", "c")):
        with pytest.raises(PolicyError, match="is damaged"):
            touch()
    assert not db.in_transaction


def test_a_store_that_is_gone_is_told_by_its_code(bench: SqliteBench) -> None:
    db = sqlite3.connect(":memory:")
    for touch in (lambda: read_metadata(db, "x"), lambda: swap_metadata(db, "x", None, "a")):
        with pytest.raises(PolicyError, match="is damaged"):
            touch()
    db.close()
