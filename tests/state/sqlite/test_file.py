"""The embedded store's file: how it is begun, what of it is refused, and with which code.

The format of a store, and rows of meta that are what was put there.

Notes of the embedded store: changed by comparison, apart from its own rows, checked.
"""

import contextlib
import threading
from pathlib import Path

import msgspec
import pytest

from dpstream.accounting.errors import PolicyError, RunError, UsageError
from dpstream.dp_transforms.run import begin_run
from dpstream.state import open as stores
from dpstream.state.sqlite.database import sqlite3
from dpstream.state.sqlite.file import (
    TABLES,
    connect,
    create_store,
    peek_identity,
    peek_note,
    put_meta,
    read_meta,
    read_metadata,
    store_exists,
    swap_metadata,
)
from dpstream.state.sqlite.store import SqliteStore, backup_file, check_file
from tests.state.conformance import (
    IDENTITY,
    KEY_SCHEMA,
    STREAMS,
    decide,
    take_step,
)
from tests.state.sqlite.bench import SqliteBench
from tests.streams import KEYS, make_plan


def change(path: Path, statement: str, *values: str) -> None:
    with sqlite3.connect(path) as db:
        db.execute(statement, values)
    db.close()


def refusal(attempt: object) -> str:
    with pytest.raises(PolicyError) as caught:
        attempt()  # type: ignore[operator]
    assert caught.value.field == "store"
    return caught.value.fix


def test_another_format_is_refused_and_left_alone(bench: SqliteBench, tmp_path: Path) -> None:
    bench.open().close()
    bench.close()
    with sqlite3.connect(bench.path) as db:
        put_meta(db, "format", "1")
    db.close()
    was = Path(bench.path).read_bytes()
    fixes = {
        refusal(attempt)
        for attempt in (
            bench.open,
            lambda: create_store(bench.path, IDENTITY),
            lambda: peek_identity(bench.path),
            lambda: peek_note(bench.path, "x"),
            lambda: check_file(Path(bench.path)),
            lambda: backup_file(bench.path, tmp_path / "backup"),
        )
    }
    assert len(fixes) == 1 and "the program that wrote it" in fixes.pop()
    assert Path(bench.path).read_bytes() == was and not (tmp_path / "backup").exists()


@pytest.mark.parametrize(
    "damage",
    [
        "DELETE FROM meta WHERE name = 'format'",
        "UPDATE meta SET value = '1' WHERE name = 'format'",
        "UPDATE meta SET value = '' WHERE name = 'format'",
        "DELETE FROM meta WHERE name = 'identity'",
    ],
)
def test_a_format_or_identity_that_no_program_wrote_is_damage(
    bench: SqliteBench, damage: str
) -> None:
    bench.open().close()
    bench.close()
    change(bench.path, damage)
    for attempt in (bench.open, lambda: create_store(bench.path, IDENTITY)):
        assert "state restore" in refusal(attempt)


def test_a_row_of_meta_is_read_as_it_was_put() -> None:
    db = sqlite3.connect(":memory:")
    db.executescript(TABLES)
    assert read_meta(db, "x") is None
    for text in ("a b", "", "ä"):
        put_meta(db, "x", text)
        assert read_meta(db, "x") == text
    put_meta(db, "y", "c")
    db.execute("UPDATE meta SET value = (SELECT value FROM meta WHERE name = 'y')")
    with pytest.raises(PolicyError, match="is damaged"):
        read_meta(db, "x")
    db.close()


def test_a_full_or_read_only_disk_is_refused_with_a_code(tmp_path: Path) -> None:
    bench = SqliteBench(tmp_path / "store.db")
    store = bench.open()
    store._db.execute("PRAGMA max_page_count = 1")
    with pytest.raises(RunError, match="SQLITE_FULL"):
        take_step(store, 1, list(range(5000)), 1)
    store._db.execute("PRAGMA max_page_count = 1000000")
    store._db.execute("PRAGMA query_only = ON")
    with pytest.raises(RunError, match="SQLITE_READONLY"):
        decide(store, 1, [1], [1], first=0)
    bench.close()
    assert bench.open().key_shard(0, 0).size == 0
    bench.close()


def test_an_existing_store_keeps_its_run_id(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    assert not store_exists(path)
    assert create_store(path, IDENTITY) == IDENTITY
    assert store_exists(path)
    other = msgspec.structs.replace(IDENTITY, run_id="33" * 16)
    assert create_store(path, other) == IDENTITY


def test_a_begin_that_was_cut_off_is_no_store(tmp_path: Path) -> None:
    """Killed between SQLite's header and the transaction that makes the tables."""
    path = tmp_path / "store.db"
    connect(path).close()
    assert path.stat().st_size > 0 and not store_exists(path)
    assert peek_note(path, "ledger") is None
    plan, url = make_plan(), f"sqlite:{path}"
    assert begin_run(plan, KEYS, url, 3)[1] is False
    assert store_exists(path) and begin_run(plan, KEYS, url, 3)[1] is True
    stores.close_all()
    (tmp_path / "other").write_bytes(b"no database at all" * 100)
    assert store_exists(tmp_path / "other") and not store_exists(tmp_path / "none")
    held = sqlite3.connect(path, isolation_level=None)
    held.execute("PRAGMA locking_mode = EXCLUSIVE")
    held.execute("BEGIN EXCLUSIVE")
    assert store_exists(path)
    held.close()


def test_a_store_that_is_being_made_is_not_damaged(tmp_path: Path) -> None:
    """Its file exists, and is locked, before its tables are committed."""
    path = tmp_path / "s.db"
    with contextlib.closing(sqlite3.connect(path, check_same_thread=False)) as maker:
        maker.execute("BEGIN EXCLUSIVE")
        later = threading.Timer(0.3, maker.rollback)
        later.start()
        assert peek_identity(path) is None
        later.join()
        maker.execute("BEGIN EXCLUSIVE")
        later = threading.Timer(0.3, maker.rollback)
        later.start()
        assert peek_note(path, "account") is None
        later.join()


def test_what_an_operator_adds_is_no_damage(bench: SqliteBench) -> None:
    with sqlite3.connect(bench.path) as db:
        db.execute("INSERT INTO steps VALUES (9, 9, 9, x'', NULL, NULL, NULL)")
        db.execute("ANALYZE")
        db.execute("CREATE INDEX steps_by_trigger ON steps (trigger)")
        db.execute("DELETE FROM steps")
        assert ("sqlite_stat1",) in db.execute("SELECT name FROM sqlite_master").fetchall()
    db.close()
    bench.open().close()
    for change in ("DROP INDEX admissions_by_shard", "ALTER TABLE steps ADD COLUMN more"):
        with sqlite3.connect(bench.path) as db:
            db.execute(change)
        db.close()
        with pytest.raises(PolicyError, match="is damaged"):
            bench.open()


@pytest.mark.parametrize("content", [b"no database at all" * 100, b"SQLite format 3\0"])
def test_what_is_no_store_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "store.db"
    path.write_bytes(content)
    with pytest.raises((UsageError, PolicyError)):
        create_store(path, IDENTITY)
    assert path.read_bytes() == content


def test_a_database_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE accounts (name TEXT)")
    db.close()
    with pytest.raises(PolicyError, match="not a dpstream store"):
        SqliteStore(path, KEY_SCHEMA, STREAMS)


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
