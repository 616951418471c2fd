"""Files and folders that appear complete or not at all, and stay: they are flushed to disk before
and
after they are renamed.

Published files can be read by everybody and written by their owner alone (``PUBLIC``); private
files can be read by their owner alone (``PRIVATE``).  The umask of the process can only remove
rights.
"""

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dpstream.accounting.limits import SINK_THREADS
from dpstream.state.drafts import drafted, opened_draft, sweep

#: Modes of files; a folder can also be entered by whoever may read its files.
PUBLIC, PRIVATE = 0o644, 0o600
#: What a file system without hard links says, or one that has no more of them.
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


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

    Raises:
        OSError: it cannot be made.
    """
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

    tree = [(Path(at), names) for at, _, names in os.walk(folder)]
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
            _fill(descriptor, data)
            drafts.append((descriptor, draft))
        _sync_all([descriptor for descriptor, _ in drafts])
        return [_named(draft, path) for (_, draft), (path, _) in zip(drafts, files, strict=True)]


def put_again(path: Path, data: bytes, mode: int = PUBLIC) -> None:
    """Replace a damaged file by ``data``; durable once its folder is flushed."""
    with opened_draft(path, mode) as (descriptor, draft):
        _fill(descriptor, data)
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


def _fill(descriptor: int, data: bytes) -> None:
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
