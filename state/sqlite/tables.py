"""The embedded store's tables, the number of their format, and the rows of ``meta``."""

from dpstream.state.seals import damaged, other_format, sealed_text, unsealed_text
from dpstream.state.sqlite.database import sqlite3
from dpstream.state.sqlite.rows import meta_name

FORMAT = "1"
TABLES = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS steps (
  window INTEGER NOT NULL, shard INTEGER NOT NULL, trigger INTEGER NOT NULL,
  releases BLOB NOT NULL, keys BLOB, states BLOB, pairs BLOB,
  UNIQUE (window, shard, trigger));
CREATE TABLE IF NOT EXISTS admissions (
  shard INTEGER NOT NULL, cut INTEGER NOT NULL, units BLOB NOT NULL, records BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS admissions_by_shard ON admissions (shard);
CREATE TABLE IF NOT EXISTS snapshots (
  window INTEGER NOT NULL, shard INTEGER NOT NULL,
  keys BLOB NOT NULL, states BLOB NOT NULL, pairs BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS snapshots_by_shard ON snapshots (window, shard);
CREATE TABLE IF NOT EXISTS carried (
  window INTEGER NOT NULL, shard INTEGER NOT NULL, trigger INTEGER NOT NULL,
  releases BLOB NOT NULL, PRIMARY KEY (window, shard, trigger));
CREATE TABLE IF NOT EXISTS unit_shards (shard INTEGER PRIMARY KEY, progress BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS selections (
  shard INTEGER NOT NULL, trigger_time INTEGER NOT NULL, window INTEGER NOT NULL,
  keys BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS selections_by_shard ON selections (shard, trigger_time);
"""
#: What the names of notes (`metadata`) begin with.
NOTE = "note."
#: Row of ``meta`` of programs before format 1.
_BEFORE = "schema_version"


def check_format(db: sqlite3.Connection) -> None:
    """Refuse a store that this program does not read.

    Raises:
        PolicyError: of another program version, or damaged.
    """
    number = read_meta(db, "format")
    if number == FORMAT:
        return
    before = db.execute("SELECT 1 FROM meta WHERE name = ?", (_BEFORE,)).fetchone()
    raise damaged() if number is None and before is None else other_format(FORMAT)


def put_meta(db: sqlite3.Connection, name: str, value: str) -> None:
    """Write a row of ``meta``, as a part of the caller's transaction."""
    row = (name, sealed_text(meta_name(name), value))
    db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", row)


def read_meta(db: sqlite3.Connection, name: str) -> str | None:
    """The value of a row of ``meta``, ``None`` if there is none."""
    row = db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
    return None if row is None else unsealed_text(meta_name(name), row[0])
