"""Where a row of a folder's file stands: a function of the file's name and the row alone.

Neither the order of a listing nor another file can move it, so a file that is read again gives
the same positions.  Partition (31 bits) and base (62 bits) come from BLAKE2b-128 of the name;
offset = base + row.  Two records of one unit share a position, and count as one, with a chance
below files^2 * rows * 2^-93 (a million files of a million rows: 2^-33); a position names a record
of its unit, so records of two units never do.  The digest is not keyed: it hides nothing.
"""

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

#: Marker objects lie there; one names the files that were closed before its instant.
MARKERS = "_closed"
MAX_NAME_BYTES = 1024
#: Rows that a file is taken to have at most, where a position is looked up.
_MAX_ROWS = 1 << 48


class Place(NamedTuple):
    """A file's partition and the offset of its row 0."""

    partition: int
    base: int


def place(name: str) -> Place:
    """Position of the first row of the file ``name`` (relative to the folder, with ``/``)."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=16).digest()
    whole = int.from_bytes(digest, "big")
    return Place(whole >> 97, (whole >> 35) & ((1 << 62) - 1))


def is_name(name: str) -> bool:
    """Whether a text is the one way to write a file's name below the folder.

    Not absolute, no ``..``, ``.`` or empty component, none that begins with ``_closed``'s own
    folder, no NUL or line break, at most `MAX_NAME_BYTES`.
    """
    parts = name.split("/")
    return (
        not {"", ".", ".."} & set(parts)
        and parts[0] != MARKERS
        and not {"\0", "\n", "\r", "\\"} & set(name)
        and len(name.encode("utf-8", "surrogateescape")) <= MAX_NAME_BYTES
    )


def is_hidden(name: str) -> bool:
    """Names that a listing passes over, as other tools do: a part begins with ``_`` or ``.``."""
    return any(part.startswith(("_", ".")) for part in name.split("/"))


def find(names: Iterable[str], partition: int, offset: int) -> list[tuple[str, int]]:
    """Files and rows that a position can stand for: (name, row)."""
    found = []
    for name in names:
        at = place(name)
        if at.partition == partition and 0 <= offset - at.base < _MAX_ROWS:
            found.append((name, offset - at.base))
    return found
