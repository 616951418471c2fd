"""The embedded store's file: its tables and their version, its identity row, how it is opened.

Version 2 adds tables to version 1 and leaves what is there as it is; a file of version 1 is
upgraded in one transaction when it is opened.
"""

import contextlib
import os
import sqlite3
from pathlib import Path

import msgspec

from accounting.errors import PolicyError, RunError, UsageError
from accounting.limits import BUSY_SECONDS
from state.store import RunIdentity

SCHEMA_VERSION = 2
_VERSION_1 = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS steps (
  window INTEGER NOT NULL, shard INTEGER NOT NULL, trigger INTEGER NOT NULL,
  releases BLOB NOT NULL, keys BLOB, states BLOB, pairs BLOB,
  UNIQUE (window, shard, trigger));
CREATE TABLE IF NOT EXISTS admissions (
  shard INTEGER NOT NULL, cut INTEGER NOT NULL, units BLOB NOT NULL, records BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS admissions_by_shard ON admissions (shard);
"""
_VERSION_2 = """
CREATE TABLE IF NOT EXISTS snapshots (
  window INTEGER NOT NULL, shard INTEGER NOT NULL,
  keys BLOB NOT NULL, states BLOB NOT NULL, pairs BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS snapshots_by_shard ON snapshots (window, shard);
CREATE TABLE IF NOT EXISTS carried (
  window INTEGER NOT NULL, shard INTEGER NOT NULL, trigger INTEGER NOT NULL,
  releases BLOB NOT NULL, PRIMARY KEY (window, shard, trigger));
CREATE TABLE IF NOT EXISTS unit_shards (
  shard INTEGER PRIMARY KEY, forgotten INTEGER NOT NULL, reach INTEGER NOT NULL,
  generation INTEGER NOT NULL);
"""
#: Pages of the write-ahead log before they are moved into the file: each move is two fsyncs.
_CHECKPOINT_PAGES = 8192
#: Rows hold blobs of many kB: larger pages are shorter chains.
_PAGE_BYTES = 8192


def create_store(path: str | Path, identity: RunIdentity) -> RunIdentity:
    """Create the file with its identity, or return the identity of one that exists."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    db = connect(path)
    try:
        with db:
            db.execute("BEGIN IMMEDIATE")
            tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
            if tables and "meta" not in tables:
                raise PolicyError(
                    "state.store", "the file is another program's database", "choose another path"
                )
            if not tables:
                for statement in (_VERSION_1 + _VERSION_2).split(";"):
                    db.execute(statement)
                db.execute("INSERT INTO meta VALUES ('schema_version', ?)", (str(SCHEMA_VERSION),))
            db.execute(
                "INSERT OR IGNORE INTO meta VALUES ('identity', ?)",
                (msgspec.json.encode(identity).decode(),),
            )
        return read_identity(db)
    except sqlite3.Error as error:
        raise failed(error) from None
    finally:
        db.close()


def store_exists(path: str | Path) -> bool:
    """Whether the file holds an initialised store."""
    return Path(path).exists() and Path(path).stat().st_size > 0


def read_identity(db: sqlite3.Connection) -> RunIdentity:
    """The identity row of a store; one of an older schema version is upgraded first.

    Raises:
        PolicyError: not a store, or one of a newer version of the program.
        RunError: it cannot be read or upgraded; it is then as it was.
    """
    try:
        known = {n for (n,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.OperationalError):
            raise failed(error) from None
        known = set()
    if "meta" not in known:
        raise PolicyError("state.store", "the file is not a dpstream store", "choose another path")
    try:
        _upgrade(db)
        meta = dict(db.execute("SELECT name, value FROM meta"))
        return msgspec.json.decode(meta["identity"], type=RunIdentity)
    except sqlite3.Error as error:
        raise failed(error) from None
    except (KeyError, msgspec.DecodeError):
        raise PolicyError(
            "state.store", "its identity cannot be read", "restore it from a backup"
        ) from None


def _upgrade(db: sqlite3.Connection) -> None:
    """Bring the tables to this program's version, all or nothing."""
    version = _version(db)
    if version == SCHEMA_VERSION:
        return
    if version != 1:
        raise PolicyError(
            "state.store",
            f"its schema version is not one of 1 to {SCHEMA_VERSION}, those of this program",
            "use the program version that wrote it, or a newer one",
        )
    with db:
        db.execute("BEGIN IMMEDIATE")
        if _version(db) == 1:  # no other process was faster
            for statement in _VERSION_2.split(";"):
                db.execute(statement)
            db.execute(
                "UPDATE meta SET value = ? WHERE name = 'schema_version'", (str(SCHEMA_VERSION),)
            )


def _version(db: sqlite3.Connection) -> int:
    row = db.execute("SELECT value FROM meta WHERE name = 'schema_version'").fetchone()
    return int(row[0]) if row and str(row[0]).isdecimal() else 0


def connect(path: str | Path) -> sqlite3.Connection:
    """The file with durable commits, made for its owner only if it is new."""
    try:
        # Exact counts live here: for the owner only, like the noise key.  A file that exists is
        # not opened here: closing it would drop the locks of this process's other connections.
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        file = os.stat(path).st_ino
        db = sqlite3.connect(
            path, isolation_level=None, check_same_thread=False, timeout=BUSY_SECONDS
        )
    except (sqlite3.Error, OSError) as error:
        raise failed(error) from None
    try:
        db.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
        db.execute("PRAGMA synchronous = FULL")
        # Zeros over what is deleted where that costs no write; ON would cost a run 3 to 4% more.
        db.execute("PRAGMA secure_delete = FAST")
        if os.stat(path).st_ino != file:
            raise RunError("state.store", "was replaced while it was opened", "run it again")
    except (sqlite3.Error, OSError) as error:
        db.close()
        raise failed(error) from None
    except RunError:
        db.close()
        raise
    return db


def failed(error: sqlite3.Error | OSError) -> RunError | UsageError | PolicyError:
    """SQLite's error by its public code; its text can hold a path or a value."""
    code = getattr(error, "sqlite_errorname", None) or type(error).__name__
    if isinstance(error, OSError) or code in (
        "SQLITE_NOTADB",
        "SQLITE_CANTOPEN",
        "SQLITE_CANTOPEN_ISDIR",
    ):
        return UsageError("state.store", f"cannot be opened ({code})", "check the path")
    if code.startswith("SQLITE_CORRUPT"):
        return PolicyError("state.store", "is damaged", "restore it from a backup")
    return RunError("state.store", f"the database refused ({code})", "check disk and rights")
