"""An account's SQLite file: how it is made, opened and read, and what its errors mean."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dpstream.accounting.errors import PolicyError, RunError, UsageError
from dpstream.state.durable import PRIVATE, make_folder, sync
from dpstream.state.ledger.events import Created, Entry, chained, event_of, name_of, text_of
from dpstream.state.ledger.seal import (
    COLUMNS,
    Sums,
    check_pages,
    damaged,
    put_seal,
    read_seal,
    rows_of,
    sum_of,
)
from dpstream.state.sqlite.database import Subject, freeze, memory, open_file, refused, sqlite3

#: A program refuses every other version.
SCHEMA_VERSION = 1
_DDL = """
CREATE TABLE entries (
  seq INTEGER PRIMARY KEY, name TEXT UNIQUE, entry TEXT NOT NULL, digest TEXT NOT NULL);
CREATE TABLE tokens (
  run_id TEXT NOT NULL, token TEXT NOT NULL, previous TEXT, PRIMARY KEY (run_id, token));
CREATE TABLE requests (
  run_id TEXT PRIMARY KEY, request TEXT NOT NULL, granted BLOB NOT NULL, receipt BLOB,
  digest TEXT, view BLOB, view_digest TEXT);
CREATE INDEX requests_by_request ON requests (request);
CREATE TABLE account_meta (name TEXT PRIMARY KEY, value TEXT NOT NULL)
"""
#: Before every entry, whatever its number.
START = -(2**63)


class Line(NamedTuple):
    """A row of the entries whose place in the chain was checked."""

    entry: Entry
    row: tuple[object, ...]


def lines(db: sqlite3.Connection, after: int = START, previous: str = "") -> Iterator[Line]:
    """Yield the entries after the one with a number and a digest, and check the chain.

    Raises:
        PolicyError: the chain is broken, or this program does not know an entry's form.
    """
    query = f"SELECT {COLUMNS['entries']} FROM entries WHERE seq > ? ORDER BY seq"
    for row in db.execute(query, (after,)):
        seq, name, text, digest = row
        # Damage can make a text a blob.
        if not isinstance(text, str) or digest != chained(previous, text):
            raise PolicyError(
                "account.path", "its hash chain is broken", "restore the account from a backup"
            )
        event = event_of(text)
        if name != name_of(event):
            raise damaged()
        previous = digest
        yield Line(Entry(seq, event, digest), row)


def check_all(db: sqlite3.Connection) -> tuple[list[Line], Sums]:
    """Check every row of an account; return its entries and sums.

    Raises:
        PolicyError: the account differs from what was written.
    """
    entries = list(lines(db))
    sums = {table: sum_of(table, rows_of(db, table)) for table in COLUMNS if table != "entries"}
    sums["entries"] = sum_of("entries", (line.row for line in entries))
    if sums != read_seal(db):
        raise damaged()
    return entries, sums


def create(path: str | Path, created: Created) -> None:
    """Make the file of an account, which appears complete or is refused when it is opened.

    Raises:
        UsageError: the file exists already, or cannot be made.
        RunError: the disk fails.
    """
    path = Path(path)
    try:
        make_folder(path.parent, PRIVATE)
        if path.exists() and path.stat().st_size:
            raise there_already()
        with contextlib.closing(open_file(path, create=True)) as db, db:
            db.execute("BEGIN IMMEDIATE")
            if db.execute("SELECT count(*) FROM sqlite_master").fetchone() != (0,):
                raise there_already()
            for statement in _DDL.split(";"):
                db.execute(statement)
            db.execute("INSERT INTO account_meta VALUES ('version', ?)", (str(SCHEMA_VERSION),))
            text = text_of(created)
            row = (1, None, text, chained("", text))
            db.execute("INSERT INTO entries VALUES (?, ?, ?, ?)", row)
            put_seal(db)
        sync(path.absolute().parent)
    except (sqlite3.Error, OSError) as error:
        raise failed(error, path) from None


def is_filled(path: Path) -> bool:
    """Return whether a file exists that is more than the remains of an interrupted creation."""
    if not path.exists():
        return False
    with contextlib.suppress(sqlite3.Error, OSError):  # whoever opens it says what it is
        with contextlib.closing(open_file(path)) as db:
            tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        return bool(tables != (0,))
    return True


def absent() -> UsageError:
    """Return the error for an account that does not exist, in a command that makes none."""
    return UsageError(
        "account.path",
        "no account is there",
        "bring it back, or make one with `dpstream account create` and name its id",
    )


def there_already() -> UsageError:
    """Return the error for an account that would replace another file."""
    return UsageError("account.path", "is there already", "choose another path for a new account")


def connect(path: str | Path) -> sqlite3.Connection:
    """Open the file of an existing account, for durable changes.

    Raises:
        sqlite3.Error, OSError: it cannot be opened; see ``failed``.
        PolicyError: it is damaged, another program's, or of another version.
    """
    db = open_file(path)
    try:
        check_pages(db)
        check_version(db)
    except BaseException:
        db.close()
        raise
    return db


def looked_at(path: str | Path) -> sqlite3.Connection:
    """Return a read-only copy in memory, for plans.

    Raises:
        As `connect`.
    """
    db = memory()
    try:
        db.isolation_level = None
        with contextlib.closing(open_file(path)) as file:
            db.text_factory = file.text_factory
            file.backup(db)
        check_pages(db)
        check_version(db)
        freeze(db)
    except BaseException:
        db.close()
        raise
    return db


def read_entries(path: str | Path) -> list[Entry]:
    """Return every entry of an account's file in order, after a check of every row; writes nothing.

    Raises:
        UsageError, PolicyError, RunError: it is not an account, a broken one, or cannot be read.
    """
    try:
        with contextlib.closing(open_file(path)) as db:
            db.execute("BEGIN")  # one state of it
            check_pages(db)
            check_version(db)
            return [line.entry for line in check_all(db)[0]]
    except (sqlite3.Error, OSError, UnicodeError) as error:
        raise failed(error, path) from None


def check_version(db: sqlite3.Connection) -> None:
    """Refuse a file that is not an account of this version.

    Raises:
        PolicyError: it is empty, another program's, or of another version.
    """
    tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
    if not tables:
        raise PolicyError("account.path", "is an empty file", "name the account's file")
    if "ledger_meta" in tables and "entries" in tables:
        raise PolicyError(
            "account.path",
            "was written by an older program, whose accounts are not read any more",
            "make a new account with `dpstream account create`",
        )
    if not {"account_meta", "entries"} <= tables:
        raise PolicyError(
            "account.path", "the file is another program's database", "choose another path"
        )
    row = db.execute("SELECT value FROM account_meta WHERE name = 'version'").fetchone()
    if row != (str(SCHEMA_VERSION),):
        raise other_version()


def other_version() -> PolicyError:
    """Return the error for the account of another version of the program."""
    return PolicyError(
        "account.path",
        f"its version is not {SCHEMA_VERSION}, the one of this program",
        "use the program that wrote it",
    )


_ACCOUNT = Subject("account.path", "account", damaged)


def failed(error: Exception, path: str | Path | None = None) -> RunError | UsageError | PolicyError:
    """Return the coded error for SQLite's, or the system's, error on an account.

    See ``refused``.
    """
    return refused(_ACCOUNT, error, path)
