"""Locks between processes: the kernel's (``flock``), which end with a process, however it ends.

They work between the processes of a machine, and between machines if the file system supports it
(NFS does, unless it is mounted with ``nolock`` or ``local_lock``).  On a file system without locks
nothing is locked, and the caller is told so.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def held(path: Path) -> Iterator[bool]:
    """Wait for the lock of a file, which is made if it is absent; yield whether there are locks.

    The lock must be another file than the protected one, if that is replaced by renaming.

    Raises:
        OSError: the file cannot be made.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        with held_on(descriptor) as locked:
            yield locked
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def held_on(descriptor: int) -> Iterator[bool]:
    """Do ``held`` for a file that is open and never replaced."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        yield False
        return
    try:
        yield True
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


@contextlib.contextmanager
def free(path: Path) -> Iterator[bool | None]:
    """Yield whether the lock of an existing file is free; if so, this process has it in the block.

    ``None``: this file system has no locks.

    Raises:
        OSError: there is no such file, or this process may not use it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        acquired: bool | None = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            acquired = False
        except OSError:
            acquired = None
        yield acquired
    finally:
        os.close(descriptor)
