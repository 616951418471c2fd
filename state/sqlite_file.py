"""The embedded store's file: how it is made and opened, its identity, SQLite's errors.

SQLite has no checksums of its own pages.  Content is checked by the digests of the rows, as they
are read; that no row, page or index entry is lost or out of place by ``check_structure``, when the
store is opened (half a second for a GB that is in memory).
"""

import contextlib
import functools
import os
import sqlite3
from pathlib import Path

import msgspec

from accounting.errors import PolicyError, RunError, UsageError
from accounting.limits import BUSY_SECONDS
from state.seals import damaged, reading
from state.sqlite_rows import check_small
from state.sqlite_tables import SCHEMA_VERSION, TABLES, put_meta, read_meta
from state.sqlite_upgrade import upgrade
from state.store import Calibrate, RunIdentity

#: Pages of the write-ahead log before they are moved into the file: each move is two fsyncs.
_CHECKPOINT_PAGES = 8192
#: Rows hold blobs of many kB: larger pages are shorter chains.
_PAGE_BYTES = 8192


def create_store(
    path: str | Path, identity: RunIdentity, calibrate: Calibrate | None = None
) -> RunIdentity:
    """Create the file with its identity, or return the identity of one that exists.

    Args:
        calibrate: its calibration, asked for only if none exists.
    """
    whole: RunIdentity | None = None
    if not store_exists(path):  # what is refused leaves no file behind, and nobody waits
        whole = _calibrated(identity, calibrate)
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
                for statement in TABLES.split(";"):
                    db.execute(statement)
                put_meta(db, "schema_version", str(SCHEMA_VERSION))
                whole = whole or _calibrated(identity, calibrate)
                put_meta(db, "identity", msgspec.json.encode(whole).decode())
        return read_identity(db)
    except sqlite3.Error as error:
        raise failed(error, path) from None
    finally:
        db.close()


def _calibrated(identity: RunIdentity, calibrate: Calibrate | None) -> RunIdentity:
    if calibrate is None:
        return identity
    return msgspec.structs.replace(identity, calibration=calibrate())


def store_exists(path: str | Path) -> bool:
    """Whether the file holds an initialised store."""
    return Path(path).exists() and Path(path).stat().st_size > 0


def read_identity(db: sqlite3.Connection) -> RunIdentity:
    """The identity row of a store; one of an older schema version is upgraded first.

    Raises:
        PolicyError: damaged, not a store, or one of a newer version of the program.
        RunError: it cannot be read or upgraded; it is then as it was.
    """
    try:
        known = {n for (n,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if not known & {"meta", "steps", "admissions"}:
            raise PolicyError(
                "state.store", "the file is not a dpstream store", "choose another path"
            )
        upgrade(db)
        text = read_meta(db, "identity")
    except (sqlite3.Error, UnicodeError) as error:
        raise failed(error) from None
    with reading():
        return msgspec.json.decode(text or "", type=RunIdentity)


def check_structure(db: sqlite3.Connection) -> None:
    """Check that tables, pages, indexes and the small rows are as they were written.

    Raises:
        PolicyError: they are not.
    """
    try:
        (answer,) = db.execute("PRAGMA integrity_check(1)").fetchone()
        if answer != "ok" or dict(db.execute(_SCHEMA)) != _schema():
            raise damaged()
        check_small(db)
    except (sqlite3.Error, UnicodeError) as error:
        raise failed(error) from None


_SCHEMA = "SELECT name, sql FROM sqlite_master"


@functools.cache
def _schema() -> dict[str, str | None]:
    """Name and text of every table and index as a new store has them."""
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        db.executescript(TABLES)
        return dict(db.execute(_SCHEMA))


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
        raise failed(error, path) from None
    try:
        wary(db)
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
        raise failed(error, path) from None
    except RunError:
        db.close()
        raise
    return db


def wary(db: sqlite3.Connection) -> None:
    """Let a connection expect damage."""
    # A text that damage made no text any more is read as one that its digest does not fit.
    db.text_factory = functools.partial(str, encoding="utf-8", errors="surrogateescape")
    db.execute("PRAGMA cell_size_check = ON")


#: What SQLite says of bytes that it cannot have written; ``SQLITE_ERROR``: of a table or a column
#: that is not there, or of a header that it does not know.
DAMAGE = ("SQLITE_CORRUPT", "SQLITE_ERROR", "SQLITE_FORMAT", "SQLITE_MISMATCH")


def failed(
    error: sqlite3.Error | OSError | UnicodeError, path: str | Path | None = None
) -> RunError | UsageError | PolicyError:
    """SQLite's error by its public code; its text can hold a path or a value.

    Args:
        path: of the file that was to be opened.
    """
    code = getattr(error, "sqlite_errorname", None) or type(error).__name__
    if code == "SQLITE_NOTADB":
        fix = damaged().fix
        return PolicyError("state.store", "is damaged, or no store", f"{fix}; or check the path")
    if isinstance(error, OSError) or code.startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY")):
        if path is not None and _read_only(Path(path)):
            return UsageError(
                "state.store",
                "is read-only here: the disk, the folder or the file may not be written",
                "make all three writable; also who only looks at the store takes its lock",
            )
        if not code.startswith("SQLITE_READONLY"):
            return UsageError("state.store", f"cannot be opened ({code})", "check the path")
        fix = "check disk and rights; if both are right its header is damaged: restore a backup"
        return RunError("state.store", f"the database refused ({code})", fix)
    # A name of a column that is no text any more.
    if isinstance(error, UnicodeError) or code.startswith(DAMAGE):
        return damaged()
    return RunError("state.store", f"the database refused ({code})", "check disk and rights")


def _read_only(path: Path) -> bool:
    """Whether the file, or one beside it, cannot be written."""
    there = [name for name in (path.parent, path) if name.exists()]
    return not path.is_dir() and not all(os.access(name, os.W_OK) for name in there)
