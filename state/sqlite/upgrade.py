"""A file of an earlier schema version brought to this program's: one transaction, all or nothing.

Version 3 seals every row (`state.seals`).  What an earlier version wrote has no digests, so damage
that is there already is noticed as far as SQLite's own check and Arrow's decoding notice it.
"""

from typing import Any

from dpstream.accounting.errors import PolicyError
from dpstream.state import arrow
from dpstream.state.seals import damaged
from dpstream.state.sqlite.database import sqlite3
from dpstream.state.sqlite.rows import (
    UnitRow,
    admission_row,
    released_ahead_row,
    snapshot_row,
    step_row,
    unit_row,
)
from dpstream.state.sqlite.tables import SCHEMA_VERSION, VERSION_2, VERSION_3, put_meta, read_meta

#: Versions whose rows have no digests; they wrote the bare number.
_BARE = ("1", "2")


def upgrade(db: sqlite3.Connection) -> None:
    """Bring the tables to this program's version.

    Raises:
        PolicyError: a newer version, or damaged.
        sqlite3.Error: it cannot be written; it is then as it was.
    """
    version = version_of(db)
    if version == SCHEMA_VERSION:
        return
    if version > SCHEMA_VERSION:
        raise PolicyError(
            "state.store",
            f"its schema version is beyond {SCHEMA_VERSION}, that of this program",
            "use the program version that wrote it, or a newer one",
        )
    with db:
        db.execute("BEGIN IMMEDIATE")
        version = version_of(db)
        if version == SCHEMA_VERSION:  # another process was faster
            return
        (answer,) = db.execute("PRAGMA integrity_check(1)").fetchone()
        if answer != "ok":
            raise damaged()
        if version == 1:
            _run(db, VERSION_2)
        _seal(db, version)


def version_of(db: sqlite3.Connection) -> int:
    """The file's schema version.

    Raises:
        PolicyError: it cannot be told.
    """
    row = db.execute("SELECT value FROM meta WHERE name = 'schema_version'").fetchone()
    if row is not None and row[0] in _BARE:
        return int(row[0])
    text = read_meta(db, "schema_version")
    if text is None or not text.isdecimal():
        raise damaged()
    return int(text)


def _run(db: sqlite3.Connection, statements: str) -> None:
    for statement in statements.split(";"):
        db.execute(statement)


def _seal(db: sqlite3.Connection, version: int) -> None:
    """Write every row again with its digests; rows keep their places."""
    for name, value in list(db.execute("SELECT name, value FROM meta")):
        put_meta(db, name, value)
    units = [] if version == 1 else list(db.execute("SELECT * FROM unit_shards"))
    db.execute("DROP TABLE IF EXISTS unit_shards")
    _run(db, VERSION_3)
    for shard, *row in units:
        db.execute("INSERT INTO unit_shards VALUES (?, ?)", unit_row(shard, UnitRow(*row)))
    for (rowid,) in _ids(db, "steps"):
        window, shard, trigger, releases, *blobs = _row(db, "steps", rowid)
        some = [] if None in blobs else blobs
        _put(db, "steps", rowid, step_row(window, shard, trigger, releases or b"", some))
    for (rowid,) in _ids(db, "carried"):
        _put(db, "carried", rowid, released_ahead_row(*_row(db, "carried", rowid)))
    before: dict[tuple[int, ...], int] = {}
    for (rowid,) in _ids(db, "snapshots"):
        window, shard, *blobs = _row(db, "snapshots", rowid)
        at = before.get((window, shard), 0)
        _put(db, "snapshots", rowid, snapshot_row(window, shard, at, blobs))
        before[window, shard] = at + arrow.from_bytes(blobs[0]).num_rows
    before = {}
    for (rowid,) in _ids(db, "admissions"):
        shard, trigger_time, ids, records = _row(db, "admissions", rowid)
        at = before.get((shard,), 0)
        _put(db, "admissions", rowid, admission_row(shard, trigger_time, at, ids, records))
        before[shard,] = at + arrow.from_bytes(ids).num_rows
    put_meta(db, "schema_version", str(SCHEMA_VERSION))


def _ids(db: sqlite3.Connection, table: str) -> list[Any]:
    return db.execute(f"SELECT rowid FROM {table} ORDER BY rowid").fetchall()


def _row(db: sqlite3.Connection, table: str, rowid: int) -> Any:
    """A row; each of its blobs is decoded once."""
    row = db.execute(f"SELECT * FROM {table} WHERE rowid = ?", (rowid,)).fetchone()
    for value in row:
        if value and not isinstance(value, int):
            arrow.from_bytes(value)
    return row


def _put(db: sqlite3.Connection, table: str, rowid: int, row: tuple[Any, ...]) -> None:
    """Replace a row in its place."""
    placeholders = ", ".join("?" * len(row))
    names = [name for (_, name, *_) in db.execute(f"PRAGMA table_info({table})")]
    columns = f"rowid, {', '.join(names)}"
    db.execute(f"REPLACE INTO {table} ({columns}) VALUES (?, {placeholders})", (rowid, *row))
