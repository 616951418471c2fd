"""The embedded store's file: its tables, how it is made and opened, its identity and notes.

SQLite has no checksums of its own pages.  Content is checked by the digests of the rows, as they
are read; that no row, page or index entry is lost or out of place by ``check_structure``, when the
store is opened (half a second for a GB that is in memory).

Rows of ``meta`` say the number of the format and the identity; the others are notes, small public
texts that are changed by comparison.

**Rows** are sealed as they are written, and checked as they are read.  The name under which a blob
is sealed says its table and column, the row's own numbers, and where rows are read in order how
many keys or units stand before it, so that a row too few is noticed.

A step that selected keys, which later windows remember, has a row of them, written in its own
transaction.
"""

import contextlib
import functools
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa

from dpstream.accounting.errors import PolicyError, RunError, UsageError
from dpstream.state import arrow
from dpstream.state.durable import PRIVATE, make_folder
from dpstream.state.retention_store import Selection
from dpstream.state.seals import (
    damaged,
    other_format,
    reading,
    refuse_damage,
    sealed,
    sealed_text,
    unsealed,
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


#: Stands for releases that were dropped.
NO_RELEASES = b""
_BLOBS = ("keys", "states", "pairs")
_UNIT_ROW = struct.Struct("<3q")


class StepRow(NamedTuple):
    """A row of ``steps``; its blobs are those of ``step_row``."""

    window: int
    shard: int
    trigger: int
    releases: bytes
    keys: bytes | None = None
    states: bytes | None = None
    pairs: bytes | None = None


class UnitRow(NamedTuple):
    """A row of ``unit_shards``: what is known of a unit shard beside its log.

    Attributes:
        forgotten, reach: see ``retention_store.UnitProgress``.
        generation: changes when the slots of the units do.
    """

    forgotten: int = 0
    reach: int = 0
    generation: int = 0


# --- writing ---


def step_row(
    window: int, shard: int, trigger: int, releases: bytes, blobs: Iterable[bytes] = ()
) -> StepRow:
    """Return the row of a step, sealed.

    Args:
        releases: Arrow bytes of the outbox.
        blobs: new keys, changed states and new pairs, or ``arrow.COME_LATER``; none where the
            window closes.
    """
    row = (window, shard, trigger)
    return StepRow(*row, sealed(_name("steps", row, "releases"), releases), *_three(row, blobs))


def _three(row: tuple[int, ...], blobs: Iterable[bytes], table: str = "steps") -> Iterator[bytes]:
    for column, blob in zip(_BLOBS, blobs, strict=False):
        yield sealed(_name(table, row, column), blob)


def snapshot_row(window: int, shard: int, before: int, blobs: Iterable[bytes]) -> tuple[Any, ...]:
    """Return the row of a piece of a snapshot that has ``before`` keys before it, sealed."""
    return (window, shard, *_three((window, shard, before), blobs, "snapshots"))


def released_ahead_row(window: int, shard: int, trigger: int, releases: bytes) -> tuple[Any, ...]:
    """Return the row of releases of a step that a shard was ahead with at a reshard, sealed."""
    row = (window, shard, trigger)
    return (*row, sealed(_name("carried", row, "releases"), releases))


def admission_row(
    shard: int, trigger_time: int, before: int, units: bytes, records: bytes
) -> tuple[Any, ...]:
    """Return the row of a commit of decisions, or of a piece of them, sealed.

    Args:
        before: units that the shard's log names before this row.
        units, records: blobs of new units and of admitted records (``state.arrow``).
    """
    row = (shard, trigger_time, before)
    blobs = {"units": units, "records": records}
    return (
        shard,
        trigger_time,
        *(sealed(_name("admissions", row, c), b) for c, b in blobs.items()),
    )


def unit_row(shard: int, row: UnitRow) -> tuple[int, bytes]:
    """Return the row of ``unit_shards`` of a shard, sealed."""
    return shard, sealed(_name("unit_shards", (shard,), "progress"), _UNIT_ROW.pack(*row))


def meta_name(name: str) -> str:
    """Return the name under which the value of a row of ``meta`` is sealed."""
    return f"meta/{name}/value"


def _name(table: str, row: tuple[int, ...], column: str) -> str:
    return f"{table}/{'/'.join(map(str, row))}/{column}"


# --- reading; all raise PolicyError where a blob is not what was written ---


def releases_of(
    window: int, shard: int, trigger: int, blob: object, table: str = "steps"
) -> pa.RecordBatch | None:
    """Return the releases of a step, ``None`` if they were dropped."""
    data = unsealed(_name(table, (window, shard, trigger), "releases"), blob)
    return arrow.from_bytes(data) if len(data) else None


def step_blobs(
    row: tuple[int, ...], blobs: Iterable[object], table: str = "steps"
) -> tuple[arrow.Checked, arrow.Checked, arrow.Checked] | None:
    """Return (new keys, changed states, new pairs) of a step or a piece; ``None``: it has none."""
    three = list(blobs)
    if three == [None, None, None]:
        return None
    contents = [unsealed(_name(table, row, c), b) for c, b in zip(_BLOBS, three, strict=True)]
    return contents[0], contents[1], contents[2]


def admissions_of(shard: int, rows: Iterable[tuple[int, Any, Any]]) -> list[arrow.AdmissionRow]:
    """Return the log of a unit shard, checked, from its first row on."""
    admissions, before = [], 0
    for trigger_time, units, records in rows:
        row = (shard, trigger_time, before)
        batch = arrow.from_bytes(unsealed(_name("admissions", row, "units"), units))
        data = unsealed(_name("admissions", row, "records"), records)
        admissions.append(arrow.AdmissionRow(trigger_time, batch, data))
        before += batch.num_rows
    return admissions


def unit_row_of(shard: int, blob: object) -> UnitRow:
    """Return the content of a row of ``unit_shards``."""
    data = unsealed(_name("unit_shards", (shard,), "progress"), blob)
    refuse_damage(len(data) != _UNIT_ROW.size)
    return UnitRow(*_UNIT_ROW.unpack(data))


def selection_of(shard: int, trigger_time: int, window: int, blob: object) -> Selection:
    """Return the content of a row of ``selections``."""
    name = _name("selections", (shard, trigger_time, window), "keys")
    return Selection(trigger_time, window, arrow.from_bytes(unsealed(name, blob)))


def check_small(db: Any) -> None:
    """Check the rows that are few, also for one that is read under another's name."""
    for name, value in db.execute("SELECT name, value FROM meta"):
        unsealed_text(meta_name(name), value)
    for shard, blob in db.execute("SELECT shard, progress FROM unit_shards"):
        unit_row_of(shard, blob)


def check_all(db: Any) -> None:
    """Check every row of a store against its digest and its place.

    Raises:
        PolicyError: a row is not what was written.
    """
    check_small(db)
    for window, shard, trigger, releases, *blobs in db.execute("SELECT * FROM steps"):
        releases_of(window, shard, trigger, releases)
        step_blobs((window, shard, trigger), blobs)
    for window, shard, trigger, releases in db.execute("SELECT * FROM carried"):
        releases_of(window, shard, trigger, releases, "carried")
    at, before = (-1, -1), 0
    for window, shard, *blobs in db.execute(
        "SELECT * FROM snapshots ORDER BY window, shard, rowid"
    ):
        at, before = (window, shard), 0 if at != (window, shard) else before
        keys = step_blobs((window, shard, before), blobs, "snapshots")
        if keys is None:
            raise damaged()
        before += arrow.from_bytes(keys[0]).num_rows
    for (shard,) in list(db.execute("SELECT DISTINCT shard FROM admissions")):
        rows = "SELECT cut, units, records FROM admissions WHERE shard = ? ORDER BY rowid"
        admissions_of(shard, db.execute(rows, (shard,)))
    for row in db.execute("SELECT shard, trigger_time, window, keys FROM selections"):
        selection_of(*row)


def add_selection(db: sqlite3.Connection, shard: int, selection: Selection) -> None:
    """Write what a step of a shard selected, as a part of the caller's transaction."""
    row = (shard, selection.trigger_time, selection.window)
    blob = sealed(_name("selections", row, "keys"), arrow.to_bytes(selection.keys))
    db.execute("INSERT INTO selections VALUES (?, ?, ?, ?)", (*row, blob))


def read_selections(
    db: sqlite3.Connection, shard: int, after: int, upto: int | None
) -> Iterator[Selection]:
    """Yield the selections of a shard's steps after a trigger time and up to another, in order."""
    last = (1 << 62) if upto is None else upto
    rows = (
        "SELECT trigger_time, window, keys FROM selections"
        " WHERE shard = ? AND trigger_time > ? AND trigger_time <= ?"
        " ORDER BY trigger_time, window, rowid"
    )
    for trigger_time, window, blob in db.execute(rows, (shard, after, last)).fetchall():
        yield selection_of(shard, trigger_time, window, blob)
