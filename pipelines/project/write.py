"""Writing the project file: whole and durable, with the rights that it has, and never over what
another program has written meanwhile."""

import stat
from pathlib import Path

from dpstream.accounting.errors import PolicyError
from dpstream.state.disk_errors import file_errors
from dpstream.state.durable import put_once, replacing


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
        with replacing(path, stat.S_IMODE(path.stat().st_mode)) as draft:
            draft.write_bytes(text.encode())
            if path.read_bytes() != before:
                raise changed
