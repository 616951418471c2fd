"""Uniform bits named by nodes: lanes of shared AES blocks, and one block of each node's own.

With n lanes in a block, node v under tweak t has lane v mod n of the block AES(t xor (v div n))
and, drawn only where these bits do not decide, its own block AES(t xor (v, 2^63)), and after it
AES(t xor (v, 2^63 + 1)) and so on.  The upper word keeps the kinds of input apart.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dpstream.accounting.arrays import Ids, Int64
from dpstream.accounting.compiled import njit
from dpstream.dp_transforms.noise.prf import Prf

_OWN_BLOCK = np.uint64(1 << 63)


class Lanes(NamedTuple):
    """Lanes of the nodes ``first[i] .. last[i] - 1`` of many rows.

    Attributes:
        lanes: flat lanes of all blocks, of the kind that was asked for.
        shift: (n,) node v of row i has ``lanes[shift[i] + v]``.
        starts: (n,) index of each row's first node among all rows' nodes, which are ``size``.
    """

    lanes: npt.NDArray[Any]
    shift: Int64
    starts: Int64
    size: int


def shared_lanes(
    prf: Prf, tweaks: Ids, first: Int64, last: Int64, kind: type[np.unsignedinteger[Any]]
) -> Lanes:
    """One lane of type ``kind`` for each node; arguments as those of the samplers' ``draw``."""
    bits = (16 // np.dtype(kind).itemsize).bit_length() - 1
    blocks, shift, starts, size = _name_blocks(tweaks, first, last, bits)
    return Lanes(prf.blocks(blocks).view(kind).reshape(-1), shift, starts, size)


def own_blocks(prf: Prf, tweaks: Ids, node: Int64, further: int = 0) -> Ids:
    """(n, 2) own block of node ``node[i]`` of the name ``tweaks[i]``, or a further one of it."""
    own = tweaks.copy()
    own[:, 0] ^= node.astype(np.uint64)
    own[:, 1] ^= _OWN_BLOCK | np.uint64(further)
    return prf.blocks(own)


@njit(cache=True, nogil=True)
def _name_blocks(
    tweaks: Ids, first: Int64, last: Int64, bits: int
) -> tuple[Ids, Int64, Int64, int]:  # pragma: no cover - compiled
    """Inputs of the shared blocks of 2^bits lanes, and ``Lanes.shift``, ``starts`` and ``size``."""
    shift, starts = np.empty(first.size, np.int64), np.empty(first.size, np.int64)
    size, count = 0, 0
    for i in range(first.size):
        begin = first[i] >> bits
        starts[i], shift[i] = size, (count - begin) << bits
        size += last[i] - first[i]
        if last[i] > first[i]:
            count += ((last[i] - 1) >> bits) - begin + 1
    blocks = np.empty((count, 2), np.uint64)
    at = 0
    for i in range(first.size):
        if last[i] > first[i]:
            for block in range(first[i] >> bits, ((last[i] - 1) >> bits) + 1):
                blocks[at, 0] = tweaks[i, 0] ^ np.uint64(block)
                blocks[at, 1] = tweaks[i, 1]
                at += 1
    return blocks, shift, starts, size
