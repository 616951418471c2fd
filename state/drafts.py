"""Temporary files: hidden beside their final path, and removed once their writer is gone.

A draft has a random name, and its writer holds a lock on it (``flock``) for as long as it lives;
the kernel releases the lock when the process ends, however it ends.  So a draft whose lock is free
has no writer, whatever its age: process ids are reused, and clocks of machines that share a folder
differ.  Between making a draft and locking it there is an instant in which it may be removed; its
writer then finds it gone and makes another, because the process that removes a draft holds its lock
until it is gone, and the writer waits for that.  On a file system without such locks, a draft
counts as abandoned when it is a day old.
"""

import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

_SUFFIX = ".dpstream-draft"
_DAY = 86_400.0
#: Beside a draft that is a database; their lock is the draft's.
SIDES, LOCK = ("-wal", "-shm", "-journal"), "-lock"
#: Drafts in a row that were swept before they were locked: somebody sweeps without end.
_ATTEMPTS = 100


@contextlib.contextmanager
def drafted(out: Path, mode: int = 0o600) -> Iterator[Path]:
    """Yield an empty draft beside ``out``, which is to be linked or renamed to it within the block.

    Raises:
        OSError: it cannot be made.
    """
    with opened_draft(out, mode) as (_, draft):
        try:
            yield draft
        finally:
            for side in (*SIDES, LOCK):
                with contextlib.suppress(OSError):
                    os.unlink(f"{draft}{side}")


@contextlib.contextmanager
def opened_draft(out: Path, mode: int = 0o600) -> Iterator[tuple[int, Path]]:
    """Yield a draft as ``drafted``, for files other than databases, and its descriptor."""
    descriptor, draft = _made(out, mode)
    try:
        yield descriptor, draft
    finally:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        os.close(descriptor)


def _made(out: Path, mode: int) -> tuple[int, Path]:
    for _ in range(_ATTEMPTS):
        draft = out.with_name(f".{out.name}.{secrets.token_hex(8)}{_SUFFIX}")
        descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
        with contextlib.suppress(OSError):  # no locks here: its age protects it
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # after a sweeper that was first
        with contextlib.suppress(FileNotFoundError):  # swept before it was locked
            if os.path.samestat(os.stat(draft), os.fstat(descriptor)):
                return descriptor, draft
        os.close(descriptor)
    raise FileNotFoundError


def sweep(folder: Path) -> None:
    """Remove the abandoned drafts of a folder; a draft that cannot be removed stays."""
    for draft in list(folder.glob(f".*{_SUFFIX}*")):
        with contextlib.suppress(OSError), _nobodys(draft) as nobodys:
            if nobodys:
                draft.unlink(missing_ok=True)


@contextlib.contextmanager
def _nobodys(draft: Path) -> Iterator[bool]:
    """Yield whether it may be removed within the block, in which no other process can take it."""
    owner = draft.with_name(draft.name.rpartition(_SUFFIX)[0] + _SUFFIX)
    if not owner.exists():
        yield True  # beside a database that is gone
        return
    if owner.stat().st_nlink > 1:
        # It has its name already.  To open and close it would drop SQLite's locks on the file of
        # that name, if this process has it open.
        yield True
        return
    descriptor = os.open(owner, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        yield _locked(descriptor, owner)
    finally:
        os.close(descriptor)


def _locked(descriptor: int, owner: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return _is_old(owner)
    return True


def _is_old(draft: Path) -> bool:
    return time.time() - draft.stat().st_mtime > _DAY
