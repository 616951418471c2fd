"""Lines of texts, in blocks of a fixed size: one line is one row, whatever the others are."""

from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.accounting import limits
from dpstream.accounting.arrays import Bool, Int32, Int64, UInt8
from dpstream.pipelines.formats.rows import Part, Reason, Refused, runs

BLOCK_BYTES = 8 << 20
MAX_LINE_BYTES = 1 << 20
BOM = b"\xef\xbb\xbf"


class BrokenFileError(Exception):
    """Signals that a file is incomplete, or no text, and carries nothing of it."""


class NoLineBreakError(BrokenFileError):
    """Signals a text with too long a line, which a record can bring about."""


def line_blocks(
    stream: BinaryIO, skipped: int = 0, mark: bytes = b""
) -> Iterator[tuple[int, pa.BinaryArray]]:
    """Yield blocks of non-blank lines, each with its line feed, and the first one's row number.

    A line longer than `MAX_LINE_BYTES` comes out cut, but still longer than that; memory is
    bounded whatever the file holds, and so is the time until the next block.

    Args:
        stream: an open file at its beginning.
        skipped: so many lines at its beginning are left out.
        mark: is none of the first line's, where it begins with it.

    Raises:
        NoLineBreakError: a line is longer than `limits.MAX_UNBROKEN_BYTES`, which is no text.
    """
    row, carry, unbroken = 0, b"", 0
    while True:
        data = stream.read(BLOCK_BYTES).removeprefix(mark)
        mark = b""
        end = data.rfind(b"\n") + 1
        unbroken = len(data) - end + (0 if end else unbroken)
        if unbroken > limits.MAX_UNBROKEN_BYTES:
            raise NoLineBreakError
        block = b"".join([carry, memoryview(data)[:end]]) if end else b""
        carry = (data[end:] if end else carry + data)[: MAX_LINE_BYTES + 2]
        if not data:
            block, carry = carry + b"\n" if carry else b"", b""
        while block and skipped:
            block, skipped = block.partition(b"\n")[2], skipped - 1
        lines = lines_in(block)
        if len(lines):
            yield row, lines
            row += len(lines)
        if not data:
            return


def lines_in(block: bytes) -> pa.BinaryArray:
    """Return the non-blank lines of a block that is empty or ends in a line feed."""
    lines, blank = split(block)
    return lines.filter(pa.array(~blank)) if blank.any() else lines


def split(block: bytes) -> tuple[pa.BinaryArray, Bool]:
    """Return the lines of a block that is empty or ends in a line feed, and which of them are
    blank.
    """
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
    """Return the bytes of n lines without gaps (no copy), and the (n + 1,) offsets of the lines."""
    _, offsets, data = lines.buffers()
    ends = np.frombuffer(offsets, np.int32)[lines.offset : lines.offset + len(lines) + 1]
    return np.frombuffer(data, np.uint8)[ends[0] : ends[-1]], ends - ends[0]


def too_long(lines: pa.BinaryArray) -> Bool:
    """Return (n,) whether each line has over `MAX_LINE_BYTES` before its line feed."""
    sizes = pc.binary_length(lines).to_numpy()
    return np.asarray(sizes > MAX_LINE_BYTES + 1)


def with_nul(lines: pa.BinaryArray) -> Bool:
    """Return (n,) whether each line has a NUL byte."""
    if not len(lines) or np.frombuffer(lines.buffers()[2], np.uint8).all():
        return np.zeros(len(lines), np.bool_)
    return np.asarray(pc.match_substring(lines, "\0").to_numpy(zero_copy_only=False))


class Lines(NamedTuple):
    """The decoded lines.

    Attributes:
        good: numbers of the lines that are rows; ``batch``: these rows, if there are any.
        bad: numbers of the others; ``reasons``: one for each.
    """

    good: Int64
    batch: pa.RecordBatch | None
    bad: Int64
    reasons: list[str]

    def parts(self, row: int) -> Iterator[Part]:
        """Yield the rows and refused positions of lines, the first of which has this number."""
        if self.reasons:
            yield Refused(row + self.bad, self.reasons)
        if self.batch is not None:
            yield from runs(row + self.good, self.batch)


def lines_of(good: Bool, malformed: Bool, longer: Bool, batch: pa.RecordBatch | None) -> Lines:
    """Return decoded lines by their fault: too long, malformed, or else of another width."""
    bad = np.flatnonzero(~good)
    reasons = np.where(malformed[bad], Reason.MALFORMED.value, Reason.FIELD_COUNT.value)
    reasons = np.where(longer[bad], Reason.LINE_TOO_LONG.value, reasons)
    return Lines(np.flatnonzero(good), batch, bad, reasons.tolist())
