"""Pieces of a text file by bytes: every line is of exactly one, whatever their size.

A line is of the piece in which it begins.  The header is the line that begins the file, and is of
the first piece, which leaves it out.  A line is named by the number of its first byte in the file,
which a worker knows without what comes before its piece.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa

from dpstream.accounting.arrays import Bool, Int64
from dpstream.pipelines.formats.lines import MAX_LINE_BYTES, split

PIECE_BYTES = 16 << 20
#: Lines of a piece that are worked on together: their columns stay in the processor's cache.
BLOCK_BYTES = 4 << 20
_TAIL_BYTES = 1 << 16


class Piece(NamedTuple):
    """The lines of a file that begin at the bytes ``begin`` to ``end - 1``."""

    path: str
    begin: int
    end: int


class Lines(NamedTuple):
    """Lines of a piece, each with its line feed.

    Attributes:
        lines: (n,) binary; one that is longer than `MAX_LINE_BYTES` may be cut, to no less.
        blank: (n,) which have no character; positions: (n,) the first byte of each in the file.
        returns: whether there is a carriage return anywhere.
    """

    lines: pa.BinaryArray
    blank: Bool
    positions: Int64
    returns: bool


def pieces(path: Path, size: int = PIECE_BYTES) -> list[Piece]:
    """A file as pieces of ``size`` bytes, the last one shorter.

    Raises:
        OSError: there is no such file.
    """
    total = os.stat(path).st_size
    return [Piece(str(path), at, min(at + size, total)) for at in range(0, total, size)]


def lines_of(piece: Piece) -> Iterator[Lines]:
    """The lines of a piece, without the header, some megabytes at a time.

    Raises:
        OSError: the file cannot be read.
    """
    data, at = _content(piece)
    begin = 0
    while begin < len(data):
        end = data.find(b"\n", begin + BLOCK_BYTES) + 1 or len(data)
        block = data[begin:end]
        lines, blank = split(block if block.endswith(b"\n") else block + b"\n")
        starts = np.frombuffer(lines.buffers()[1], np.int32)[: len(lines)]
        positions = starts.astype(np.int64) + (at + begin)
        yield Lines(lines, blank, positions, b"\r" in block)
        begin = end


def _opened(path: str) -> BinaryIO:
    """A file, or an object of a store by its URL."""
    if "://" not in path:
        return open(path, "rb", buffering=0)
    from dpstream.pipelines.connectors.folder.store import Folder

    folder, _, name = path.rpartition("/")
    return Folder(folder).stream(name)


def _content(piece: Piece) -> tuple[bytes, int]:
    """The bytes of a piece's lines, and the place of the first one in the file."""
    with _opened(piece.path) as raw:
        before = max(0, piece.begin - 1)
        raw.seek(before)
        data = _read(raw, piece.end - before)
        if piece.end - before <= len(data) and not data.endswith(b"\n"):
            data += _rest_of_line(raw)
        # What comes first is the end of another piece's line, or the header.
        first = data.find(b"\n") + 1
        return (data[first:], before + first) if first else (b"", before)


def _read(raw: BinaryIO, count: int) -> bytes:
    parts, left = list[bytes](), count
    while left > 0 and (part := raw.read(left)):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _rest_of_line(raw: BinaryIO) -> bytes:
    """Up to the next line feed; of a line that is too long only so much that this shows."""
    tail = b""
    while len(tail) <= MAX_LINE_BYTES + 2 and (part := raw.read(_TAIL_BYTES)):
        head, feed, _ = part.partition(b"\n")
        tail += head + feed
        if feed:
            return tail
    return tail
