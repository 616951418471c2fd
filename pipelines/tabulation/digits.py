"""Columns of decimal digits of a fixed width as numbers, without a loop over rows."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.accounting.arrays import Bool, Int64


def numbers_of(column: pa.StringArray, width: int) -> tuple[Int64, Bool]:
    """What texts of exactly ``width`` ASCII digits are as numbers.

    Args:
        column: without nulls; width: at most 18.

    Returns:
        ((n,) int64, 0 where a text is of another form; (n,) which texts are of this one).
    """
    sizes = pc.binary_length(column).to_numpy()
    good = sizes == width
    if not good.all():
        column = pc.if_else(pa.array(good), column, "0" * width)
    digits = _bytes_of(column).reshape(-1, width) - np.uint8(ord("0"))
    out = np.zeros(len(digits), np.int64)
    for place in range(width):
        out *= 10
        out += digits[:, place]
    bad = (digits > 9).any(axis=1)
    if bad.any():
        good = good & ~bad
        out[bad] = 0
    return out, np.asarray(good)


def _bytes_of(column: pa.StringArray) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """The bytes of all texts, one after the other."""
    _, offsets, data = column.buffers()
    if data is None:
        return np.zeros(0, np.uint8)
    ends = np.frombuffer(offsets, np.int32)[column.offset : column.offset + len(column) + 1]
    return np.frombuffer(data, np.uint8)[int(ends[0]) : int(ends[-1])]
