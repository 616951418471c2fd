"""The embedded store's file: how it is begun, what of it is refused, and with which code.

The format of a store, and rows of meta that are what was put there.

Notes of the embedded store: changed by comparison, apart from its own rows, checked.

Rows of the embedded store: a cell in another's place is damage, and so is a name.

The embedded store's log of selections: sealed, checked.
Connections to SQLite's files: versions, journals of killed processes, durability, errors.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest

from dpstream.accounting.errors import PolicyError, RunError, UsageError
from dpstream.dp_transforms.run import begin_run
from dpstream.state import arrow, seals
from dpstream.state import open as stores
from dpstream.state.ledger.events import damaged
from dpstream.state.sqlite import database
from dpstream.state.sqlite.database import (
    Subject,
    open_file,
    refused,
    sqlite3,
    wal_is_safe,
)
from dpstream.state.sqlite.file import (
    NO_RELEASES,
    TABLES,
    InUseError,
    UnitRow,
    admission_row,
    admissions_of,
    connect,
    create_store,
    exclusive,
    peek_identity,
    peek_note,
    put_meta,
    read_meta,
    read_metadata,
    released_ahead_row,
    releases_of,
    snapshot_row,
    step_blobs,
    step_row,
    store_exists,
    swap_metadata,
    unit_row,
    unit_row_of,
)
from dpstream.state.sqlite.store import SqliteStore, backup_file, check_file
from tests.faults.damage import flip
from tests.faults.journals import leave_journal
from tests.golden.refusals import Refused
from tests.state.conformance import (
    IDENTITY,
    KEY_SCHEMA,
    STREAMS,
    decide,
    log_of,
    named,
    take_step,
)
from tests.state.sqlite.bench import SqliteBench, resharded
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


def test_a_row_of_meta_is_read_as_it_was_put(refused: Refused) -> None:
    db = sqlite3.connect(":memory:")
    db.executescript(TABLES)
    assert read_meta(db, "x") is None
    for text in ("a b", "", "ä"):
        put_meta(db, "x", text)
        assert read_meta(db, "x") == text
    put_meta(db, "y", "c")
    db.execute("UPDATE meta SET value = (SELECT value FROM meta WHERE name = 'y')")
    refused(lambda: read_meta(db, "x"))
    db.close()


def test_a_full_or_read_only_disk_is_refused_with_a_code(tmp_path: Path, refused: Refused) -> None:
    bench = SqliteBench(tmp_path / "store.db")
    store = bench.open()
    store._db.execute("PRAGMA max_page_count = 1")
    refused(lambda: take_step(store, 1, list(range(5000)), 1))
    store._db.execute("PRAGMA max_page_count = 1000000")
    store._db.execute("PRAGMA query_only = ON")
    refused(lambda: decide(store, 1, [1], [1], first=0))
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


def test_what_an_operator_adds_is_no_damage(bench: SqliteBench, refused: Refused) -> None:
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
        refused(bench.open)


@pytest.mark.parametrize("content", [b"no database at all" * 100, b"SQLite format 3\0"])
def test_what_is_no_store_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "store.db"
    path.write_bytes(content)
    with pytest.raises((UsageError, PolicyError)):
        create_store(path, IDENTITY)
    assert path.read_bytes() == content


def test_a_database_of_something_else_is_refused(tmp_path: Path, refused: Refused) -> None:
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE accounts (name TEXT)")
    db.close()
    refused(lambda: SqliteStore(path, KEY_SCHEMA, STREAMS))


def test_a_note_is_no_row_of_the_stores_own(bench: SqliteBench) -> None:
    db = bench.open()._db
    identity = read_meta(db, "identity")
    assert read_metadata(db, "identity") is None
    assert swap_metadata(db, "identity", None, "mine")
    assert read_meta(db, "identity") == identity and read_metadata(db, "identity") == "mine"


def test_a_note_that_was_changed_by_hand_is_damage(bench: SqliteBench, refused: Refused) -> None:
    db = bench.open()._db
    swap_metadata(db, "x", None, "a")
    db.execute("UPDATE meta SET value = substr(value, 1, length(value) - 1) || 'b'")
    for touch in (lambda: read_metadata(db, "x"), lambda: swap_metadata(db, "x", "b", "c")):
        refused(touch)
    assert not db.in_transaction


def test_a_store_that_is_gone_is_told_by_its_code(bench: SqliteBench, refused: Refused) -> None:
    db = sqlite3.connect(":memory:")
    for touch in (lambda: read_metadata(db, "x"), lambda: swap_metadata(db, "x", None, "a")):
        refused(touch)
    db.close()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    """A store with rows in every table."""
    store = resharded(tmp_path)
    store.close()
    yield tmp_path / "new.db"


def rows(path: Path, statement: str, *values: object) -> list[tuple[object, ...]]:
    with sqlite3.connect(path) as db:
        table_rows = db.execute(statement, values).fetchall()
    db.close()
    return table_rows


def use(path: Path) -> None:
    """Read all that a run reads."""
    store = SqliteStore(path, KEY_SCHEMA, STREAMS)
    try:
        for window, shard, last in store.progress():
            store.key_shard(window, shard)
            for trigger in range(1, last + 2):
                store.committed_releases(window, shard, trigger)
                store.released_ahead(window, shard, trigger)
        for shard in range(store.identity.shards):
            store.admitted_before(shard, store.unit_shard(shard))
    finally:
        store.close()


BLOBS = [
    ("steps", "releases"), ("carried", "releases"), ("unit_shards", "progress"),
    ("admissions", "units"), ("admissions", "records"),
    *(("snapshots", column) for column in ("keys", "states", "pairs")),
]  # fmt: skip


@pytest.mark.parametrize(("table", "column"), BLOBS)
def test_a_blob_in_another_rows_place_is_noticed(
    file: Path, table: str, column: str, refused: Refused
) -> None:
    use(file)
    one, other = rows(file, f"SELECT rowid, {column} FROM {table} ORDER BY rowid")[-2:]
    assert one[1] != other[1]
    rows(file, f"UPDATE {table} SET {column} = ? WHERE rowid = ?", other[1], one[0])
    for attempt in (lambda: use(file), lambda: check_file(file)):
        refused(attempt)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE unit_shards SET shard = 7 WHERE shard = 2",
        "UPDATE meta SET name = 'note.y' WHERE name = 'note.x'",
        "UPDATE meta SET value = replace(value, '\"epoch\":0', '\"epoch\":1')",
        "UPDATE admissions SET cut = cut + 1",
        "UPDATE steps SET trigger = trigger + 4",
        "DELETE FROM steps WHERE trigger = 1",
        "INSERT INTO snapshots SELECT * FROM snapshots LIMIT 1",
        "UPDATE snapshots SET keys = CAST(keys AS TEXT)",
        "DROP INDEX admissions_by_shard",
        "ALTER TABLE steps RENAME COLUMN keys TO kess",
    ],
)
def test_numbers_names_and_tables_are_what_they_were(
    file: Path, statement: str, refused: Refused
) -> None:
    rows(file, statement)
    refused(lambda: use(file))


def test_without_checks_they_are_used(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotaged: what a store was without digests."""
    blind = lambda _, blob: memoryview(blob)[seals.SIZE :]  # noqa: E731
    monkeypatch.setattr("dpstream.state.sqlite.file.unsealed", blind)
    one, other = rows(file, "SELECT rowid, units FROM admissions ORDER BY rowid")[-2:]
    rows(file, "UPDATE admissions SET units = ? WHERE rowid = ?", other[1], one[0])
    use(file)


RELEASES = pa.RecordBatch.from_pydict({"n": [1.5, -2.0]})
UNITS = arrow.to_bytes(pa.RecordBatch.from_pydict({"unit": pa.array([b"u" * 16], pa.binary(16))}))


def test_rows_are_read_as_they_were_written() -> None:
    row = step_row(1, 2, 3, arrow.to_bytes(RELEASES), (b"k", b"s", b"p"))
    releases = releases_of(1, 2, 3, row.releases)
    assert row[:3] == (1, 2, 3) and releases is not None and releases.equals(RELEASES)
    assert step_blobs((1, 2, 3), row[4:]) == (b"k", b"s", b"p")
    bare = step_row(1, 2, 3, NO_RELEASES)
    assert releases_of(1, 2, 3, bare.releases) is None and step_blobs((1, 2, 3), bare[4:]) is None
    piece = snapshot_row(1, 2, 7, (b"k", b"s", b"p"))
    assert step_blobs((1, 2, 7), piece[2:], "snapshots") == (b"k", b"s", b"p")
    ahead = released_ahead_row(1, 2, 3, arrow.to_bytes(RELEASES))
    assert releases_of(1, 2, 3, ahead[3], "carried") is not None
    unit_state = UnitRow(3, 5, 8)
    assert unit_row_of(2, unit_row(2, unit_state)[1]) == unit_state


def test_a_row_is_damaged_anywhere_else(refused: Refused) -> None:
    row, piece = step_row(1, 2, 3, b"r", (b"k", b"s", b"p")), snapshot_row(1, 2, 7, (b"k",))
    attempts = [
        lambda: releases_of(1, 2, 4, row.releases),
        lambda: releases_of(1, 2, 3, row.releases, "carried"),
        lambda: step_blobs((1, 2, 3), (row.states, row.keys, row.pairs)),
        lambda: step_blobs((1, 2, 3), (row.keys, row.states, None)),
        lambda: step_blobs((1, 2, 6), (piece[2],) * 3, "snapshots"),
        lambda: unit_row_of(3, unit_row(2, UnitRow())[1]),
        lambda: unit_row_of(2, seals.sealed("unit_shards/2/progress", b"short")),
    ]
    for attempt in attempts:
        refused(attempt)


def test_a_log_that_lost_a_commit_is_damaged(refused: Refused) -> None:
    """Each row's name says how many units stand before it."""
    log = [admission_row(4, 9, before, UNITS, b"r")[1:] for before in (0, 1, 2)]
    assert [(row.trigger_time, row.units.num_rows) for row in admissions_of(4, log)] == [(9, 1)] * 3
    for wrong in ([log[0], log[2]], [log[1], log[0]], log[1:]):
        refused(admissions_of, 4, wrong)


def test_only_what_was_selected_is_noted(bench: SqliteBench) -> None:
    store = bench.open()
    take_step(store, 1, [1, 2], 1)
    take_step(store, 2, [1, 2], 2, selected=[])
    assert log_of(store) == []
    take_step(bench.open(), 3, [1, 2], 3, selected=[1])
    assert log_of(bench.open()) == log_of(store) == [(30, 0, named(1))]


def test_backups_hold_it(bench: SqliteBench, tmp_path: Path) -> None:
    take_step(bench.open(), 1, [1, 2], 1, selected=[1, 2])
    backup_file(bench.path, tmp_path / "copy.db")
    with sqlite3.connect(tmp_path / "copy.db") as db:
        assert db.execute("SELECT count(*) FROM selections").fetchone() == (1,)
    db.close()


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE selections SET trigger_time = trigger_time + 1",
        "UPDATE selections SET keys = substr(keys, 1, length(keys) - 1) || x'77'",
        "UPDATE selections SET shard = 1",
        "DROP INDEX selections_by_shard",
    ],
)
def test_damage_is_noticed(bench: SqliteBench, damage: str, refused: Refused) -> None:
    store = bench.open()
    take_step(store, 1, [1, 2], 1, selected=[1])
    with sqlite3.connect(bench.path) as db:
        db.execute(damage)
    db.close()
    if "DROP" not in damage:
        refused(lambda: [log_of(store, shard) for shard in range(IDENTITY.shards)])
    bench.close()
    refused(lambda: check_file(bench.path))


SUBJECT = Subject("account.path", "ledger", damaged)


@pytest.mark.parametrize(
    ("version", "safe"),
    [
        ((3, 40, 1), False), ((3, 44, 5), False), ((3, 44, 6), True), ((3, 45, 3), False),
        ((3, 50, 6), False), ((3, 50, 7), True), ((3, 51, 2), False), ((3, 51, 3), True),
        ((3, 53, 4), True), ((4, 0, 0), True),
    ],
)  # fmt: skip
def test_which_versions_are_safe_with_a_log(version: tuple[int, ...], safe: bool) -> None:
    """As SQLite's page of the bug says."""
    assert wal_is_safe(version) is safe


def test_the_library_of_this_environment_is_safe() -> None:
    """The locks name a package with a newer SQLite than Python's."""
    assert wal_is_safe()


@pytest.mark.parametrize(("safe", "mode", "synchronous"), [(True, "wal", 2), (False, "delete", 3)])
def test_a_library_with_the_bug_uses_no_log(
    safe: bool, mode: str, synchronous: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a file that was in WAL mode leaves it; 3 is EXTRA, 2 is FULL."""
    open_file(tmp_path / "s.db", create=True, log=True).close()
    monkeypatch.setattr(database, "wal_is_safe", lambda: safe)
    for path in (tmp_path / "s.db", tmp_path / "new.db"):
        db = open_file(path, create=True, log=True)
        assert db.execute("PRAGMA journal_mode").fetchone() == (mode,)
        assert db.execute("PRAGMA synchronous").fetchone() == (synchronous,)
        db.close()


def test_an_idle_connection_keeps_others_from_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in WAL mode, so that no store is replaced under a run."""
    path = tmp_path / "s.db"
    for safe in (True, False):
        monkeypatch.setattr(database, "wal_is_safe", lambda safe=safe: safe)
        one, two = (open_file(path, create=True, log=True) for _ in range(2))
        one.execute("CREATE TABLE IF NOT EXISTS t (x)")
        one.close()
        with pytest.raises(InUseError), exclusive(path, patience=0.05):
            pass
        two.close()
        with exclusive(path, patience=0.05):
            pass


def test_a_file_with_a_journal_syncs_its_folder(tmp_path: Path) -> None:
    db = open_file(tmp_path / "l.db", create=True)
    assert db.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    assert db.execute("PRAGMA synchronous").fetchone() == (3,)
    db.close()
    assert (tmp_path / "l.db").stat().st_mode & 0o777 == 0o600


def test_every_connection_rolls_a_journal_back(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    db = open_file(path, create=True)
    db.execute("CREATE TABLE t (x)")
    db.close()
    journal = leave_journal(path)
    db = open_file(path)
    assert db.execute("SELECT name FROM sqlite_master").fetchall() == [("t",)]
    db.close()
    assert not journal.exists()


def test_a_file_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_file(tmp_path / "none.db")
    assert not list(tmp_path.iterdir())


def coded(name: str) -> Exception:
    error = sqlite3.OperationalError("a path and a value")
    error.sqlite_errorname = name
    return error


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    """A file of which SQLite reported an error that is over."""
    path = tmp_path / "l.db"
    with contextlib.closing(open_file(path, create=True)) as db:
        db.execute("CREATE TABLE t (x)")
        db.execute("INSERT INTO t VALUES (zeroblob(30000))")
    return path


GOLDEN = Path(__file__).with_name("refusals.txt")
CODES = (
    "SQLITE_FULL", "SQLITE_READONLY", "SQLITE_READONLY_ROLLBACK", "SQLITE_READONLY_DBMOVED",
    "SQLITE_CANTOPEN", "SQLITE_IOERR_WRITE", "SQLITE_IOERR_FSYNC", "SQLITE_BUSY",
    "SQLITE_LOCKED_SHAREDCACHE", "SQLITE_CORRUPT_INDEX", "SQLITE_NOTADB", "SQLITE_PERM",
    "SQLITE_NOMEM", "SQLITE_TOOBIG", "SQLITE_PROTOCOL", "SQLITE_MISMATCH",
)  # fmt: skip


def test_what_each_code_means(sound: Path) -> None:
    texts = [f"{code}\n  {refused(SUBJECT, coded(code), sound)}\n" for code in CODES]
    if os.environ.get("REWRITE"):
        GOLDEN.write_text("".join(texts))
    assert "".join(texts) == GOLDEN.read_text()
    assert not re.search("path and a value", "".join(texts))


@pytest.mark.parametrize("code", ["SQLITE_CORRUPT", "SQLITE_NOTADB"])
def test_damage_is_what_is_read_twice(code: str, sound: Path) -> None:
    """SQLite reports a failed read as damage; a file that is right at the second try is none."""
    assert isinstance(refused(SUBJECT, coded(code), sound), RunError)
    with contextlib.closing(open_file(sound)) as db:
        assert isinstance(refused(SUBJECT, coded(code), db), RunError)
    flip(sound, 8 * 8192 + 5)
    assert isinstance(refused(SUBJECT, coded(code), sound), PolicyError)
    with contextlib.closing(open_file(sound)) as db:
        assert isinstance(refused(SUBJECT, coded(code), db), PolicyError)


def test_a_look_for_damage_leaves_the_locks(sound: Path) -> None:
    """A file that is closed loses the locks of its process, in every connection."""
    with contextlib.closing(open_file(sound)) as db:
        db.execute("BEGIN IMMEDIATE")
        refused(SUBJECT, coded("SQLITE_IOERR"), db)
        refused(SUBJECT, coded("SQLITE_CORRUPT"), db)
        script = (
            f"import sqlite3; sqlite3.connect({str(sound)!r}, timeout=0).execute('BEGIN IMMEDIATE')"
        )
        other = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True)
        assert b"database is locked" in other.stderr
    flip(sound, 8 * 18 + 7)  # it says now that nobody may write it
    error = refused(SUBJECT, coded("SQLITE_READONLY"), sound)
    assert "header is damaged" in error.fix


def test_a_wait_for_a_lock_can_be_interrupted(sound: Path) -> None:
    """And is as long as it should be."""
    with contextlib.closing(open_file(sound)) as one:
        one.execute("BEGIN IMMEDIATE")
        for wait, interrupt in ((0.2, False), (20, True)):
            with contextlib.closing(open_file(sound, wait=wait)) as two:
                begun = time.monotonic()
                if interrupt:
                    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
                with pytest.raises(KeyboardInterrupt if interrupt else RunError):
                    try:
                        two.execute("BEGIN IMMEDIATE")
                    except sqlite3.Error as error:
                        raise refused(SUBJECT, error, two) from None
                assert 0.1 < time.monotonic() - begun < 5


def test_a_new_file_is_waited_for(tmp_path: Path) -> None:
    """SQLite itself does not wait where it changes the mode."""
    with contextlib.closing(open_file(tmp_path / "new.db", create=True)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        threading.Timer(0.3, writer.execute, ("COMMIT",)).start()
        with contextlib.closing(open_file(tmp_path / "new.db", log=True)) as db:
            assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_exit_codes(sound: Path) -> None:
    kinds = {code: type(refused(SUBJECT, coded(code), sound)) for code in CODES}
    assert kinds["SQLITE_FULL"] is kinds["SQLITE_BUSY"] is kinds["SQLITE_CANTOPEN"] is RunError
    assert kinds["SQLITE_READONLY_ROLLBACK"] is UsageError
    assert kinds["SQLITE_MISMATCH"] is PolicyError


def test_a_folder_is_no_database(tmp_path: Path) -> None:
    with pytest.raises(sqlite3.Error) as caught:
        open_file(tmp_path).execute("SELECT 1")
    error = refused(SUBJECT, caught.value, tmp_path)
    assert isinstance(error, UsageError) and "is a folder" in str(error)
