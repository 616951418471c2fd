"""Copies of the embedded store's file, and one file put in the place of another.

A file under its final name is always whole: it is made as a hidden draft beside it, synced, and
linked or renamed.  A draft of a killed attempt is overwritten by the next.
"""

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

from accounting.errors import PolicyError, RunError, UsageError
from state.sqlite_file import connect, failed, read_identity
from state.store import RunIdentity

#: Seconds to wait for a commit that is under way.
_PATIENCE = 5.0
#: Pages copied between two reports of progress.
_PAGES = 4096
_SIDES = ("-wal", "-shm", "-journal")


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
            target = sqlite3.connect(draft, isolation_level=None)
            try:
                # The open transaction pins one state; other writers go on beside it.
                source.execute("BEGIN")
                source.execute("SELECT count(*) FROM meta").fetchone()

                def tell(_: int, left: int, total: int) -> None:
                    if progress is not None:
                        progress(total - left, total)

                source.backup(target, pages=_PAGES, progress=tell)
                target.execute("PRAGMA journal_mode = DELETE")
            finally:
                target.close()
        except sqlite3.Error as error:
            raise failed(error) from None
        finally:
            source.close()
        identity = check_file(draft)
        publish(draft, out)
        return identity


def refuse_existing(out: Path) -> None:
    """Nothing is overwritten."""
    if out.exists():
        raise UsageError("backup", "the file exists", "choose another name, or move it away")


@contextlib.contextmanager
def drafted(out: Path) -> Iterator[Path]:
    """An empty draft beside ``out``, for its owner only; gone when the block ends."""
    draft = out.with_name(f".{out.name}.draft")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _remove(draft)
        os.close(os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        yield draft
    except OSError as error:
        raise _no_file(error) from None
    finally:
        with contextlib.suppress(OSError):
            _remove(draft)


def _remove(path: Path) -> None:
    for name in ("", *_SIDES):
        Path(f"{path}{name}").unlink(missing_ok=True)


def _no_file(error: OSError) -> RunError:
    return RunError(
        "state.store",
        f"a file beside it cannot be written ({type(error).__name__})",
        "check the disk and its rights; the store is as it was",
    )


def check_file(path: Path) -> RunIdentity:
    """Identity of a file that is not in use, after a check of its whole content.

    Raises:
        PolicyError: damaged, or no store of this program.
    """
    db = connect(path)
    try:
        (answer,) = db.execute("PRAGMA integrity_check(1)").fetchone()
        if answer != "ok":
            raise _damaged()
        identity = read_identity(db)
        db.execute("PRAGMA journal_mode = DELETE")
        return identity
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.OperationalError):
            raise failed(error) from None
        raise _damaged() from None
    finally:
        db.close()


def _damaged() -> PolicyError:
    return PolicyError("backup", "the file is damaged", "use another backup")


def publish(draft: Path, out: Path) -> None:
    """Give the draft its name, unless a file has it; durable."""
    _sync(draft)
    if not out.exists():
        _move_sides(out, out.with_name(f"{out.name}.lost"))
    try:
        os.link(draft, out)
    except FileExistsError:
        refuse_existing(out)
    except OSError:  # a file system without hard links
        os.rename(draft, out)
    _sync(out.parent)


@contextlib.contextmanager
def alone(path: Path, damaged: bool = False) -> Iterator[sqlite3.Connection]:
    """Hold a store's file against everyone else; its write-ahead log is merged into it.

    Args:
        damaged: hold also what can no longer be read, as far as it can be held.

    Raises:
        RunError: another process has it open.
    """
    db = sqlite3.connect(path, isolation_level=None, timeout=_PATIENCE)
    try:
        try:
            db.execute("PRAGMA journal_size_limit = 0")  # a journal that is kept is empty
            # Works only for the one connection there is, and then nobody else gets in.
            db.execute("PRAGMA locking_mode = EXCLUSIVE")
            db.execute("PRAGMA journal_mode = DELETE")
            db.execute("BEGIN EXCLUSIVE")
            db.execute("COMMIT")  # the lock stays until the connection is closed
        except sqlite3.DatabaseError as error:
            code = getattr(error, "sqlite_errorname", "")
            if code.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
                raise RunError(
                    "state.store", "a run has it open", "stop the run, or wait for its end"
                ) from None
            if not damaged:
                raise failed(error) from None
        yield db
    finally:
        db.close()


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
        _sync(draft)
        _move_sides(path, aside)
        try:
            os.link(path, aside)
        except OSError:  # a file system without hard links: a moment without the name
            os.rename(path, aside)
        os.replace(draft, path)
        _sync(path.parent)
    except OSError as error:
        raise _no_file(error) from None
    return aside


def _move_sides(path: Path, aside: Path) -> None:
    """A write-ahead log that is left (of a damaged or lost file) must not meet another file."""
    for side in _SIDES:
        left = Path(f"{path}{side}")
        if left.exists() and left.stat().st_size:
            os.rename(left, f"{aside}{side}")
        else:
            left.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
