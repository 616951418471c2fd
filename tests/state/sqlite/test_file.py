"""The embedded store's file: how it is begun, what of it is refused, and with which code."""

from pathlib import Path

import msgspec
import pytest

from dpstream.accounting.errors import PolicyError, RunError, UsageError
from dpstream.dp_transforms.run import begin_run
from dpstream.state import open as stores
from dpstream.state.sqlite.database import sqlite3
from dpstream.state.sqlite.file import connect, create_store, peek_note, store_exists
from dpstream.state.sqlite.store import SqliteStore
from tests.state.conformance import (
    IDENTITY,
    KEY_SCHEMA,
    STREAMS,
    decide,
    take_step,
)
from tests.state.sqlite.bench import SqliteBench
from tests.streams import KEYS, make_plan


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
