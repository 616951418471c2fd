"""The embedded store's file: its tables, its identity row, and how it is opened."""

import os
import sqlite3
from pathlib import Path

import msgspec

from accounting.errors import PolicyError, RunError, UsageError
from state.store import RunIdentity

SCHEMA_VERSION = 1
_DDL = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS steps (
  window INTEGER NOT NULL, shard INTEGER NOT NULL, trigger INTEGER NOT NULL,
  releases BLOB NOT NULL, keys BLOB, states BLOB, pairs BLOB,
  UNIQUE (window, shard, trigger));
CREATE TABLE IF NOT EXISTS admissions (
  shard INTEGER NOT NULL, cut INTEGER NOT NULL, units BLOB NOT NULL, records BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS admissions_by_shard ON admissions (shard);
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
            for statement in _DDL.split(";"):
                db.execute(statement)
            db.execute(
                "INSERT OR IGNORE INTO meta VALUES ('schema_version', ?)", (str(SCHEMA_VERSION),)
            )
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
    """The identity row, after a check of the schema version."""
    try:
        meta = dict(db.execute("SELECT name, value FROM meta"))
    except sqlite3.Error:
        raise PolicyError(
            "state.store", "the file is not a dpstream store", "choose another path"
        ) from None
    if meta.get("schema_version") != str(SCHEMA_VERSION):
        raise PolicyError(
            "state.store",
            f"its schema version is not {SCHEMA_VERSION}, the one of this program",
            "use the program version that wrote it",
        )
    return msgspec.json.decode(meta["identity"], type=RunIdentity)


def connect(path: str | Path) -> sqlite3.Connection:
    """The file with durable commits, made for its owner only if it is new."""
    try:
        # Exact counts live here: for the owner only, like the noise key.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=60)
        db.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
        db.execute("PRAGMA synchronous = FULL")
    except (sqlite3.Error, OSError) as error:
        raise failed(error) from None
    return db


def failed(error: sqlite3.Error | OSError) -> RunError | UsageError:
    """SQLite's error by its public code; its text can hold a path or a value."""
    code = getattr(error, "sqlite_errorname", None) or type(error).__name__
    if isinstance(error, OSError) or code in (
        "SQLITE_NOTADB",
        "SQLITE_CANTOPEN",
        "SQLITE_CANTOPEN_ISDIR",
    ):
        return UsageError("state.store", f"cannot be opened ({code})", "check the path")
    return RunError("state.store", f"the database refused ({code})", "check disk and rights")
