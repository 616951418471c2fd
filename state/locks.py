"""Locks between processes, and private folders that are removed after the process that made them.

Locks are the kernel's (``flock``), which end with a process, however it ends.  They work between
the processes of a machine, and between machines if the file system supports it (NFS does, unless it
is mounted with ``nolock`` or ``local_lock``).  On a file system without locks nothing is locked,
and the caller is told so.

Only its owner can read a private folder; workers and launchers share it.  It has a lock, which the
process that made it holds as long as it lives: a folder whose lock is free is abandoned, and the
next process that makes one beside it removes it, whatever its age.  It is renamed first, so that a
worker that still runs cannot write into it meanwhile.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from dpstream.state.disk_errors import file_errors

_FOLDER, _MAKING, _LOCK = ".dpstream-work-", "making", "lock"
#: Before the name of a folder that is being removed.
_GONE = f"{_FOLDER}gone-"
#: Errors of a file system without locks.
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
#: Where there are no locks, or none yet, a folder is nobody's after a day.
_DAY = 86_400.0


@contextlib.contextmanager
def held(path: Path) -> Iterator[bool]:
    """Wait for the lock of a file, which is made if it is absent; yield whether there are locks.

    The lock must be another file than the protected one, if that is replaced by renaming.

    Raises:
        OSError: the file cannot be made, or its lock cannot be taken.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        with held_on(descriptor) as locked:
            yield locked
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def held_on(descriptor: int) -> Iterator[bool]:
    """Do ``held`` for a file that is open and never replaced.

    Raises:
        OSError: a lock cannot be taken where there are locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        yield False
        return
    try:
        yield True
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


@contextlib.contextmanager
def free(path: Path, how: int = os.O_RDWR) -> Iterator[bool | None]:
    """Yield whether the lock of an existing file is free; if so, this process has it in the block.

    ``None``: this file system has no locks.

    Args:
        how: flags of ``os.open``.

    Raises:
        OSError: there is no such file, or this process may not use it.
    """
    descriptor = os.open(path, how | os.O_NOFOLLOW)
    try:
        acquired: bool | None = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            acquired = False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            acquired = None
        yield acquired
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def private_folder(parent: Path, field: str) -> Iterator[Path]:
    """Yield a new folder that only its owner can read; it is removed at the end unless renamed.

    Abandoned folders beside it are removed.  Files that are to be renamed belong in the empty
    folder ``files`` in it.

    Args:
        parent: the parent folder.
        field: the name of the parent folder in an error.

    Raises:
        RunError: it cannot be made.
    """
    sweep(parent)
    with contextlib.ExitStack() as stack:
        with file_errors(field, "has a folder that cannot be written"):
            folder = Path(tempfile.mkdtemp(prefix=_FOLDER, dir=parent))
            stack.callback(_discard, folder)
            stack.enter_context(held(folder / _MAKING))
            (folder / _MAKING).rename(folder / _LOCK)  # from here on it may be looked at
            (folder / "files").mkdir(mode=0o700)
        yield folder / "files"


def sweep(parent: Path) -> None:
    """Remove abandoned folders of launchers; a folder that cannot be removed stays."""
    for folder in parent.glob(f"{_FOLDER}*"):
        with contextlib.suppress(OSError):
            if folder.name.startswith(_GONE):  # whoever began that was killed
                shutil.rmtree(folder, ignore_errors=True)
            elif (folder / _LOCK).exists():
                with free(folder / _LOCK) as nobodys:
                    _remove(folder, nobodys)
            else:
                _remove(folder, None)


def _remove(folder: Path, nobodys: bool | None) -> None:
    if is_old(folder) if nobodys is None else nobodys:
        _discard(folder)


def is_old(path: Path) -> bool:
    """Return whether a path was changed more than a day ago."""
    return time.time() - path.stat().st_mtime > _DAY


def _discard(folder: Path) -> None:
    gone = folder.with_name(f"{_GONE}{secrets.token_hex(8)}")
    with contextlib.suppress(OSError):  # somebody else has swept it
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
