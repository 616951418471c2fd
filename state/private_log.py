"""Tracebacks of unexpected errors, for the operator alone: a file that only its owner can read.

The text of an exception can quote a record, so of an unexpected error only its class is shown.  Its
traceback is written to ``dpstream-errors.log`` (mode 0600) beside the store or the account, and the
error that is shown names that file.  Only a process that began a command or a run writes one
(``keep_in``, ``keep_beside``): a worker elsewhere has no folder of its own, and writes nothing.

``DPSTREAM_DEBUG=1`` also prints tracebacks on stderr, after a warning that they may hold data.
"""

import contextlib
import datetime
import os
import stat
import sys
import threading
import traceback
from pathlib import Path

from dpstream.accounting.errors import RunError
from dpstream.state.disk_errors import cause_of, is_foreseen, memory_error, out_of_memory
from dpstream.state.durable import fill

NAME = "dpstream-errors.log"
DEBUG = "DPSTREAM_DEBUG"
#: A file that has grown beyond this makes place for a new one; one older file stays.
MAX_BYTES = 1 << 20
#: Of one traceback, and how many a command writes: a fault repeats in every thread.
MAX_ENTRY_CHARS, MAX_ENTRIES = 1 << 15, 16
#: Names that are tried where another's file, a link or a readable file has the first.
_NAMES = (NAME, *(f"dpstream-errors-{number}.log" for number in range(2, 10)))
_OPEN = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class _Place:
    """Where this process writes.

    Attributes:
        launches: whether it is not a worker's process.
        folder: beside the store or account; ``None``: the user's folder for logs.
        entries: tracebacks since the command began.
    """

    launches = False
    folder: Path | None = None
    entries = 0


_place, _lock = _Place(), threading.Lock()


def keep_in(folder: Path | None) -> None:
    """Begin a command or a run whose tracebacks go to a folder (``None``: the user's own)."""
    with _lock:
        _place.launches, _place.folder, _place.entries = True, folder, 0


def keep_beside(*places: str | Path | None) -> None:
    """Do ``keep_in`` for the folder of the first local file: a store, account or job.

    Args:
        places: paths, or URLs as in projects (``sqlite:PATH``); remote databases are ignored.
    """
    for place in places:
        text = str(place or "").removeprefix("sqlite:")
        if text and "://" not in text:
            keep_in(Path(text).absolute().parent)
            return


def unexpected(field: str, error: BaseException) -> RunError:
    """Return the coded error that replaces an unexpected one, whose text may hold data.

    Args:
        field: the public name of the command or the stage.
        error: the caught error.
    """
    if out_of_memory(error):
        return memory_error(field)
    if lost_connection(error):
        return RunError(
            field,
            "lost its connection to another process, which has ended or cannot be reached",
            "check that the runner and its services run and have enough memory, then type the "
            "command again: it continues what it has charged, at no further charge",
        )
    fix = what_next(error)
    if is_foreseen(error):
        cause = cause_of(error)
        return RunError(field, f"failed at a file: {cause.reason}", f"{cause.fix}; else {fix}")
    return RunError(field, f"failed with {type(error).__name__}", fix)


def lost_connection(error: BaseException) -> bool:
    """Return whether an error, or its cause, is a failed remote call (gRPC)."""
    grpc, seen = sys.modules.get("grpc"), error
    while grpc is not None and seen is not None:
        if isinstance(seen, grpc.RpcError):
            return True
        seen = seen.__cause__ or seen.__context__  # type: ignore[assignment]
    return False


def what_next(error: BaseException, otherwise: str = "run `dpstream doctor`") -> str:
    """Write an error's traceback; return the fix for the coded error that replaces it.

    Args:
        error: the caught error.
        otherwise: the fix on a worker, which writes nothing.
    """
    if not _place.launches:
        return otherwise
    text = _text(error)
    if os.environ.get(DEBUG) == "1":
        warning = f"{DEBUG}=1: the traceback below may hold private values; do not publish it."
        print(f"{warning}\n{text}", file=sys.stderr, flush=True)
    try:
        with _lock:
            _place.entries += 1
            path = _append(_place.folder or users_folder(), text, _place.entries <= MAX_ENTRIES)
    except OSError as failed:
        return (
            f"run it again with {DEBUG}=1, which prints the traceback: the private log could not be"
            f" written: {cause_of(failed).reason}"
        )
    return f"read the traceback in {path}, which may hold private values"


def _text(error: BaseException) -> str:
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    lines = "".join(traceback.format_exception(error))
    if len(lines) > MAX_ENTRY_CHARS:
        half = MAX_ENTRY_CHARS // 2
        lines = f"{lines[:half]}\n... left out ...\n{lines[-half:]}"
    return f"--- {now}, process {os.getpid()}; may hold private values\n{lines}"


def users_folder() -> Path:
    """Return the user's own folder for files without another folder; make it if it is absent.

    Raises:
        OSError: it cannot be made.
    """
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    folder = Path(home) / "dpstream"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _append(folder: Path, text: str, write: bool) -> Path:
    """Append to the first of the names that is this user's own private file, or can be made.

    Raises:
        OSError: there is no such file, or it cannot be written.
    """
    for name in _NAMES:
        path = folder / name
        descriptor = _opened(path)
        if descriptor is None:
            continue
        try:
            if write:
                fill(descriptor, text.encode("utf-8", "replace"))
        finally:
            os.close(descriptor)
        return path
    raise PermissionError


def _opened(path: Path) -> int | None:
    """Return a descriptor of a private file that has room; ``None``: it is another user's.

    The file is made if it is absent.
    """
    for _ in range(3):  # others may make, fill and move the same file
        try:
            descriptor = os.open(path, _OPEN)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                return os.open(path, _OPEN | os.O_CREAT | os.O_EXCL, 0o600)
            continue
        except OSError:  # a link, a pipe, a folder, or no right to write
            return None
        state = os.fstat(descriptor)
        own = stat.S_ISREG(state.st_mode) and state.st_uid == os.geteuid() and state.st_nlink == 1
        if own and not state.st_mode & 0o077 and state.st_size < MAX_BYTES:
            return descriptor
        os.close(descriptor)
        if not own or state.st_mode & 0o077:
            return None
        os.replace(path, path.with_suffix(".old.log"))
    return None
