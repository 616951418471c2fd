"""Rows as blocks for ``Prf.mac``: length-prefixed, typed components, so that a row has one reading.

Rows are assembled by numpy where all have one length, else by Arrow, which copies bytes about as
fast as a compiled loop.  So a question that needs ids does not wait for the compiler.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.accounting.arrays import Ids, Int64

Bytes = npt.NDArray[np.uint8]
#: A component, as (type tag, data bytes, (n+1,) offsets of its rows).
Component = tuple[int, Bytes, Int64]
_BLOCK = 16
#: What stands before a component's data, and before that of a row's first one.
_PREFIX = np.dtype([("tag", "u1"), ("width", "<u4")])
_FIRST = np.dtype([("size", "<u8"), ("context", "<i8"), *_PREFIX.descr])


def frame(context: Int64, components: Sequence[Component]) -> tuple[Ids, Int64]:
    """Length-prefixed, typed rows as blocks for ``Prf.mac``.

    Args:
        context: (n,) int64 mixed into the first block (a privacy period, or 0).
        components: for each column (type tag, data bytes, (n+1,) offsets).

    Returns:
        (blocks, lengths): the first block of a row is (total bytes, context).
    """
    rows, widths = len(context), [np.diff(offsets) for _, _, offsets in components]
    alike = rows > 0 and all((width == width[0]).all() for width in widths)
    if alike:  # one row's arithmetic is all rows'
        widths = [width[:1] for width in widths]
    size = np.full(len(widths[0]), len(components) * _PREFIX.itemsize)
    for width in widths:
        size += width
    blocks = (size + (_BLOCK - 1)) // _BLOCK
    prefixes = [np.empty(rows, _PREFIX if number else _FIRST) for number in range(len(components))]
    prefixes[0]["size"], prefixes[0]["context"] = size, context
    for prefix, width, (tag, _, _) in zip(prefixes, widths, components, strict=True):
        prefix["tag"], prefix["width"] = tag, width
    if alike:
        lengths = np.full(rows, 1 + blocks[0])
        return _of_one_width(prefixes, components, int(lengths[0])), lengths
    return _joined(prefixes, components, _BLOCK * blocks - size), 1 + blocks


def _bytes(prefix: npt.NDArray[np.void]) -> Bytes:
    return prefix.view(np.uint8)


def _of_one_width(
    prefixes: Sequence[npt.NDArray[np.void]], components: Sequence[Component], blocks: int
) -> Ids:
    """Rows of so many blocks, whose components have one width each."""
    rows, at = len(prefixes[0]), 0
    message = np.zeros((rows, 2 * blocks), np.uint64)
    out = message.view(np.uint8)
    for prefix, (_, data, offsets) in zip(prefixes, components, strict=True):
        for part in (_bytes(prefix), data[offsets[0] : offsets[-1]]):
            width = len(part) // rows
            out[:, at : at + width] = part.reshape(rows, width)
            at += width
    return message.reshape(-1, 2)


def _joined(
    prefixes: Sequence[npt.NDArray[np.void]], components: Sequence[Component], padding: Int64
) -> Ids:
    """Rows of any widths; ``padding``: (n,) zero bytes at the end of each."""
    rows, parts = len(padding), list[tuple[Bytes, Int64]]()
    for prefix, (_, data, offsets) in zip(prefixes, components, strict=True):
        parts += [(_bytes(prefix), np.arange(rows + 1) * prefix.itemsize), (data, offsets)]
    ends = np.zeros(rows + 1, np.int64)
    np.cumsum(padding, out=ends[1:])
    parts.append((np.zeros(int(ends[-1]), np.uint8), ends))
    total = sum(int(offsets[-1] - offsets[0]) for _, offsets in parts)
    largest = max(total, *(int(offsets[-1]) for _, offsets in parts))
    kind, index = (pa.binary(), np.int32) if largest < 1 << 31 else (pa.large_binary(), np.int64)
    columns = []
    for data, offsets in parts:
        buffers = [None, pa.py_buffer(offsets.astype(index)), pa.py_buffer(data)]
        columns.append(pa.Array.from_buffers(kind, rows, buffers))
    joined = pc.binary_join_element_wise(*columns, pa.scalar(b"", kind))
    return np.frombuffer(joined.buffers()[2] or b"", np.uint64, total // 8).reshape(-1, 2)
