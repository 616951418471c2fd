"""The embedded store's tables, their version, and the rows of ``meta``.

Version 2 adds tables to version 1, version 3 the digests (`state.seals`); a file of an earlier
version is upgraded in one transaction when it is opened (`state.sqlite.upgrade`).
"""

from dpstream.state.seals import sealed_text, unsealed_text
from dpstream.state.sqlite.database import sqlite3
from dpstream.state.sqlite.rows import meta_name

SCHEMA_VERSION = 3
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
VERSION_2 = """
CREATE TABLE IF NOT EXISTS snapshots (
  window INTEGER NOT NULL, shard INTEGER NOT NULL,
  keys BLOB NOT NULL, states BLOB NOT NULL, pairs BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS snapshots_by_shard ON snapshots (window, shard);
CREATE TABLE IF NOT EXISTS carried (
  window INTEGER NOT NULL, shard INTEGER NOT NULL, trigger INTEGER NOT NULL,
  releases BLOB NOT NULL, PRIMARY KEY (window, shard, trigger));
"""
VERSION_3 = """
CREATE TABLE IF NOT EXISTS unit_shards (shard INTEGER PRIMARY KEY, progress BLOB NOT NULL);
"""
TABLES = _VERSION_1 + VERSION_2 + VERSION_3
#: What the names of notes (`metadata`) begin with.
NOTE = "note."


def put_meta(db: sqlite3.Connection, name: str, value: str) -> None:
    """Write a row of ``meta``, as a part of the caller's transaction."""
    row = (name, sealed_text(meta_name(name), value))
    db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", row)


def read_meta(db: sqlite3.Connection, name: str) -> str | None:
    """The value of a row of ``meta``, ``None`` if there is none."""
    row = db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
    return None if row is None else unsealed_text(meta_name(name), row[0])
