"""Paths in job files, catalogs and tables: they start from a folder, and none may be a URL."""

import re
from pathlib import Path

from dpstream.accounting.errors import UsageError

#: One slash: a URL that was normalised as a path has lost the other.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")


def below(folder: Path, path: str, field: str) -> Path:
    """A path that starts from a folder.

    Args:
        field: the public name of what gives it.

    Raises:
        UsageError: it is a URL; read as a path it would name a local file.
    """
    refuse_url(path, field)
    return folder / path


def refuse_url(path: str, field: str) -> None:
    """Refuse a URL where local paths alone are read or written.

    Raises:
        UsageError: it is one; the rest of it, which may hold a password, is not shown.
    """
    scheme = _SCHEME.match(path)
    if scheme is not None:
        raise UsageError(
            field,
            f"is a URL ({scheme[1]}://...), and only paths of this machine are supported here",
            "copy the files to this machine or mount them, and name their path",
        )
