"""Private folders of one process, which are gone when it is: what workers and launchers share.

Only its owner can enter such a folder.  It has a lock, which the process that made it holds as long
as it lives: a folder whose lock is free is nobody's, and whoever makes the next one beside it
removes it, whatever its age.  It gets another name first: a worker that still runs has no folder
any more, and can put nothing into it meanwhile.
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
    """A new folder that only its owner can enter, gone at the end unless it was renamed.

    Folders beside it that are nobody's are removed.  What is to be renamed lies in the folder
    ``files`` in it, which is empty.

    Args:
        beside: folder in which it is made; field: what an error calls that.

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
    """Remove the folders of launchers that are gone; what cannot be removed stays."""
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
