"""SQLite for every file of the program: the library, connections, durability, errors.

No other module opens a file of SQLite or sets what its durability depends on.

**The library.**  SQLite before 3.51.3 (3.50.7, 3.44.6) can damage a file in WAL mode that several
connections write (https://sqlite.org/wal.html#walresetbug), and Python comes with whatever the
machine has.  The package ``pysqlite3`` has a newer SQLite under the interface of ``sqlite3``; where
it has no wheel, the machine's is used.

**Durability.**  A file in WAL mode syncs its log at each commit (``FULL``).  With a library that
has the bug, no file is in WAL mode.  A file with a rollback journal also syncs its folder after the
journal is gone (``EXTRA``): otherwise a power loss brings the journal back, and the next reader
rolls a commit back that was reported.

**Reading.**  A process that is killed in a commit leaves a journal, which the next connection rolls
back.  A connection that may not write cannot, so every connection may.
"""

import contextlib
import errno
import fcntl
import functools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from dpstream.accounting.errors import PolicyError, RunError, UsageError
from dpstream.accounting.limits import BUSY_SECONDS
from dpstream.state import disk_errors
from dpstream.state.durable import LOCK, SIDES

if TYPE_CHECKING:
    import sqlite3
else:
    try:
        from pysqlite3 import dbapi2 as sqlite3
    except ImportError:
        import sqlite3

__all__ = [
    "FileConnection",
    "Subject",
    "check_pages",
    "memory",
    "open_file",
    "refused",
    "sqlite3",
    "unjournaled",
    "wal_is_safe",
]

#: Pages of the write-ahead log before they are moved into the file: each move is two fsyncs.
_CHECKPOINT_PAGES = 8192
#: Rows hold blobs of many kB: larger pages are shorter chains.
_PAGE_BYTES = 8192
#: What SQLite says of bytes that it cannot have written; ``SQLITE_ERROR``: of a table or a column
#: that is not there, or of a header that it does not know.
_DAMAGE = ("SQLITE_CORRUPT", "SQLITE_ERROR", "SQLITE_FORMAT", "SQLITE_MISMATCH")
#: Of these, what it also says where a read failed.
_UNREAD = ("SQLITE_CORRUPT", "SQLITE_NOTADB")

#: What it says of locks that others have.
_BUSY = ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_PROTOCOL")


def wal_is_safe(version: tuple[int, ...] = sqlite3.sqlite_version_info) -> bool:
    """Return whether several connections may write a file in WAL mode with a version of SQLite."""
    return version >= (3, 51, 3) or any(
        version[:2] == fixed[:2] and version >= fixed for fixed in ((3, 50, 7), (3, 44, 6))
    )


def open_file(
    path: str | Path,
    *,
    create: bool = False,
    log: bool = False,
    alone: bool = False,
    damaged: bool = False,
    wait: float | None = None,
) -> sqlite3.Connection:
    """Return a connection with durable commits, in autocommit mode, for any thread.

    Where the file system has no locks, nobody waits for them: see ``refused``.

    Args:
        create: make the file if it is not there, for its owner only.
        log: of a file that one process writes while others read: in WAL mode where that is safe.
        alone: no other connection with ``log`` is open, or may be opened.
        damaged: open also what can no longer be read: nothing may be written then.
        wait: seconds to wait for the locks of others, if not as long as usual.

    Raises:
        sqlite3.Error, OSError: it cannot be opened; see ``refused``.
        BlockingIOError: it is not alone.
    """
    path = Path(path).absolute()
    if create:
        # A file that exists is not opened here: closing it would drop the locks of this process's
        # other connections.
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    file = os.stat(path).st_ino
    patience = BUSY_SECONDS if wait is None else wait
    db = sqlite3.connect(
        f"{path.as_uri()}?mode=rw",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
        factory=FileConnection,
        timeout=patience,
    )
    try:
        db.path = path
        # Python's own library has no handler: it waits, and then says the same.
        with contextlib.suppress(AttributeError):
            db.set_busy_handler(_patient(path.parent, patience))  # type: ignore[attr-defined]
        if not wal_is_safe() and (log or alone):
            db.hold(path, alone, patience)
        # A text that damage made no text any more is read as one that its digest does not fit.
        db.text_factory = functools.partial(str, encoding="utf-8", errors="surrogateescape")
        db.execute("PRAGMA cell_size_check = ON")
        if damaged:
            return db
        # Zeros over what is deleted where that costs no write; ON would cost a run 3 to 4% more.
        db.execute("PRAGMA secure_delete = FAST")
        db.execute("PRAGMA synchronous = EXTRA")
        if log:
            _use_log(db, patience)
        if os.stat(path).st_ino != file:
            raise OSError(errno.ESTALE, "replaced")
    except BaseException:
        db.close()
        raise
    return db


def _patient(folder: Path, seconds: float) -> Callable[[int], bool]:
    """Return what SQLite calls before it tries again to take a lock: whether it is to try."""
    end = 0.0

    def wait(times: int) -> bool:
        nonlocal end
        try:
            if times == 0:
                end = time.monotonic() + seconds
                if seconds and disk_errors.lock_failure(folder) is not None:
                    return False
            if time.monotonic() >= end:
                return False
            time.sleep(min(0.001 * 2 ** min(times, 7), 0.1))
            return True
        except BaseException as interrupt:  # SQLite's call has no way for it
            _interrupts.append(interrupt)
            return False

    return wait


#: What ended a wait for a lock: ``refused`` raises it.
_interrupts: list[BaseException] = []


class FileConnection(sqlite3.Connection):
    """A connection to a file; with a lock (``flock``) of its own beside it, until it is closed.

    In WAL mode each connection has one; without it an idle run would not keep others from putting
    another file in the place of its store.
    """

    path: Path
    _lock: int | None = None

    def hold(self, path: Path, exclusive: bool, wait: float) -> None:
        """Take the lock.

        Raises:
            BlockingIOError: others have it.
        """
        beside = f"{path}{LOCK}"
        self._lock = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        end = time.monotonic() + wait
        while True:
            try:
                fcntl.flock(
                    self._lock, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB
                )
                return
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise
            time.sleep(0.02)

    def close(self) -> None:
        """Close the file, then let go of the lock."""
        super().close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _use_log(db: sqlite3.Connection, patience: float) -> None:
    """Put the file in WAL mode, or take it out where that is not safe.

    SQLite does not call the busy handler where it changes the mode: it turns a read lock into a
    write lock then, for which it never waits.  Processes that open a new file at the same time
    would be told that it is busy.
    """
    db.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
    wanted = "WAL" if wal_is_safe() else "DELETE"
    end = time.monotonic() + patience
    while True:
        try:
            (mode,) = db.execute(f"PRAGMA journal_mode = {wanted}").fetchone()
            break
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorname", None) or ""
            if not code.startswith(_BUSY) or _interrupts or time.monotonic() >= end:
                raise
        time.sleep(0.02)
    if mode == "wal":
        db.execute("PRAGMA synchronous = FULL")
        db.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")


def unjournaled(db: sqlite3.Connection) -> None:
    """Let a connection write without a journal: a file that nobody uses before it is synced."""
    db.execute("PRAGMA journal_mode = OFF")
    db.execute("PRAGMA synchronous = OFF")


def memory() -> sqlite3.Connection:
    """Return a connection to an empty database in memory."""
    return sqlite3.connect(":memory:")


def freeze(db: sqlite3.Connection) -> None:
    """Refuse every change through a connection from now on."""
    db.execute("PRAGMA query_only = ON")


class Subject(NamedTuple):
    """The file that an error is about.

    Attributes:
        field: the public name of what names it; noun: what it is.
        damaged: the error for one that is not what was written.
    """

    field: str
    noun: str
    damaged: Callable[[], PolicyError]


def refused(
    subject: Subject, error: Exception, at: "str | Path | sqlite3.Connection"
) -> RunError | UsageError | PolicyError:
    """Return the public error for one of SQLite or of the system, whose text may hold a path or
    value.

    Nothing is called damaged before it was read to its end, and read again: SQLite reports a failed
    read as damage.

    Args:
        at: path of the file, or a connection to it.
    """
    if _interrupts:
        raise _interrupts.pop()
    path = Path(at) if isinstance(at, str | Path) else getattr(at, "path", None)
    code = getattr(error, "sqlite_errorname", None) or ""  # a backup's errors have no code
    if isinstance(error, BlockingIOError) or code.startswith(_BUSY):
        failure = None if path is None else disk_errors.lock_failure(path.parent)
        if failure is not None:
            return _refusal(subject, disk_errors.cause_of(failure))
        return RunError(
            subject.field,
            f"the {subject.noun} is busy: another process has held it for {BUSY_SECONDS:g} s",
            "let that process end, then run the same command again",
        )
    if isinstance(error, OSError):
        cause = disk_errors.cause_of(error)
        if path is not None:  # more exact: of a folder that lacks a right, say
            cause = disk_errors.cause_at(path) or cause
        return _refusal(subject, cause)
    damaged = isinstance(error, UnicodeError) or code.startswith(_DAMAGE) or code == "SQLITE_NOTADB"
    if damaged:
        failure = None if path is None else disk_errors.read_failure(_files_of(path))
        if failure is not None:
            return _refusal(subject, disk_errors.cause_of(failure))
        if code.startswith(_UNREAD) and path is not None and _is_sound(at):
            return _refusal(subject, disk_errors.PASSING)
        if code != "SQLITE_NOTADB":
            return subject.damaged()
        fix = f"{subject.damaged().fix}; or check the path"
        return PolicyError(subject.field, f"is damaged, or no {subject.noun}", fix)
    return _refusal(subject, _cause(code, subject, path), code)


def check_pages(db: sqlite3.Connection) -> None:
    """Refuse a file that SQLite cannot read to its end.

    Raises:
        sqlite3.DatabaseError: it cannot; see ``refused``.
    """
    if not _pages_are_right(db):
        raise _DamageError


def _pages_are_right(db: sqlite3.Connection) -> bool:
    return bool(db.execute("PRAGMA integrity_check(1)").fetchone() == ("ok",))


class _DamageError(sqlite3.DatabaseError):
    """Signals that SQLite's check has reported damage, as a text."""

    sqlite_errorname = "SQLITE_CORRUPT"


def _is_sound(at: "str | Path | sqlite3.Connection") -> bool:
    """Whether SQLite's check of a file passes when it is repeated."""
    with contextlib.suppress(sqlite3.Error, OSError):
        if isinstance(at, sqlite3.Connection):
            return _pages_are_right(at)
        with contextlib.closing(open_file(at, damaged=True, wait=0)) as db:
            return _pages_are_right(db)
    return False


#: Files that were read for a verdict, by device and inode: closed with the process, because closing
#: one would release the locks that this process holds on it.
_read: dict[tuple[int, int], int] = {}


def _files_of(path: Path) -> Iterator[Path | int]:
    """Yield a database's file and those beside it, open for plain reads."""
    for each in (path, *(Path(f"{path}{side}") for side in SIDES)):
        try:
            at = os.stat(each)
            key = at.st_dev, at.st_ino
            if key not in _read:
                _read[key] = os.open(each, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        except OSError:
            yield each  # whoever opens it gets the error
        else:
            yield _read[key]


def _refusal(subject: Subject, cause: disk_errors.Cause, code: str = "") -> RunError | UsageError:
    kind = UsageError if cause.choice else RunError
    what = f"the {subject.noun} cannot be used: {cause.reason}"
    return kind(subject.field, f"{what} ({code})" if code else what, cause.fix)


def _cause(code: str, subject: Subject, path: Path | None) -> disk_errors.Cause:
    """Why SQLite refused, by its code and by a look at the file."""
    if code == "SQLITE_FULL":
        return disk_errors.FULL
    if code in ("SQLITE_NOMEM", "SQLITE_IOERR_NOMEM"):
        return disk_errors.MEMORY
    if code == "SQLITE_TOOBIG":
        return disk_errors.Cause(
            "a step of one shard is larger than SQLite's limit of a gigabyte for a row",
            "use more shards: `dpstream state reshard JOB --shards N`, then run the job again",
        )
    if code == "SQLITE_READONLY_DBMOVED":
        return disk_errors.Cause(
            "it was moved or replaced while it was open", "run the same command again"
        )
    cause = None if path is None else disk_errors.cause_at(path, _files_of(path))
    if not code:
        return cause or (disk_errors.UNKNOWN if path is None else disk_errors.PASSING)
    if not code.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM", "SQLITE_IOERR")):
        return disk_errors.UNKNOWN
    if code == "SQLITE_READONLY_ROLLBACK" or (
        cause is not None and cause.choice and path is not None and has_log(path, "journal")
    ):
        why = f": {cause.reason}" if cause is not None else ""
        return disk_errors.Cause(
            "a process was stopped in the middle of a change, and its journal cannot be "
            f"rolled back{why}",
            f"run the same command once where the {subject.noun} and its folder can be written; "
            "keep the journal beside it",
            choice=True,
        )
    if cause is not None:
        return cause
    if code == "SQLITE_PERM":
        return disk_errors.RIGHTS
    if path is None:
        return disk_errors.UNKNOWN
    if code.startswith("SQLITE_READONLY") and _is_read_only(path):
        fix = "its header is damaged: restore a backup"
        return disk_errors.Cause("it is read-only", fix)
    return disk_errors.PASSING


def _is_read_only(path: Path) -> bool:
    """Whether a database's header forbids to write, which no version of SQLite has written."""
    for file in _files_of(path):
        return isinstance(file, int) and os.pread(file, 1, 18) > b"\2"
    return False


def has_log(path: str | Path, log: Literal["journal", "wal"]) -> bool:
    """Return whether a log of a database has something; who reads may leave an empty one behind."""
    try:
        return os.path.getsize(f"{path}-{log}") > 0
    except OSError:
        return False
