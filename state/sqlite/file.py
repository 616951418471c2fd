"""The embedded store's file: its tables, how it is made and opened, its identity and notes.

SQLite has no checksums of its own pages.  Content is checked by the digests of the rows, as they
are read; that no row, page or index entry is lost or out of place by ``check_structure``, when the
store is opened (half a second for a GB that is in memory).

Rows of ``meta`` say the number of the format and the identity; the others are notes, small public
texts that are changed by comparison.
"""

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path

import msgspec

from dpstream.accounting.errors import PolicyError, RunError, UsageError
from dpstream.state.durable import PRIVATE, make_folder
from dpstream.state.seals import (
    damaged,
    other_format,
    reading,
    refuse_damage,
    sealed_text,
    unsealed_text,
)
from dpstream.state.sqlite.database import (
    Subject,
    check_pages,
    memory,
    open_file,
    refused,
    sqlite3,
)
from dpstream.state.sqlite.rows import check_small, meta_name
from dpstream.state.store import Calibrate, RunIdentity

FORMAT = "2"
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
#: Seconds to wait for a commit that is under way.
_PATIENCE = 5.0


def check_format(db: sqlite3.Connection) -> None:
    """Refuse a store that this program does not read.

    Raises:
        PolicyError: of another program version, or damaged.
    """
    number = read_meta(db, "format")
    if number != FORMAT:
        raise damaged() if number is None else other_format(FORMAT)


def put_meta(db: sqlite3.Connection, name: str, value: str) -> None:
    """Write a row of ``meta`` with its digest, as a part of the caller's transaction."""
    row = (name, sealed_text(meta_name(name), value))
    db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", row)


def read_meta(db: sqlite3.Connection, name: str) -> str | None:
    """Return the checked value of a row of ``meta``, ``None`` if there is none."""
    row = db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
    return None if row is None else unsealed_text(meta_name(name), row[0])


def create_store(
    path: str | Path, identity: RunIdentity, calibrate: Calibrate | None = None
) -> RunIdentity:
    """Create the file with its identity, or return the identity of one that exists.

    Args:
        calibrate: makes the run's calibration; called only if none is stored.
    """
    run_identity: RunIdentity | None = None
    if not store_exists(path):  # what is refused leaves no file behind, and nobody waits
        run_identity = _calibrated(identity, calibrate)
    make_folder(Path(path).parent, PRIVATE)
    with contextlib.closing(connect(path)) as db, coded_errors(path):
        with db:
            db.execute("BEGIN IMMEDIATE")
            if not _own_tables(db):
                for statement in TABLES.split(";"):
                    db.execute(statement)
                put_meta(db, "format", FORMAT)
                run_identity = run_identity or _calibrated(identity, calibrate)
                put_meta(db, "identity", msgspec.json.encode(run_identity).decode())
        return read_identity(db)


def _own_tables(db: sqlite3.Connection) -> set[str]:
    """Names of the tables of a store; none of a file that no run was begun on.

    Raises:
        PolicyError: the file is another program's.
    """
    tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
    if tables and "meta" not in tables:
        raise PolicyError("store", "the file is another program's database", "choose another path")
    return tables


def _calibrated(identity: RunIdentity, calibrate: Calibrate | None) -> RunIdentity:
    if calibrate is None:
        return identity
    return msgspec.structs.replace(identity, calibration=calibrate())


def store_exists(path: str | Path) -> bool:
    """Return whether a run was begun on the file, or another object is there.

    A begin that is cut off leaves a file without tables.
    """
    if not Path(path).exists():
        return False
    try:
        with contextlib.closing(open_file(path, wait=0)) as db:
            return db.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is not None
    except (sqlite3.Error, OSError):  # damaged, in use or no database: whoever opens it says which
        return True


def peek_identity(path: str | Path) -> RunIdentity | None:
    """Return the identity of a store, which is not changed; ``None`` if no run was begun.

    Raises:
        PolicyError: damaged, no store, or of another format; RunError: it cannot be read.
    """
    with _read_only(path) as db:
        return None if db is None else _identity_of(db)


def peek_note(path: str | Path, name: str) -> str | None:
    """Return a note of a store (`metadata`), which is not changed; ``None`` if no run was begun.

    Raises:
        PolicyError: damaged, or of another format; RunError: it cannot be read.
    """
    with _read_only(path) as db:
        return None if db is None else read_meta(db, NOTE + name)


@contextlib.contextmanager
def _read_only(path: str | Path) -> Iterator[sqlite3.Connection | None]:
    """Yield a short connection to a store of this format, as it is; ``None``: no run was begun."""
    if not store_exists(path):
        yield None
        return
    errors = coded_errors(path, OSError, UnicodeError)
    with errors, contextlib.closing(open_file(path, wait=_PATIENCE)) as db:
        begun = _own_tables(db)  # none: another process is making it
        if begun:
            check_format(db)
        yield db if begun else None


def read_identity(db: sqlite3.Connection) -> RunIdentity:
    """Return the identity row of a store.

    Raises:
        PolicyError: damaged, not a store, or one of another format.
        RunError: it cannot be read.
    """
    with coded_errors(db, UnicodeError):
        tables = {n for (n,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if not tables & {"meta", "steps", "admissions"}:
            raise PolicyError("store", "the file is not a dpstream store", "choose another path")
        check_format(db)
        return _identity_of(db)


def _identity_of(db: sqlite3.Connection) -> RunIdentity:
    text = read_meta(db, "identity")
    with reading():
        return msgspec.json.decode(text or "", type=RunIdentity)


def check_structure(db: sqlite3.Connection) -> None:
    """Check that tables, pages, indexes and the small rows are as they were written.

    Raises:
        PolicyError: they are not.
    """
    with coded_errors(db, UnicodeError):
        check_pages(db)
        # Others may be there: an operator's ANALYZE makes tables of its own.
        schema = dict(db.execute(_SCHEMA))
        refuse_damage(not _schema().items() <= schema.items())
        check_small(db)


_SCHEMA = "SELECT name, sql FROM sqlite_master"


@functools.cache
def _schema() -> dict[str, str | None]:
    """Name and text of every table and index as a new store has them."""
    with contextlib.closing(memory()) as db:
        db.executescript(TABLES)
        return dict(db.execute(_SCHEMA))


def connect(path: str | Path) -> sqlite3.Connection:
    """Open a store's file for durable commits; it is made, for its owner only, if it is absent.

    Raises:
        UsageError, PolicyError, RunError: it cannot be opened, or is damaged.
    """
    with coded_errors(path, OSError):
        return open_file(path, create=True, log=True)


@contextlib.contextmanager
def exclusive(
    path: str | Path, damaged: bool = False, patience: float | None = None
) -> Iterator[sqlite3.Connection]:
    """Hold a store's file against everyone else; its write-ahead log is merged into it.

    Args:
        damaged: hold also what can no longer be read, as far as it can be held.
        patience: seconds to wait for a commit that is under way.

    Raises:
        InUseError: another process has it open.
    """
    wait = _PATIENCE if patience is None else patience
    try:
        db = open_file(path, alone=True, damaged=damaged, wait=wait)
    except BlockingIOError:
        raise in_use() from None
    except (sqlite3.Error, OSError) as error:
        raise failed(error, path) from None
    try:
        try:
            db.execute("PRAGMA journal_size_limit = 0")  # a journal that is kept is empty
            # Works only for the one connection there is, and then nobody else gets in.
            db.execute("PRAGMA locking_mode = EXCLUSIVE")
            db.execute("PRAGMA journal_mode = DELETE")
            db.execute("BEGIN EXCLUSIVE")
            db.execute("COMMIT")  # the lock stays until the connection is closed
        except sqlite3.DatabaseError as error:
            code = getattr(error, "sqlite_errorname", "")
            if code.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
                raise in_use() from None
            if not damaged:
                raise failed(error, path) from None
        yield db
    finally:
        db.close()


class InUseError(RunError):
    """Signals that another process has a store open that is needed alone."""


def in_use() -> InUseError:
    """Return the error for an action that a run with the open store prevents."""
    return InUseError("store", "a run has it open", "stop the run, or wait for its end")


_STORE = Subject("store", "store", damaged)


def failed(
    error: Exception, at: str | Path | sqlite3.Connection
) -> RunError | UsageError | PolicyError:
    """Return the coded error for SQLite's error, or the system's, on a store; see ``refused``."""
    return refused(_STORE, error, at)


@contextlib.contextmanager
def coded_errors(at: str | Path | sqlite3.Connection, *others: type[Exception]) -> Iterator[None]:
    """Replace SQLite's errors in the block, and errors of some other kinds, by coded ones.

    Args:
        at: the store's file, or a connection to it.
    """
    kinds: tuple[type[Exception], ...] = (sqlite3.Error, *others)
    try:
        yield
    except kinds as error:
        raise failed(error, at) from None


@contextlib.contextmanager
def changing(db: sqlite3.Connection) -> Iterator[None]:
    """Run the block as one transaction that waits for its turn and is durable at the end.

    SQLite's errors become coded ones, and any error rolls the transaction back.
    """
    with coded_errors(db), db:
        db.execute("BEGIN IMMEDIATE")
        yield


def read_metadata(db: sqlite3.Connection, name: str) -> str | None:
    """Return a note of a store, ``None`` if there is none."""
    with coded_errors(db):
        return read_meta(db, NOTE + name)


def swap_metadata(db: sqlite3.Connection, name: str, old: str | None, new: str | None) -> bool:
    """Replace a note durably if it is still ``old``; return whether it was.

    ``None`` stands for no note.
    """
    with changing(db):
        if read_meta(db, NOTE + name) != old:
            return False
        if new is None:
            db.execute("DELETE FROM meta WHERE name = ?", (NOTE + name,))
        else:
            put_meta(db, NOTE + name, new)
        return True
