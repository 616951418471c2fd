"""Connections to SQLite's files: versions, journals of killed processes, durability, errors."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dpstream.accounting.errors import PolicyError, RunError, UsageError
from dpstream.state.ledger.events import damaged
from dpstream.state.sqlite import database
from dpstream.state.sqlite.database import (
    Subject,
    open_file,
    refused,
    sqlite3,
    wal_is_safe,
)
from dpstream.state.sqlite.file import InUseError, exclusive
from tests.faults.damage import flip
from tests.faults.journals import leave_journal

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
    "SQLITE_NOMEM", "SQLITE_PROTOCOL", "SQLITE_MISMATCH",
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
