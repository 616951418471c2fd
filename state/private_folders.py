"""Private folders of one process, which are removed after it: workers and launchers share them.

Only its owner can read such a folder.  It has a lock, which the process that made it holds as long
as it lives: a folder whose lock is free is abandoned, and the next process that makes one beside it
removes it, whatever its age.  It is renamed first, so that a worker that still runs cannot write
into it meanwhile.
"""

import contextlib
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from dpstream.state.disk_errors import file_errors
from dpstream.state.locks import free, held

_FOLDER, _MAKING, _LOCK = ".dpstream-work-", "making", "lock"
#: Before the name of a folder that is being removed.
_GONE = f"{_FOLDER}gone-"
#: Where there are no locks, or none yet, a folder is nobody's after a day.
_DAY = 86_400.0


@contextlib.contextmanager
def private_folder(beside: Path, field: str) -> Iterator[Path]:
    """Yield a new folder that only its owner can read; it is removed at the end unless renamed.

    Abandoned folders beside it are removed.  Files that are to be renamed belong in the empty
    folder ``files`` in it.

    Args:
        beside: the parent folder.
        field: the name of the parent folder in an error.

    Raises:
        RunError: it cannot be made.
    """
    sweep(beside)
    with contextlib.ExitStack() as stack:
        with file_errors(field, "has a folder that cannot be written"):
            folder = Path(tempfile.mkdtemp(prefix=_FOLDER, dir=beside))
            stack.callback(_discard, folder)
            stack.enter_context(held(folder / _MAKING))
            (folder / _MAKING).rename(folder / _LOCK)  # from here on it may be looked at
            (folder / "files").mkdir(mode=0o700)
        yield folder / "files"


def sweep(beside: Path) -> None:
    """Remove abandoned folders of launchers; a folder that cannot be removed stays."""
    for folder in beside.glob(f"{_FOLDER}*"):
        with contextlib.suppress(OSError):
            if folder.name.startswith(_GONE):  # whoever began that was killed
                shutil.rmtree(folder, ignore_errors=True)
            elif (folder / _LOCK).exists():
                with free(folder / _LOCK) as nobodys:
                    _remove(folder, nobodys)
            else:
                _remove(folder, None)


def _remove(folder: Path, nobodys: bool | None) -> None:
    if nobodys is None:
        nobodys = time.time() - folder.stat().st_mtime > _DAY
    if nobodys:
        _discard(folder)


def _discard(folder: Path) -> None:
    gone = folder.with_name(f"{_GONE}{secrets.token_hex(8)}")
    with contextlib.suppress(OSError):  # somebody else has swept it
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
