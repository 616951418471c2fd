"""Lines of a text file in blocks of a fixed size: one line is one row, in bounded memory.

Rows are the non-blank lines, numbered from 0 (a CSV header is not a row).  No setting changes
the size of a block, and nothing that is decided about a line depends on the block it is in.
"""

from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.accounting.arrays import Bool, Int32, Int64, UInt8
from dpstream.pipelines.formats.rows import Reason

BLOCK_BYTES = 8 << 20
MAX_LINE_BYTES = 1 << 20
BOM = b"\xef\xbb\xbf"


def line_blocks(stream: BinaryIO, header: bool = False) -> Iterator[tuple[int, pa.BinaryArray]]:
    """Blocks of non-blank lines, each with its line feed, and the first one's row number.

    A line longer than `MAX_LINE_BYTES` comes out cut, but still longer than that; memory is
    bounded whatever the file holds.

    Args:
        stream: an open file at its beginning.
        header: skip the first line.
    """
    row, carry = 0, b""
    while True:
        data = stream.read(BLOCK_BYTES)
        end = data.rfind(b"\n") + 1
        block = b"".join([carry, memoryview(data)[:end]]) if end else b""
        carry = (data[end:] if end else carry + data)[: MAX_LINE_BYTES + 2]
        if not data:
            block, carry = carry + b"\n" if carry else b"", b""
        if block and header:
            block, header = block.partition(b"\n")[2], False
        lines = lines_in(block)
        if len(lines):
            yield row, lines
            row += len(lines)
        if not data:
            return


def lines_in(block: bytes) -> pa.BinaryArray:
    """The non-blank lines of a block that is empty or ends in a line feed."""
    lines, blank = split(block)
    return lines.filter(pa.array(~blank)) if blank.any() else lines


def split(block: bytes) -> tuple[pa.BinaryArray, Bool]:
    """The lines of a block that is empty or ends in a line feed, and which of them are blank."""
    if not block:
        return pa.array([], pa.binary()), np.zeros(0, np.bool_)
    ends = np.flatnonzero(np.frombuffer(block, np.uint8) == 10).astype(np.int32) + 1
    offsets = np.concatenate([np.zeros(1, np.int32), ends])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(block)]
    lines = pa.Array.from_buffers(pa.binary(), len(ends), buffers)
    size = np.diff(offsets)
    blank = size == 1
    if (size == 2).any():
        blank |= pc.equal(lines, b"\r\n").to_numpy(zero_copy_only=False)
    return lines, blank


def bytes_of(lines: pa.BinaryArray) -> tuple[UInt8, Int32]:
    """The bytes of n lines without a gap between two of them (no copy), and (n + 1,) where in them
    each line begins, and the last one ends."""
    _, offsets, data = lines.buffers()
    ends = np.frombuffer(offsets, np.int32)[lines.offset : lines.offset + len(lines) + 1]
    return np.frombuffer(data, np.uint8)[ends[0] : ends[-1]], ends - ends[0]


def too_long(lines: pa.BinaryArray) -> Bool:
    """Which lines hold more than `MAX_LINE_BYTES` before their line feed."""
    sizes = pc.binary_length(lines).to_numpy()
    return np.asarray(sizes > MAX_LINE_BYTES + 1)


def with_nul(lines: pa.BinaryArray) -> Bool:
    """Which lines hold a NUL byte."""
    if not len(lines) or np.frombuffer(lines.buffers()[2], np.uint8).all():
        return np.zeros(len(lines), np.bool_)
    return np.asarray(pc.match_substring(lines, "\0").to_numpy(zero_copy_only=False))


class Lines(NamedTuple):
    """What lines have become.

    Attributes:
        good: numbers of the lines that are rows; ``batch``: these rows, if there are any.
        bad: numbers of the others; ``reasons``: one for each.
    """

    good: Int64
    batch: pa.RecordBatch | None
    bad: Int64
    reasons: list[str]


def lines_of(good: Bool, malformed: Bool, longer: Bool, batch: pa.RecordBatch | None) -> Lines:
    """Lines by what is wrong with them: too long, malformed, or else of another width."""
    bad = np.flatnonzero(~good)
    reasons = np.where(malformed[bad], Reason.MALFORMED.value, Reason.FIELD_COUNT.value)
    reasons = np.where(longer[bad], Reason.LINE_TOO_LONG.value, reasons)
    return Lines(np.flatnonzero(good), batch, bad, reasons.tolist())
