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
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dpstream.accounting.errors import PolicyError, RunError, UsageError
from dpstream.accounting.limits import BUSY_SECONDS
from dpstream.state import disk_errors
from dpstream.state.durable import LOCK

if TYPE_CHECKING:
    import sqlite3
else:
    try:
        from pysqlite3 import dbapi2 as sqlite3
    except ImportError:
        import sqlite3

__all__ = [
    "Subject",
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
    db = sqlite3.connect(
        f"{path.as_uri()}?mode=rw",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
        factory=_Connection,
        timeout=BUSY_SECONDS if wait is None else wait,
    )
    try:
        if not wal_is_safe() and (log or alone):
            db.hold(path, alone, BUSY_SECONDS if wait is None else wait)
        # A text that damage made no text any more is read as one that its digest does not fit.
        db.text_factory = functools.partial(str, encoding="utf-8", errors="surrogateescape")
        db.execute("PRAGMA cell_size_check = ON")
        if damaged:
            return db
        # Zeros over what is deleted where that costs no write; ON would cost a run 3 to 4% more.
        db.execute("PRAGMA secure_delete = FAST")
        db.execute("PRAGMA synchronous = EXTRA")
        if log:
            _use_log(db)
        if os.stat(path).st_ino != file:
            raise OSError(errno.ESTALE, "replaced")
    except BaseException:
        db.close()
        raise
    return db


class _Connection(sqlite3.Connection):
    """A connection with a lock (``flock``) of its own beside the file, until it is closed.

    In WAL mode each connection has one; without it an idle run would not keep others from putting
    another file in the place of its store.
    """

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


def _use_log(db: sqlite3.Connection) -> None:
    """Put the file in WAL mode, or take it out where that is not safe."""
    db.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
    wanted = "WAL" if wal_is_safe() else "DELETE"
    (mode,) = db.execute(f"PRAGMA journal_mode = {wanted}").fetchone()
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
    subject: Subject, error: Exception, path: str | Path | None = None
) -> RunError | UsageError | PolicyError:
    """Return the public error for one of SQLite or of the system, whose text may hold a path or
    value.

    Args:
        path: of the file, if it is known.
    """
    code = getattr(error, "sqlite_errorname", None) or ""  # a backup's errors have no code
    if isinstance(error, BlockingIOError) or code.startswith(_BUSY):
        return RunError(
            subject.field,
            f"the {subject.noun} is busy: another process has held it for {BUSY_SECONDS:g} s",
            "let that process end, then run the same command again",
        )
    if isinstance(error, OSError):
        cause = disk_errors.cause_of(error)
        if path is not None:  # more exact: of a folder that lacks a right, say
            cause = disk_errors.cause_at(Path(path)) or cause
        return _refusal(subject, cause)
    if code == "SQLITE_NOTADB":
        fix = f"{subject.damaged().fix}; or check the path"
        return PolicyError(subject.field, f"is damaged, or no {subject.noun}", fix)
    if isinstance(error, UnicodeError) or code.startswith(_DAMAGE):
        return subject.damaged()
    return _refusal(subject, _cause(code, subject, None if path is None else Path(path)), code)


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
    if code == "SQLITE_READONLY_DBMOVED":
        return disk_errors.Cause(
            "it was moved or replaced while it was open", "run the same command again"
        )
    cause = None if path is None else disk_errors.cause_at(path)
    if not code:
        return cause or disk_errors.UNKNOWN
    if not code.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM", "SQLITE_IOERR")):
        return disk_errors.UNKNOWN
    if code == "SQLITE_READONLY_ROLLBACK" or (cause is not None and cause.choice and _hot(path)):
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
    if code.startswith("SQLITE_IOERR"):
        return disk_errors.DEVICE
    if code == "SQLITE_PERM":
        return disk_errors.RIGHTS
    if code.startswith("SQLITE_CANTOPEN"):
        return disk_errors.Cause("it cannot be opened", "check the path", choice=True)
    fix = "check disk and rights; if both are right its header is damaged: restore a backup"
    return disk_errors.Cause("it is read-only", fix)


def _hot(path: Path | None) -> bool:
    """Whether a journal is left beside the file."""
    try:
        return path is not None and os.stat(f"{path}-journal").st_size > 0
    except OSError:
        return False
