"""A ledger's SQLite file: opened, upgraded and read, and what its errors mean."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dpstream.accounting.errors import PolicyError, RunError, UsageError
from dpstream.state.durable import PRIVATE, make_folder
from dpstream.state.ledger.charges import Charge, Entry, chained
from dpstream.state.ledger.seal import (
    COLUMNS,
    Sums,
    check_old_seal,
    check_pages,
    damaged,
    put_seal,
    read_seal,
    rows_of,
    sum_of,
)
from dpstream.state.sqlite.database import Subject, freeze, memory, open_file, refused, sqlite3

#: 2: kinds, epochs and tokens; 3: identities of units, a seal; 4: charges of zCDP, answers of any
#: kind, a seal of sums.  A program refuses what is newer than itself.
SCHEMA_VERSION = 4
_DDL = """
CREATE TABLE IF NOT EXISTS entries (
  seq INTEGER PRIMARY KEY, data_set TEXT NOT NULL, run_id TEXT NOT NULL,
  entry TEXT NOT NULL, digest TEXT NOT NULL, UNIQUE (data_set, run_id));
CREATE TABLE IF NOT EXISTS tokens (
  run_id TEXT NOT NULL, token TEXT NOT NULL, previous TEXT, PRIMARY KEY (run_id, token));
CREATE TABLE IF NOT EXISTS choices (
  run_id TEXT PRIMARY KEY, data_set TEXT NOT NULL, request TEXT NOT NULL,
  receipt TEXT, digest TEXT);
CREATE INDEX IF NOT EXISTS choices_by_request ON choices (data_set, request);
CREATE TABLE IF NOT EXISTS ledger_meta (name TEXT PRIMARY KEY, value TEXT NOT NULL)
"""
#: Before every entry, whatever its number.
START = -(2**63)


class Line(NamedTuple):
    """A row of the entries whose place in the chain was checked."""

    entry: Entry
    digest: str
    row: tuple[object, ...]


def lines(db: sqlite3.Connection, after: int = START, previous: str = "") -> Iterator[Line]:
    """The entries behind one of a number and a digest, the chain checked.

    Raises:
        PolicyError: the chain does not hold, or this program does not know an entry's form.
    """
    query = f"SELECT {COLUMNS['entries']} FROM entries WHERE seq > ? ORDER BY seq"
    for row in db.execute(query, (after,)):
        seq, data_set, _, text, digest = row
        # Damage can make a text a blob.
        texts = isinstance(data_set, str) and isinstance(text, str)
        if not texts or digest != chained(previous, data_set, text):
            raise PolicyError(
                "ledger.path", "its hash chain is broken", "restore the ledger from a backup"
            )
        previous = digest
        yield Line(Entry(seq, data_set, Charge.read(text), digest), digest, row)


def check_all(db: sqlite3.Connection) -> tuple[list[Line], Sums]:
    """Check every row of a ledger of this version; its entries and sums.

    Raises:
        PolicyError: the ledger is not what was written.
    """
    found = list(lines(db))
    sums = {table: sum_of(table, rows_of(db, table)) for table in COLUMNS if table != "entries"}
    sums["entries"] = sum_of("entries", (line.row for line in found))
    if sums != read_seal(db):
        raise damaged()
    return found, sums


def connect(path: str | Path) -> sqlite3.Connection:
    """The file, which is made if it is not there, for durable changes.

    Raises:
        sqlite3.Error, OSError: it cannot be opened; see ``failed``.
        PolicyError: it is damaged, another program's or of a newer version.
    """
    make_folder(Path(path).parent, PRIVATE)
    db = open_file(path, create=True)
    try:
        check_pages(db)
        if version_of(db) != SCHEMA_VERSION:
            _upgrade(db)
    except BaseException:
        db.close()
        raise
    return db


def looked_at(path: str | Path) -> sqlite3.Connection:
    """A copy in memory that takes no change, for whoever only plans; empty if there is no file.

    Raises:
        As `connect`.
    """
    db = memory()
    try:
        db.isolation_level = None
        if Path(path).exists():
            with contextlib.closing(open_file(path)) as file:
                db.text_factory = file.text_factory
                file.backup(db)
        check_pages(db)
        if version_of(db) != SCHEMA_VERSION:
            _upgrade(db)
        freeze(db)
    except BaseException:
        db.close()
        raise
    return db


def _upgrade(db: sqlite3.Connection) -> None:
    """Create what is missing; entries and their digests, requests and receipts stay as they are."""
    with db:
        db.execute("BEGIN IMMEDIATE")
        version = version_of(db)
        if version == SCHEMA_VERSION:
            return
        if version:
            _check_old(db, version)
        for statement in _DDL.split(";"):
            db.execute(statement)
        row = ("schema_version", str(SCHEMA_VERSION))
        db.execute("INSERT OR REPLACE INTO ledger_meta VALUES (?, ?)", row)
        put_seal(db)


def _check_old(db: sqlite3.Connection, version: int) -> list[Line]:
    found = list(lines(db))
    if version == 3:
        check_old_seal(db)
    return found


def read_ledger(path: str | Path) -> list[Entry]:
    """Every entry of a ledger's file in order, after a check of every row; writes nothing.

    A file without tables is a ledger whose making was cut off: nothing was charged in it.

    Raises:
        UsageError, PolicyError, RunError: it is no ledger, a broken one, or cannot be read.
    """
    try:
        with contextlib.closing(open_file(path)) as db:
            db.execute("BEGIN")  # one state of it
            check_pages(db)
            version = version_of(db)
            if version == 0:
                return []
            new = version == SCHEMA_VERSION
            return [line.entry for line in (check_all(db)[0] if new else _check_old(db, version))]
    except (sqlite3.Error, OSError, UnicodeError) as error:
        raise failed(error, path) from None


def version_of(db: sqlite3.Connection) -> int:
    """Schema version of the file, 1 before it was recorded, 0 if it is empty.

    Raises:
        PolicyError: it is another program's, or of a newer version.
    """
    tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
    if tables and "entries" not in tables:
        raise PolicyError(
            "ledger.path", "the file is another program's database", "choose another path"
        )
    if "ledger_meta" not in tables:
        return 1 if tables else 0
    row = db.execute("SELECT value FROM ledger_meta WHERE name = 'schema_version'").fetchone()
    version = int(row[0]) if row and row[0].isdecimal() else SCHEMA_VERSION + 1
    if version > SCHEMA_VERSION:
        raise PolicyError(
            "ledger.path",
            f"its schema version is beyond {SCHEMA_VERSION}, the one of this program",
            "use the newer program that wrote it",
        )
    return version


_LEDGER = Subject("ledger.path", "ledger", damaged)


def failed(error: Exception, path: str | Path | None = None) -> RunError | UsageError | PolicyError:
    """SQLite's error, or the system's, of a ledger; see ``refused``."""
    return refused(_LEDGER, error, path)
