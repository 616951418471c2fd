"""Locks between processes: the kernel's (``flock``), which end with a process, however it ends.

They hold between the processes of a machine, and between machines where the file system says so
(NFS does, unless it is mounted with ``nolock`` or ``local_lock``).  Where it has no locks at all
nothing is held, and who asks is told.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def held(path: Path) -> Iterator[bool]:
    """Wait for the lock of a file, which is made for that and stays; whether there are locks.

    The file that a lock protects cannot be its lock where it is replaced by another.

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
    """``held`` of a file that is open and never replaced."""
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
    """Whether nobody holds the lock of a file that is there, who then gets it for the block.

    ``None``: this file system has no locks.

    Raises:
        OSError: there is no such file, or it is not for this process.
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
