"""Files and folders that appear complete or not at all, and stay on disk.

They are flushed to disk before and after they are renamed.  Published files can be read by
everybody and written by their owner alone (``PUBLIC``); private files can be read by their owner
alone (``PRIVATE``).  The umask of the process can only remove rights.

Until they are renamed they are drafts: hidden beside their final path, and removed once their
writer is gone.  A draft has a random name, and its writer holds a lock on it (``flock``) for as
long as it lives; the kernel releases the lock when the process ends, however it ends.  So a draft
whose lock is free has no writer, whatever its age: process ids are reused, and clocks of machines
that share a folder differ.  Between making a draft and locking it there is an instant in which it
may be removed; its writer then finds it gone and makes another, because the process that removes a
draft holds its lock until it is gone, and the writer waits for that.  On a file system without such
locks, a draft counts as abandoned when it is a day old.
"""

import contextlib
import errno
import fcntl
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dpstream.accounting.limits import SINK_THREADS
from dpstream.accounting.places import walked
from dpstream.state.locks import free, is_old

_SUFFIX = ".dpstream-draft"
#: Beside a draft that is a database; their lock is the draft's.
SIDES, LOCK = ("-wal", "-shm", "-journal"), "-lock"
#: Drafts in a row that were swept before they were locked: somebody sweeps without end.
_ATTEMPTS = 100
#: Modes of files; a folder can also be entered by whoever may read its files.
PUBLIC, PRIVATE = 0o644, 0o600
#: What a file system without hard links says, or one that has no more of them.
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


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
    descriptor, draft = _new_draft(out, mode)
    try:
        yield descriptor, draft
    finally:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        os.close(descriptor)


def _new_draft(out: Path, mode: int) -> tuple[int, Path]:
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
    with free(owner, os.O_RDONLY) as nobodys:
        yield is_old(owner) if nobodys is None else nobodys


@contextlib.contextmanager
def replacing(out: Path, mode: int = PUBLIC) -> Iterator[Path]:
    """Yield a draft that replaces ``out``, durably, when the block ends without an error.

    Raises:
        OSError: it cannot be made.
    """
    sweep(out.parent)
    with drafted(out, mode) as draft:
        yield draft
        sync(draft)
        os.replace(draft, out)
        sync(out.parent)


def make_folder(path: Path, mode: int = PUBLIC) -> None:
    """Make a folder and its parents, unless they exist, for files of a mode.

    No folder is made in the root of the file system: if the first folder of a path does not exist,
    the path is misspelt or its disk is not mounted.

    Raises:
        OSError: it cannot be made.
    """
    if path.absolute().parent == Path(path.absolute().anchor) and not path.exists():
        raise FileNotFoundError(errno.ENOENT, "no such folder")
    if not path.parent.exists():
        make_folder(path.parent, mode)
    path.mkdir(mode | (mode & 0o444) >> 2, exist_ok=True)


def sync_tree(folder: Path, mode: int = PUBLIC) -> None:
    """Flush a folder with all that is in it to disk, each file of a mode (`PUBLIC`: readable by
    everybody).

    Raises:
        OSError: it cannot be read or flushed.
    """
    mask = os.umask(0)
    os.umask(mask)

    def settle(path: Path) -> None:
        os.chmod(path, mode & ~mask)
        sync(path)

    tree = [(Path(at), names) for at, _, names in walked(folder)]
    with ThreadPoolExecutor(SINK_THREADS) as pool:  # they wait for the disk together
        list(pool.map(settle, [at / name for at, names in tree for name in names]))
    for at, _ in tree:
        if at != folder:
            os.chmod(at, (mode | 0o100 | (mode & 0o044) >> 2) & ~mask)
        sync(at)


def publish_folder(draft: Path, out: Path) -> None:
    """Rename a private folder that is on disk (``sync_tree``), and let others read it.

    Raises:
        OSError: it cannot be done.
        FileExistsError: the path exists.
    """
    if out.exists() or out.is_symlink():
        raise FileExistsError(errno.EEXIST, "exists")
    mask = os.umask(0)
    os.umask(mask)
    os.chmod(draft, 0o755 & ~mask)
    sync(draft)
    os.rename(draft, out)
    sync(out.parent)


def put_once(path: Path, data: bytes, mode: int = PUBLIC) -> bool:
    """Make ``path`` with ``data``, atomically and on disk, unless it exists.

    On return the file is on disk even if another process made it, which may have died before that.

    Args:
        mode: of the file from its first byte on; folders that are made get it too.

    Returns:
        Whether the file is new.  Of two writers at once exactly one makes it (on a file system
        without hard links: unless both write within the same instant; the last one's stays).

    Raises:
        OSError: it cannot be written.
    """
    fresh = put_entry(path, data, mode)
    sync_folders([path])
    for folder in path.parents[2:]:  # which may be new as well
        # One that cannot be opened to read was not made here.
        with contextlib.suppress(OSError):
            sync(folder)
    return fresh


def put_entry(path: Path, data: bytes, mode: int = PUBLIC) -> bool:
    """Do ``put_once`` up to the folder's entry, which ``sync_folders`` makes durable."""
    return not path.exists() and put_entries([(path, data)], mode) == [True]


def put_entries(files: Sequence[tuple[Path, bytes]], mode: int = PUBLIC) -> list[bool]:
    """Do ``put_entry`` for several files that did not exist just now; they are flushed together.

    Only the flushes run in threads: writing small files takes twice as long in several threads.
    """
    for folder in {path.parent for path, _ in files}:
        make_folder(folder, mode)
    with contextlib.ExitStack() as stack:
        drafts = []
        for path, data in files:
            descriptor, draft = stack.enter_context(opened_draft(path, mode))
            fill(descriptor, data)
            drafts.append((descriptor, draft))
        _sync_all([descriptor for descriptor, _ in drafts])
        return [_named(draft, path) for (_, draft), (path, _) in zip(drafts, files, strict=True)]


def put_again(path: Path, data: bytes, mode: int = PUBLIC) -> None:
    """Replace a damaged file by ``data``; durable once its folder is flushed."""
    with opened_draft(path, mode) as (descriptor, draft):
        fill(descriptor, data)
        os.fsync(descriptor)
        os.replace(draft, path)


def _named(draft: Path, path: Path) -> bool:
    """Rename a draft to its path, unless the path exists."""
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if path.exists():
            return False
        os.replace(draft, path)
    return True


def fill(descriptor: int, data: bytes) -> None:
    """Write all of the data to an open file."""
    with open(descriptor, "wb", buffering=0, closefd=False) as file:
        left = memoryview(data)
        while left:
            left = left[file.write(left) :]


def _sync_all(descriptors: Sequence[int]) -> None:
    if len(descriptors) < 2:
        for descriptor in descriptors:
            os.fsync(descriptor)
        return
    with ThreadPoolExecutor(SINK_THREADS) as pool:
        list(pool.map(os.fsync, descriptors))


def sync_folders(paths: Iterable[Path]) -> None:
    """Flush the entries of files and of their folders to disk, each folder once."""
    folders = {path.parent for path in paths}
    for folder in sorted(folders | {folder.parent for folder in folders}):
        sync(folder)


def sync(path: Path) -> None:
    """Flush a file, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
