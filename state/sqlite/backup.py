"""Copies of the embedded store's file, and one file put in the place of another.

A file under its final name is always whole: it is made as a hidden draft beside it
(`state.drafts`), synced, and linked or renamed.  Behind the last page of a backup stands a digest
of all of it; SQLite does not look there.
"""

import contextlib
import functools
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from dpstream.accounting.errors import RunError, UsageError
from dpstream.state import drafts
from dpstream.state.disk_errors import file_error
from dpstream.state.drafts import SIDES
from dpstream.state.durable import PRIVATE, make_folder, sync
from dpstream.state.seals import damaged
from dpstream.state.sqlite.database import open_file, sqlite3
from dpstream.state.sqlite.file import check_structure, connect, failed, read_identity
from dpstream.state.sqlite.rows import check_all
from dpstream.state.store import RunIdentity

#: What stands behind a backup.
_MARK, _DIGEST = b"dpstream backup ", functools.partial(hashlib.blake2b, digest_size=16)
#: Pages copied between two reports of progress.
_PAGES = 4096


def backup_file(
    path: str | Path, out: Path, progress: Callable[[int, int], None] | None = None
) -> RunIdentity:
    """Copy a store's file to ``out`` while a run may be writing: one state of it, checked, synced,
    for its owner only; returns its identity.

    Raises:
        UsageError: ``out`` exists (nothing is overwritten).
        RunError: it cannot be written, or the copy is damaged; ``out`` is not there then.
    """
    refuse_existing(out)
    with drafted(out) as draft:
        source = connect(path)
        try:
            read_identity(source)
            target = open_file(draft)
            try:
                # The open transaction pins one state; other writers go on beside it.
                source.execute("BEGIN")
                source.execute("SELECT count(*) FROM meta").fetchone()

                def report_pages(_: int, left: int, total: int) -> None:
                    if progress is not None:
                        progress(total - left, total)

                source.backup(target, pages=_PAGES, progress=report_pages)
                target.execute("PRAGMA journal_mode = DELETE")
            finally:
                target.close()
        except sqlite3.Error as error:
            raise failed(error, out) from None
        finally:
            source.close()
        identity = check_file(draft)
        seal_backup(draft)
        publish(draft, out)
        return identity


def seal_backup(draft: Path) -> None:
    """Put the digest behind a backup that was checked."""
    with open(draft, "r+b") as file:
        digest = hashlib.file_digest(file, _DIGEST).digest()
        file.write(_MARK + digest)


def copy_backup(file: Path, copy: Path) -> None:
    """Copy a backup without its digest.

    Raises:
        PolicyError: it has none, or one that does not fit.
    """
    shutil.copyfile(file, copy)
    with open(copy, "r+b") as copy_file:
        size = copy_file.seek(0, os.SEEK_END) - len(_MARK) - _DIGEST().digest_size
        copy_file.seek(max(0, size))
        seal = copy_file.read()
        copy_file.truncate(max(0, size))
        copy_file.seek(0)
        if _MARK + hashlib.file_digest(copy_file, _DIGEST).digest() != seal:
            raise damaged()


def refuse_existing(out: Path) -> None:
    """Nothing is overwritten."""
    if out.exists():
        raise UsageError("backup", "the file exists", "choose another name, or move it away")


@contextlib.contextmanager
def drafted(out: Path) -> Iterator[Path]:
    """An empty draft beside ``out``, for its owner only; gone when the block ends.

    Drafts that killed attempts have left there go first: they may hold much of the disk.
    """
    try:
        make_folder(out.parent, PRIVATE)
        drafts.sweep(out.parent)
        with drafts.drafted(out) as draft:
            yield draft
    except OSError as error:
        raise _no_file(error) from None


def _no_file(error: OSError) -> RunError:
    return file_error("store", "a file beside it cannot be written", error)


def check_file(path: Path) -> RunIdentity:
    """Identity of a file that is not in use, after a check of its whole content.

    Raises:
        PolicyError: damaged, or no store of this program.
    """
    db = connect(path)
    try:
        identity = read_identity(db)
        check_structure(db)
        check_all(db)
        db.execute("PRAGMA journal_mode = DELETE")
        return identity
    except sqlite3.Error as error:
        raise failed(error) from None
    finally:
        db.close()


def publish(draft: Path, out: Path) -> None:
    """Give the draft its name, unless a file has it; durable."""
    sync(draft)
    if not out.exists():
        _move_sides(out, out.with_name(f"{out.name}.lost"))
    try:
        os.link(draft, out)
    except FileExistsError:
        refuse_existing(out)
    except OSError:  # a file system without hard links
        os.rename(draft, out)
    sync(out.parent)


def replace_file(path: Path, draft: Path) -> Path:
    """Put a draft in a store's place, which is held ``alone``; returns where the old one is kept.

    At every instant the name belongs to the old or to the new file.
    """
    aside = next(
        name
        for name in (path.with_name(f"{path.name}.old{n or ''}") for n in range(10_000))
        if not name.exists()
    )
    try:
        sync(draft)
        _move_sides(path, aside)
        try:
            os.link(path, aside)
        except OSError:  # a file system without hard links: a moment without the name
            os.rename(path, aside)
        os.replace(draft, path)
        sync(path.parent)
    except OSError as error:
        raise _no_file(error) from None
    return aside


def _move_sides(path: Path, aside: Path) -> None:
    """A write-ahead log that is left (of a damaged or lost file) must not meet another file."""
    for side in SIDES:
        left = Path(f"{path}{side}")
        if left.exists() and left.stat().st_size:
            os.rename(left, f"{aside}{side}")
        else:
            left.unlink(missing_ok=True)
