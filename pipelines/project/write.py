"""Writing the project file: whole and durable, with the rights that it has, and never over what
another program has written meanwhile."""

import stat
from pathlib import Path

from dpstream.accounting.errors import PolicyError
from dpstream.state.disk_errors import file_errors
from dpstream.state.durable import put_once, replacing, sync


def write_project(path: Path, text: str, before: bytes) -> None:
    """Write a project file.

    Args:
        path: absolute; text: of the whole file.
        before: what the file had when ``text`` was made of it; empty: there was no file.

    Raises:
        PolicyError: it has something else now.
        RunError: the operating system cannot write.
    """
    changed = PolicyError(
        path.name, "was changed by another program meanwhile", "run the command again"
    )
    with file_errors(path.name, "cannot be written"):
        if not before:
            if not put_once(path, text.encode()):
                raise changed
            return
        path = path.resolve()  # a link to the file stays one
        mode = stat.S_IMODE(path.stat().st_mode)
        with replacing(path, mode) as draft:
            draft.chmod(mode)  # also what the umask takes away
            draft.write_bytes(text.encode())
            if path.read_bytes() != before:
                raise changed


def flush_project(path: Path) -> None:
    """Have a project file on disk that a command finds written as it would write it: the one that
    did so may have died before it was there.

    Raises:
        RunError: the operating system cannot do it.
    """
    with file_errors(path.name, "cannot be written"):
        path = path.resolve()
        sync(path)
        sync(path.parent)
