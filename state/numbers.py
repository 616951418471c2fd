"""Columns of Arrow as arrays of NumPy, and masks in both directions.

Arrow's own ``to_numpy`` makes floats of integers with NULLs, and takes 20 times as long for bits.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dpstream.accounting.arrays import Bool


def mask(values: Bool) -> pa.Array:
    """Return booleans as Arrow."""
    bits = pa.py_buffer(np.packbits(values, bitorder="little"))
    return pa.Array.from_buffers(pa.bool_(), len(values), [None, bits])


def values_of(column: pa.Array | pa.ChunkedArray) -> npt.NDArray[Any]:
    """Return a column of numbers without a copy; the number at a NULL is arbitrary."""
    column = one_array(column)
    data = [None, column.buffers()[1]]
    present = pa.Array.from_buffers(column.type, len(column), data, offset=column.offset)
    return np.asarray(present.to_numpy())


def mask_of(column: pa.Array | pa.ChunkedArray) -> Bool:
    """Return a column of booleans; False at a NULL."""
    column = one_array(column)
    valid, bits = column.buffers()
    flags = _bits(bits, column)
    return flags if valid is None else flags & _bits(valid, column)


def valid_of(column: pa.Array | pa.ChunkedArray) -> Bool:
    """Return (n,) whether each value of a column is not NULL."""
    column = one_array(column)
    valid = column.buffers()[0]
    if pa.types.is_null(column.type):
        return np.zeros(len(column), np.bool_)
    return np.ones(len(column), np.bool_) if valid is None else _bits(valid, column)


def one_array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return a column as one array, without a copy where it is one."""
    if isinstance(column, pa.Array):
        return column
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _bits(buffer: pa.Buffer | None, column: pa.Array) -> Bool:
    end = column.offset + len(column)
    packed = np.frombuffer(buffer or b"", np.uint8)
    unpacked = np.unpackbits(packed[: (end + 7) // 8], count=end, bitorder="little")
    return unpacked[column.offset :].view(np.bool_)
