"""Arrays of NPZ files, with a limit on their uncompressed size.

A small file can have any uncompressed size, and the header of an array can declare one that its
bytes do not have.  Both are compared with the limit before anything is decompressed.  Arrow, which
takes long to load, is not needed here.
"""

import math
import struct
import zipfile
import zlib
from typing import IO, Any

import numpy as np
import numpy.typing as npt


class TooLargeError(Exception):
    """Signals that arrays declare more bytes than the limit."""


#: What a damaged file raises.
DAMAGED = (
    *(ValueError, EOFError, OSError, KeyError, NotImplementedError, RuntimeError, MemoryError),
    *(OverflowError, SyntaxError, TypeError, struct.error, zipfile.BadZipFile, zlib.error),
)


def arrays_of(file: IO[bytes], most: int, numbers: int = 1 << 62) -> dict[str, npt.NDArray[Any]]:
    """Return all arrays of an NPZ file.

    Args:
        file: open at its beginning; it must be seekable.
        most: limit on the bytes of all arrays together.
        numbers: limit on the numbers of each array.

    Raises:
        TooLargeError: they have more.
        ValueError, OSError, ...: `DAMAGED`; the file has another format, or is damaged.
    """
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        if sum(member.file_size for member in members) > most:
            raise TooLargeError
        for member in members:
            with archive.open(member) as stream:
                size, itemsize = _declared(stream)
                if size > numbers:
                    raise TooLargeError
                if size * itemsize > member.file_size:
                    raise ValueError
    file.seek(0)
    with np.load(file, allow_pickle=False) as held:
        return {name: held[name] for name in held.files}


def _declared(stream: IO[bytes]) -> tuple[int, int]:
    """Return the number of elements of an array by its header, and the bytes of each."""
    version = np.lib.format.read_magic(stream)
    read = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in read:
        raise ValueError
    shape, _, kind = read[version](stream)
    return math.prod(shape), int(kind.itemsize)
