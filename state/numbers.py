"""Numbers between numpy and Arrow: without a copy, and without pandas.

Arrow imports pandas, if it is installed, at the first ``pa.array``, ``pa.scalar``, ``fill_null`` of
a value or ``to_numpy``: 0.35 CPU seconds and 51 MiB.  A question about tables need not wait for it.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dpstream.accounting.arrays import Bool


def arrow_numbers(values: npt.NDArray[Any], null: Bool | None = None) -> pa.Array:
    """Return numbers (int32, int64 or float64) as Arrow; those of ``null`` are NULL."""
    there = None if null is None else pa.py_buffer(np.packbits(~null, bitorder="little"))
    data = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(_KINDS[values.dtype.name], len(values), [there, data])


def mask(values: Bool) -> pa.Array:
    """Return booleans as Arrow."""
    bits = pa.py_buffer(np.packbits(values, bitorder="little"))
    return pa.Array.from_buffers(pa.bool_(), len(values), [None, bits])


def constant(value: int | str | bytes, kind: pa.DataType) -> pa.Scalar:
    """Return a scalar of a type."""
    if value == 0:  # of any fixed width
        return pa.Array.from_buffers(kind, 1, [None, pa.py_buffer(bytes(32))])[0]
    if isinstance(value, int):
        return arrow_numbers(np.array([value], np.int64))[0].cast(kind)
    data = value.encode() if isinstance(value, str) else value
    ends = pa.py_buffer(np.array([0, len(data)], np.int32))
    return pa.Array.from_buffers(pa.binary(), 1, [None, ends, pa.py_buffer(data)])[0].cast(kind)


def values_of(column: pa.Array | pa.ChunkedArray) -> npt.NDArray[Any]:
    """Return a column of numbers without a copy; the number at a NULL is arbitrary."""
    column = one_array(column)
    name = str(column.type)
    words = np.frombuffer(column.buffers()[1] or b"", _NAMES.get(name, name))
    return words[column.offset : column.offset + len(column)]


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


#: Types whose names are not numpy's.
_NAMES = {"halffloat": "float16", "float": "float32", "double": "float64"}
_KINDS = {"int32": pa.int32(), "int64": pa.int64(), "float64": pa.float64()}
