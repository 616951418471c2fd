"""Integer noise of nodes by inverse CDF at uniforms named by them: from tables, or geometric.

**From a law's table** (``TableSampler``), at a uniform of 128 bits.  The table comes from a
distribution (``accounting.mechanisms``); here it is only looked up.  A uniform has its top 32 bits
from the node's lane of a shared block and, only where these do not decide, 96 further bits from the
node's own block.  Where a table is exact and 128 bits leave an edge or a tail open, further blocks
of the node settle it: once in about 2^128 draws for each entry, so that pure-DP claims need no
delta.

The rounded Gaussian's table is rounded to 2^-128 instead: its total variation per draw is about
(table entries) * 2^-129 (mechanism.md section 5).

**Uniform bits** are named by nodes: lanes of shared AES blocks, and blocks of each node's own.
With n lanes in a block, node v under tweak t has lane v mod n of the block AES(t xor (v div n))
and, drawn only where these bits do not decide, its own block AES(t xor (v, 2^63)), and after it
AES(t xor (v, 2^63 + 1)) and so on.  The upper word keeps the kinds of input apart.

**Two-sided geometric** noise (``GeometricNodes``) is exact at every scale: P[Z = k] is proportional
to e^(-|k| / scale).  A uniform is real: its first 64 bits are the node's lane of a shared block,
its further bits the node's own block and those after it, which are drawn only where floats with an
error bound leave an integer's edge open.  Then balls decide (``mechanisms.laws.settle``), with as
many bits as it takes: there is no table, no cut tail and no float error, so that the total
variation from the law is 0, given uniform AES blocks, and a plain epsilon needs no delta for it.

**Truncated** geometric noise (``TruncatedNodes``) is of a count that is tested once and then
published.  ``mechanisms.optimum`` has the law, its coin and the proof.  A key has two nodes: node 0
is the uniform at which the noise is drawn exactly, and the first bits of node 1 are the coin.  The
test compares count + noise + coin with k: where the coin replaces k by k - 1 the count needs one
unit less.  The published count has the noise without the coin.  Both read the same nodes.
"""

import hashlib
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flint
import numpy as np
import numpy.typing as npt
from typing_extensions import override

from dpstream.accounting.arrays import Ids, Int32, Int64
from dpstream.accounting.errors import InvariantError
from dpstream.accounting.libraries import njit
from dpstream.accounting.limits import COIN_BITS
from dpstream.accounting.mechanisms.laws import (
    BITS,
    DiscreteLaplaceLaw,
    Table,
    TruncatedGeometricLaw,
    Uniform,
    rounded_gaussian,
    settle,
)
from dpstream.dp_transforms.noise.oneshot import (
    LEAST_SCALE,
    MAX_SCALE,
    inverse_laplace,
    inverse_truncated,
)
from dpstream.dp_transforms.noise.prf import Prf

_OWN_BLOCK = np.uint64(1 << 63)
UInt32 = npt.NDArray[np.uint32]
Words = npt.NDArray[np.uint64]
_GUIDE_BITS = 16
_AMBIGUOUS = np.iinfo(np.int32).min


class Lanes(NamedTuple):
    """Lanes, the parts of PRF blocks, of the nodes ``first[i] .. last[i] - 1`` of n rows i.

    Attributes:
        lanes: flat unsigned integers, the lanes of all blocks one after the other.
        shift: (n,) node v of row i has ``lanes[shift[i] + v]``.
        starts: (n,) index of each row's first node among the nodes of all rows.
        size: number of the nodes of all rows.
    """

    lanes: npt.NDArray[Any]
    shift: Int64
    starts: Int64
    size: int


def shared_lanes(
    prf: Prf, tweaks: Ids, first: Int64, last: Int64, kind: type[np.unsignedinteger[Any]]
) -> Lanes:
    """Return the lanes of type ``kind`` of all nodes ``first[i] .. last[i] - 1`` of all rows.

    A lane is 16 bytes' part of a block that neighbouring nodes share, so that a draw that few bits
    decide costs a part of an AES block.  Arguments are those of the samplers' ``draw``.

    Args:
        kind: unsigned integer type that a lane is read as; its size is the lane's.
    """
    bits = (16 // np.dtype(kind).itemsize).bit_length() - 1
    blocks, shift, starts, size = _name_blocks(tweaks, first, last, bits)
    return Lanes(prf.blocks(blocks).view(kind).reshape(-1), shift, starts, size)


def own_blocks(prf: Prf, tweaks: Ids, node: Int64, further: int = 0) -> Ids:
    """Return the (n, 2) block that node ``node[i]`` of the name ``tweaks[i]`` has for itself.

    Args:
        further: number of a further block of each node, where its first one left the draw open.
    """
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


class IntegerSampler(ABC):
    """A sampler of node noise whose draws are integers."""

    #: what floats may add to a draw: nothing
    error = 0.0

    @abstractmethod
    def draw(self, prf: Prf, tweaks: Ids, first: Int64, last: Int64) -> tuple[Int64 | Int32, Int64]:
        """Return noises of nodes ``first[i] .. last[i] - 1`` of each row's name.

        Args:
            prf: AES under the node key.
            tweaks: (n, 2) name of each row.
            first, last: (n,) node numbers, 0 <= first <= last.

        Returns:
            (noise, starts): flat integer noises and the (n,) index of each row's first.
        """

    def exact(self, prf: Prf, tweak: Ids, last: int) -> Callable[[int], Sequence[Any]]:
        """Return nodes ``0 .. last - 1`` of one name as a function of the precision in bits.

        The noises are integers, so that every precision gives the same exact balls.
        """
        none = np.zeros(1, np.int64)
        noise, _ = self.draw(prf, tweak.reshape(1, 2), none, none + last)
        return lambda _: [flint.arb(z) for z in noise.tolist()]


class TableSampler(IntegerSampler):
    """Sampler of one table of a law.

    Args:
        table: thresholds of the law (``accounting.mechanisms.laws``).
    """

    def __init__(self, table: Table) -> None:
        thresholds = table.thresholds
        self.lowest = table.lowest
        self._law = table.law if table.exact else None
        self._high = np.array([t >> 64 for t in thresholds], np.uint64)
        self._low = np.array([t & (2**64 - 1) for t in thresholds], np.uint64)
        self._top = np.array([t >> (BITS - 32) for t in thresholds], np.uint32)
        self._first, self._last = _guide(thresholds)
        self._guide = np.where(
            self._first == self._last, self._first + self.lowest, _AMBIGUOUS
        ).astype(np.int32)
        #: names the table in the names of its nodes: another sd or law is other noise
        self.digest = hashlib.blake2b(
            self._high.tobytes() + self._low.tobytes(), digest_size=16, person=table.law.label
        ).digest()

    @override
    def draw(self, prf: Prf, tweaks: Ids, first: Int64, last: Int64) -> tuple[Int32, Int64]:
        shared = shared_lanes(prf, tweaks, first, last, np.uint32)
        noise = np.empty(shared.size, np.int32)
        rows = np.empty(shared.size, np.int32)
        unsure = np.empty(shared.size, np.int64)
        table = (self._first, self._last, self._top, self.lowest)
        count = _look_up(*shared[:3], first, last, self._guide, table, noise, unsure, rows)
        if count:
            self._decide(prf, tweaks, first, shared, unsure[:count], rows[:count], noise)
        return noise, shared.starts

    def _decide(
        self,
        prf: Prf,
        tweaks: Ids,
        first: Int64,
        shared: Lanes,
        unsure: Int64,
        rows: Int32,
        noise: Int32,
    ) -> None:
        """Settle the nodes whose top bits straddle a threshold with their own block."""
        node = first[rows] + (unsure - shared.starts[rows])
        bits = own_blocks(prf, tweaks[rows], node)
        lane = shared.lanes[shared.shift[rows] + node].astype(np.int64)
        _search(
            lane, bits, self._first, self._last, self._high, self._low, self.lowest, unsure, noise
        )
        if self._law is not None:
            for at in np.flatnonzero(self._open(lane, bits, noise[unsure])):
                top_bits = int(lane[at]) << 96 | int(bits[at, 1]) << 32 | int(bits[at, 0]) >> 32
                name = tweaks[rows[at]].reshape(1, 2)
                further = _further(prf, name, node[at], top_bits, 128, drawn=1)
                noise[unsure[at]] = settle(self._law, further)

    def _open(self, lane: Int64, bits: Ids, value: Int32) -> npt.NDArray[np.bool_]:
        """Which 128-bit uniforms hold an edge or a tail of the law."""
        high, low = _uniform(lane, bits)
        # A tie is one below the next threshold, and below 2^128 where there is none.
        next_ = value.astype(np.int64) - self.lowest
        edge = next_ < self._high.size
        next_ = np.where(edge, next_, 0)
        tie_low = np.where(edge, self._low[next_], np.uint64(0)) - np.uint64(1)
        borrow = (tie_low == np.uint64(2**64 - 1)).astype(np.uint64)
        tie_high = np.where(edge, self._high[next_], np.uint64(0)) - borrow
        tie = (high == tie_high) & (low == tie_low)
        return np.asarray(tie | ((high == 0) & (low == 0)))


class RoundedGaussian(TableSampler):
    """Sampler of one sd: Z = round(N), N ~ Normal(0, sigma^2).

    Args:
        sigma: sd of the Gaussian before rounding, in grid units (0 < sigma <= MAX_SIGMA).
    """

    def __init__(self, sigma: float) -> None:
        super().__init__(rounded_gaussian(sigma))
        self.sigma = sigma


def _uniform(lane: Int64, bits: Ids) -> tuple[Words, Words]:
    """32 bits of the lane, then the upper 96 bits of the node's own block, as two words."""
    high = (lane.astype(np.uint64) << np.uint64(32)) | (bits[:, 1] >> np.uint64(32))
    return high, (bits[:, 1] << np.uint64(32)) | (bits[:, 0] >> np.uint64(32))


def _further(prf: Prf, name: Ids, node: int, top: int, bits: int, drawn: int = 0) -> Uniform:
    """The uniform of one node for ``settle``, which asks for as many bits as it needs.

    Args:
        name: (1, 2) the name of the row.
        top: its first bits, ``bits`` of them; with those of so many (``drawn``) of its own blocks.
    """

    def uniform(blocks: int) -> tuple[int, int]:
        value, number = top, np.array([node])
        for block in range(drawn, drawn + blocks):
            low, high = own_blocks(prf, name, number, block)[0].tolist()
            value = value << 128 | high << 64 | low
        return value, bits + 128 * blocks

    return uniform


def _guide(thresholds: list[int]) -> tuple[Int32, Int32]:
    """For each value of the top 16 bits the first and last result index it can give."""
    tops = np.array([t >> (BITS - _GUIDE_BITS) for t in thresholds], np.int64)
    exact = np.array([t & ((1 << (BITS - _GUIDE_BITS)) - 1) == 0 for t in thresholds])
    cells = np.arange(1 << _GUIDE_BITS)
    # result index of U = number of thresholds <= U
    first = np.searchsorted(tops + ~exact, cells, side="right")
    last = np.searchsorted(tops, cells, side="right")
    return first.astype(np.int32), last.astype(np.int32)


@njit(cache=True, nogil=True)
def _look_up(
    lanes: UInt32,
    shift: Int64,
    starts: Int64,
    first: Int64,
    last: Int64,
    guide: Int32,
    table: tuple[Int32, Int32, UInt32, int],
    noise: Int32,
    unsure: Int64,
    rows: Int32,
) -> int:  # pragma: no cover - compiled
    lower, upper, top, lowest = table
    count = 0
    for i in range(first.size):
        row_shift = shift[i]
        for node in range(first[i], last[i]):
            at = starts[i] + node - first[i]
            lane = lanes[row_shift + node]
            value = guide[lane >> 16]
            if value == _AMBIGUOUS:
                begin, end = lower[lane >> 16], upper[lane >> 16]
                stop = end
                while begin < end:
                    middle = (begin + end) // 2
                    if top[middle] < lane:
                        begin = middle + 1
                    else:
                        end = middle
                value = begin + lowest
                if begin < stop and top[begin] == lane:
                    unsure[count] = at
                    rows[count] = i
                    count += 1
            noise[at] = value
    return count


@njit(cache=True, nogil=True)
def _search(
    lane: Int64,
    bits: Ids,
    first: Int32,
    last: Int32,
    high: Ids,
    low: Ids,
    lowest: int,
    unsure: Int64,
    noise: Int32,
) -> None:  # pragma: no cover - compiled
    for i in range(lane.size):
        # U = 32 bits of the lane, then the upper 96 bits of the node's own block.
        u_high = (np.uint64(lane[i]) << np.uint64(32)) | (bits[i, 1] >> np.uint64(32))
        u_low = (bits[i, 1] << np.uint64(32)) | (bits[i, 0] >> np.uint64(32))
        begin, end = first[lane[i] >> 16], last[lane[i] >> 16]
        while begin < end:
            middle = (begin + end) // 2
            below = high[middle] < u_high or (high[middle] == u_high and low[middle] <= u_low)
            if below:
                begin = middle + 1
            else:
                end = middle
        noise[unsure[i]] = begin + lowest


class GeometricNodes(IntegerSampler):
    """Sampler of two-sided geometric noise of one scale.

    Args:
        scale: in grid units, LEAST_SCALE <= scale <= MAX_SCALE of one-shot draws.

    Raises:
        ValueError: the scale is outside this range.
    """

    def __init__(self, scale: float) -> None:
        if not LEAST_SCALE <= scale <= MAX_SCALE:
            raise ValueError("scale is outside the sampler's range")
        self._scale = scale
        self._law = DiscreteLaplaceLaw(scale)
        #: names the law in the names of its nodes: another scale is other noise
        self.digest = hashlib.blake2b(
            b"two-sided geometric of nodes" + struct.pack("<d", scale), digest_size=16
        ).digest()

    @override
    def draw(self, prf: Prf, tweaks: Ids, first: Int64, last: Int64) -> tuple[Int64, Int64]:
        shared = shared_lanes(prf, tweaks, first, last, np.uint64)
        counts = last - first
        rows = np.repeat(np.arange(len(first)), counts)
        nodes = first[rows] + np.arange(shared.size) - shared.starts[rows]
        words = shared.lanes[shared.shift[rows] + nodes]
        noise, undecided = inverse_laplace(words, self._scale)
        for at in np.flatnonzero(undecided).tolist():
            name = tweaks[rows[at]].reshape(1, 2)
            noise[at] = settle(self._law, _further(prf, name, int(nodes[at]), int(words[at]), 64))
        return noise, shared.starts


class TruncatedNodes(IntegerSampler):
    """Sampler of truncated geometric noise of one law.

    Args:
        scale: LEAST_SCALE <= scale <= MAX_SCALE of one-shot draws.
        most: k; sooner: the coin's chance of k - 1, in 2^-32.
        tested: whether draws are noise + coin, for the test.

    Raises:
        ValueError: a number is outside its range.
    """

    def __init__(self, scale: float, most: int, sooner: int, tested: bool = False) -> None:
        if not (LEAST_SCALE <= scale <= MAX_SCALE and most >= 1 and 0 <= sooner < 1 << COIN_BITS):
            raise ValueError("the law is outside the sampler's range")
        self._scale, self._most, self._sooner, self._tested = scale, most, sooner, tested
        #: names the law in the names of its nodes: another one is other noise
        self.digest = hashlib.blake2b(
            b"truncated geometric of nodes" + struct.pack("<dqq", scale, most, sooner),
            digest_size=16,
        ).digest()

    @override
    def draw(self, prf: Prf, tweaks: Ids, first: Int64, last: Int64) -> tuple[Int64, Int64]:
        """Return noise of the one node of each row's name; see ``IntegerSampler.draw``.

        Raises:
            InvariantError: more than one node of a name is asked for.
        """
        if ((first > 0) | (last > 1)).any():
            raise InvariantError("truncated noise is of one step")
        count = len(first)
        shared = shared_lanes(prf, tweaks, 0 * first, np.full(count, 2), np.uint64)
        at = shared.shift + np.zeros(count, np.int64)
        words, coins = shared.lanes[at], shared.lanes[at + 1]
        less = (coins >> np.uint64(64 - COIN_BITS)).astype(np.int64) < self._sooner
        most = self._most - less
        noise, undecided = inverse_truncated(words, self._scale, most)
        for row in np.flatnonzero(undecided).tolist():
            law = TruncatedGeometricLaw(self._scale, int(most[row]))
            name = tweaks[row].reshape(1, 2)
            noise[row] = settle(law, _further(prf, name, 0, int(words[row]), 64))
        if self._tested:
            noise = noise + less
        drawn = last > first
        return noise[drawn], np.cumsum(drawn) - drawn
