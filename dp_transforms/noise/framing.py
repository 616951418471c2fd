"""Rows as blocks for ``Prf.mac``: length-prefixed, typed components, so that a row has one reading.

Apart from ``prf``: a command that needs the key but draws nothing does not load the compiler.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from numba import njit

from dpstream.accounting.arrays import Ids, Int64

Bytes = npt.NDArray[np.uint8]


@njit(cache=True, nogil=True)
def _copy_component(
    out: Bytes, cursor: Int64, tag: int, data: Bytes, offsets: Int64
) -> None:  # pragma: no cover - compiled
    for i in range(cursor.size):
        length = offsets[i + 1] - offsets[i]
        at = cursor[i]
        out[at] = tag
        for byte in range(4):
            out[at + 1 + byte] = (length >> (8 * byte)) & 255
        for k in range(length):
            out[at + 5 + k] = data[offsets[i] + k]
        cursor[i] = at + 5 + length


def frame(context: Int64, components: Sequence[tuple[int, Bytes, Int64]]) -> tuple[Ids, Int64]:
    """Length-prefixed, typed rows as blocks for ``Prf.mac``.

    Args:
        context: (n,) int64 mixed into the first block (a privacy period, or 0).
        components: for each column (type tag, data bytes, (n+1,) offsets).

    Returns:
        (blocks, lengths): the first block of a row is (total bytes, context).
    """
    size = np.zeros(len(context), np.int64)
    for _, _, offsets in components:
        size += 5 + np.diff(offsets)
    lengths = 1 + (size + 15) // 16
    starts = np.cumsum(lengths) - lengths
    message = np.zeros((int(lengths.sum()), 2), np.uint64)
    message[starts, 0] = size
    message[starts, 1] = context.view(np.uint64)
    out = message.view(np.uint8).reshape(-1)
    cursor = 16 * (starts + 1)
    for tag, data, offsets in components:
        _copy_component(out, cursor, tag, data, offsets)
    return message, lengths
