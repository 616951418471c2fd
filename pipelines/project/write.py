"""Writing the project file: complete and durable, with its present rights, and never over what
another
program has written meanwhile.
"""

import stat
from pathlib import Path

from dpstream.accounting.errors import PolicyError
from dpstream.state.disk_errors import file_errors
from dpstream.state.durable import put_once, replacing, sync


def write_project(path: Path, text: str, before: bytes) -> None:
    """Write a project file.

    Args:
        path: the file's absolute path.
        text: the text of the whole file.
        before: the file's text when ``text`` was made from it; empty: there was no file.

    Raises:
        PolicyError: the file has another text now.
        RunError: the operating system cannot write it.
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
    """Flush a project file to disk that already has the text a command would write.

    An earlier command that wrote it may have stopped before the file was on disk.

    Raises:
        RunError: the operating system cannot flush it.
    """
    with file_errors(path.name, "cannot be written"):
        path = path.resolve()
        sync(path)
        sync(path.parent)
