"""Causes and fixes of the operating system's errors, the same for every file.

Error numbers are public; the texts that the system adds to them have paths, which are not shown.
"""

import contextlib
import errno
import fcntl
import os
import re
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from dpstream.accounting.errors import DpstreamError, RunError, UsageError


class Cause(NamedTuple):
    """The reason why a file cannot be used, as text.

    Attributes:
        reason: what is wrong.
        fix: what to do about it.
        choice: whether another path or other rights help, rather than a repair of the machine.
    """

    reason: str
    fix: str
    choice: bool = False


FULL = Cause("the disk is full", "free space on it, then run the same command again")
QUOTA = Cause(
    "the disk quota is used up", "free space or raise the quota, then run the same command again"
)
READ_ONLY = Cause(
    "the file system is read-only",
    "use a path on a disk that can be written, or mount this one for writing",
    choice=True,
)
RIGHTS = Cause(
    "this user may not use it",
    "run as its owner, or give this user the rights to the file and its folder (`chmod`)",
    choice=True,
)
MISSING = Cause("there is no such file or folder", "correct the path", choice=True)
FILES = Cause(
    "too many files are open", "raise the limit (`ulimit -n 4096`), then run the same command again"
)
DEVICE = Cause(
    "the disk reported an error",
    "check the disk (`dmesg`) and its quota, then run the same command again",
)
MEMORY = Cause("there is not enough memory", "free memory, then run the same command again")
#: For a library that does not report the system's error, if reading again does not fail.
PASSING = Cause(
    "a call of the system failed, and succeeds now",
    "run the same command again; if it fails again, check the disk (`dmesg`)",
)
_IN_THE_WAY = Cause("a file is at its path, or above it", "choose another path", choice=True)
_LINK = Cause("a link at its path leads to no folder", "correct or remove the link", choice=True)
_CANNOT_WRITE = "cannot be written"
#: What no other cause fits.
UNKNOWN = Cause("the system refused", "check the path, the disk and the rights")

_CAUSES = {
    errno.ENOSPC: FULL,
    errno.EDQUOT: QUOTA,
    errno.EROFS: READ_ONLY,
    errno.EACCES: RIGHTS,
    errno.EPERM: RIGHTS,
    errno.ENOENT: MISSING,
    errno.ENOTDIR: MISSING,
    errno.EISDIR: Cause("it is a folder", "name a file", choice=True),
    errno.EEXIST: Cause("a file of that name exists", "choose another path", choice=True),
    errno.ENAMETOOLONG: Cause("its name is too long", "choose a shorter path", choice=True),
    errno.ELOOP: Cause(  # also of a file that is opened without following links
        "it is a symbolic link, or its path has too many of them",
        "remove the link, or put the file itself in its place",
        choice=True,
    ),
    errno.EINTR: Cause("a signal interrupted it", "run the same command again"),
    errno.EMFILE: FILES,
    errno.ENFILE: FILES,
    errno.EIO: DEVICE,
    errno.ENOMEM: MEMORY,
    errno.EFBIG: Cause("the file is too large", "raise the limit (`ulimit -f`)"),
    errno.ENOLCK: Cause(
        "the file system has no locks",
        "mount it with locks (NFS: without the option nolock), or use a disk of this machine",
        choice=True,
    ),
    errno.ESTALE: Cause("it was replaced while it was opened", "run the same command again"),
}

#: Errors of a path at which there is no file.
ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
#: Numbers of the errors whose causes are listed here.
FORESEEN = tuple(_CAUSES)


def is_foreseen(error: BaseException) -> bool:
    """Return whether the system's error is in the table."""
    return isinstance(error, OSError) and error.errno in _CAUSES


def cause_of(error: BaseException) -> Cause:
    """Return the cause of an error; an error that is not in the table is named by its number."""
    if out_of_memory(error):
        return MEMORY
    if not isinstance(error, OSError) or error.errno is None:
        return UNKNOWN
    name = errno.errorcode.get(error.errno, "of unknown number")
    return _CAUSES.get(error.errno, UNKNOWN._replace(reason=f"{UNKNOWN.reason} ({name})"))


#: How a system or a library that has no class for it says that memory has ended.
_MEMORY_WORDS = re.compile(
    "cannot allocate memory|failed to map segment|can't start new thread|std::bad_alloc",
    re.IGNORECASE,
)


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or its cause, means that this process may have no more memory.

    A thread that cannot be started lacks the memory of its stack, or the limit of a container; a
    library that cannot be loaded lacks the memory of its code.
    """
    seen: BaseException | None = error
    while seen is not None:
        if _out_of_memory(seen):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryException":  # DuckDB's
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno == errno.ENOMEM
    if not isinstance(error, OSError | ImportError | RuntimeError):
        return False
    return _MEMORY_WORDS.search(str(error)) is not None


#: Address space below which libraries fail at random: a small run in process reserves 2.5 GiB, most
#: of it for the stacks and the heaps of threads.
MIN_ADDRESS_SPACE = 3 << 30


def memory_error(where: str) -> RunError:
    """Return the error for a process that has no memory left.

    Args:
        where: the public name of the command or the stage.
    """
    return RunError(
        "memory",
        f"there is not enough for {where}",
        "raise the limit of this process or container (`ulimit -v`, resources.limits.memory), or "
        "write threads = 1 into the job; then run it again",
    )


def require_memory(where: str) -> None:
    """Refuse to read data if the limit of address space is too low even for a small job.

    A library that meets such a limit in a thread of its own ends the process (std::bad_alloc, a
    thread that cannot start), and which one does so changes from run to run.

    Args:
        where: the public name of the command.

    Raises:
        RunError: the limit of address space is below `MIN_ADDRESS_SPACE`.
    """
    if sys.platform == "win32":
        return
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < MIN_ADDRESS_SPACE:
        raise RunError(
            "memory",
            f"is limited to {limit >> 20:,} MiB of address space; {where} reserves up to"
            f" {MIN_ADDRESS_SPACE >> 20:,} MiB and uses a part of it",
            f"raise the limit (`ulimit -v {MIN_ADDRESS_SPACE >> 10}`), then run it again",
        )


def file_error(field: str, cannot: str, error: Exception) -> RunError:
    """Return the error for a file that cannot be used.

    Args:
        field: the public name of the file.
        cannot: what cannot be done (``cannot be written``).
    """
    cause = cause_of(error)
    return RunError(field, f"{cannot}: {cause.reason}", cause.fix)


@contextlib.contextmanager
def file_errors(field: str, cannot: str) -> Iterator[None]:
    """Replace errors of the block about a file by ``file_error``.

    Raises:
        RunError: instead of ``OSError``.
    """
    try:
        yield
    except OSError as error:
        raise file_error(field, cannot, error) from None


def unreadable(field: str, error: OSError) -> UsageError:
    """Return the error for a file that the user names and wrote, such as a project file.

    Args:
        field: the name of the file in the error.
    """
    cause = cause_of(error)
    return UsageError(field, f"cannot be read: {cause.reason}", cause.fix)


def require_folder(field: str, folder: Path) -> None:
    """Refuse a folder in which no file can be made, whether it is there or will be made.

    The charge comes before the first write, so the write would notice this too late.

    Args:
        field: the public name of the folder.

    Raises:
        RunError: a file is at its path or above it, or this user may not write there.
    """
    place, cause = folder, None
    with file_errors(field, _CANNOT_WRITE):
        while not place.exists() and not place.is_symlink() and place != place.parent:
            place = place.parent
        if not place.is_dir():
            cause = _LINK if place.is_symlink() else _IN_THE_WAY
        if cause is None and os.statvfs(place).f_flag & os.ST_RDONLY:
            cause = READ_ONLY
        if cause is None and not os.access(place, os.W_OK | os.X_OK):
            cause = RIGHTS
    if cause is not None:
        raise RunError(field, f"{_CANNOT_WRITE}: {cause.reason}", cause.fix)


def read_failure(files: Iterable[Path | int]) -> OSError | None:
    """Read files to their end by plain reads; return the error of the first that cannot be read.

    Args:
        files: paths, or open files; what is absent or no regular file is left out.
    """
    for file in files:
        try:
            if not stat.S_ISREG(os.stat(file).st_mode):
                continue
            with open(file, "rb", buffering=0, closefd=isinstance(file, Path)) as data:
                data.seek(0)
                while data.read(1 << 20):
                    pass
        except FileNotFoundError:
            continue
        except OSError as error:
            return error
    return None


def decode_error(
    damaged: DpstreamError, error: BaseException | None, *files: Path
) -> DpstreamError:
    """Return the error for files that a library could not decode.

    A library may report a failed read as wrong bytes.  The fix for damage (restore a backup) costs
    work and data, so a file is called damaged only if it can be read to its end.

    Args:
        damaged: the error for files that can be read and differ from what was written.
        error: what the reader reported.
    """
    failure = error if isinstance(error, OSError) and error.errno else read_failure(files)
    if failure is None and not (error is not None and out_of_memory(error)):
        return damaged
    return file_error(damaged.field, "cannot be read", failure or MemoryError())


def failed_read(field: str, files: Iterable[Path]) -> RunError:
    """Return the error for files that a library could not read without reporting the error number.

    Args:
        field: the public name of what reads the files.
    """
    failure = read_failure(files)
    cause = PASSING if failure is None else cause_of(failure)
    return RunError(field, f"a file cannot be read: {cause.reason}", cause.fix)


#: Errors of a folder in which no file can be made, so that its locks cannot be tried.
_NO_FILE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT}


def lock_failure(folder: Path) -> OSError | None:
    """Try a lock in a folder; return its error, or ``None`` if it works or cannot be tried."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return None if error.errno in _NO_FILE else error
    return None


def cause_at(path: Path, files: Iterable[Path | int] = ()) -> Cause | None:
    """Return why a file cannot be used, by its disk, its rights, and trial reads and writes.

    Args:
        path: the file, which is not opened: closing it would release the locks that this process
            holds on it.
        files: files that are read to their end as a trial.
    """
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
        place = path if path.exists() else path.parent
        disk = os.statvfs(place)
    except OSError as error:
        return cause_of(error)
    if disk.f_flag & os.ST_RDONLY:
        return READ_ONLY
    if path.is_dir():
        return _CAUSES[errno.EISDIR]
    if not all(os.access(p, os.W_OK) for p in (path, path.parent) if p.exists()):
        return RIGHTS
    failure = read_failure(files) or _write_failure(path.parent) or lock_failure(path.parent)
    if failure is not None:
        return cause_of(failure)
    return FULL if disk.f_bavail == 0 else None


def _write_failure(folder: Path) -> OSError | None:
    """Try to write a page in a folder, in a file without a name; return its error."""
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(b"\0" * 4096)
            os.fsync(file.fileno())
        folder_entries = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(folder_entries)
        finally:
            os.close(folder_entries)
    except OSError as error:
        return error
    return None
