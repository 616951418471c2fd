"""Exact rounded Gaussian by inverse CDF at a 128-bit uniform named by its node.

A draw is Z = round(N), N ~ Normal(0, sigma^2): for integer q, round(q + N) = q + Z, so the
analytic Gaussian calibration holds exactly for every integer shift (mechanism.md section 5).
The uniform of node v under tweak t has its top 32 bits from lane v mod 4 of the block
AES(t xor (v div 4)) and, only where these do not decide, 96 further bits from the node's own
block AES(t xor (v, 2^63)).  Thresholds are round(2^128 * Phi((k + 1/2)/sigma)) computed in
ball arithmetic, so the total variation per draw is about (table entries) * 2^-129.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import flint
import numpy as np
import numpy.typing as npt
from numba import njit

from accounting.limits import MAX_SIGMA
from dp_transforms.noise.prf import Prf

Ids = npt.NDArray[np.uint64]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt32 = npt.NDArray[np.uint32]

_BITS = 128
_PRECISION = 256
_LANES = 4
_GUIDE_BITS = 16
_AMBIGUOUS = np.iinfo(np.int32).min
_OWN_BLOCK = np.uint64(1 << 63)


class RoundedGaussian:
    """Sampler of one sd.

    Args:
        sigma: sd of the Gaussian before rounding, in grid units (0 < sigma <= MAX_SIGMA).
    """

    def __init__(self, sigma: float) -> None:
        if not 0 < sigma <= MAX_SIGMA:
            raise ValueError("sigma is outside the sampler's range")
        self.sigma = sigma
        thresholds = _thresholds(sigma)
        self.lowest = -(len(thresholds) // 2)
        self._high = np.array([t >> 64 for t in thresholds], np.uint64)
        self._low = np.array([t & (2**64 - 1) for t in thresholds], np.uint64)
        self._top = np.array([t >> (_BITS - 32) for t in thresholds], np.uint32)
        self._first, self._last = _guide(thresholds)
        self._guide = np.where(
            self._first == self._last, self._first + self.lowest, _AMBIGUOUS
        ).astype(np.int32)
        #: draws are integers: no float error
        self.error = 0.0
        self.digest = hashlib.blake2b(
            self._high.tobytes() + self._low.tobytes(), digest_size=16
        ).digest()

    def draw(self, prf: Prf, tweaks: Ids, first: Int64, last: Int64) -> tuple[Int32, Int64]:
        """Noises of nodes ``first[i] .. last[i] - 1`` of each row's name.

        Args:
            prf: AES under the node key.
            tweaks: (n, 2) name of each row.
            first, last: (n,) node numbers, 0 <= first <= last.

        Returns:
            (noise, starts): flat int32 noises and the (n,) index of each row's first.
        """
        counts = last - first
        starts = np.cumsum(counts) - counts
        block_first = first // _LANES
        block_counts = np.where(counts > 0, (last - 1) // _LANES - block_first + 1, 0)
        block_starts = np.cumsum(block_counts) - block_counts
        blocks = np.empty((int(block_counts.sum()), 2), np.uint64)
        lane_blocks(tweaks, block_first, block_counts, block_starts, blocks)
        lanes = prf.blocks(blocks).view(np.uint32).reshape(-1)
        noise = np.empty(int(counts.sum()), np.int32)
        rows = np.empty(noise.size, np.int32)
        unsure = np.empty(noise.size, np.int64)
        found = _look_up(
            lanes,
            block_first,
            block_starts,
            first,
            last,
            starts,
            self._guide,
            (self._first, self._last, self._top, self.lowest),
            noise,
            unsure,
            rows,
        )
        if found:
            self._decide(
                prf,
                tweaks,
                first,
                starts,
                unsure[:found],
                rows[:found],
                noise,
                lanes,
                block_first,
                block_starts,
            )
        return noise, starts

    def exact(self, prf: Prf, tweak: Ids, last: int) -> Callable[[int], Sequence[Any]]:
        """Nodes ``0 .. last - 1`` of one name, as a function of the precision in bits."""
        none = np.zeros(1, np.int64)
        noise, _ = self.draw(prf, tweak.reshape(1, 2), none, none + last)
        return lambda precision: [flint.arb(int(z)) for z in noise]

    def _decide(
        self,
        prf: Prf,
        tweaks: Ids,
        first: Int64,
        starts: Int64,
        unsure: Int64,
        rows: Int32,
        noise: Int32,
        lanes: UInt32,
        block_first: Int64,
        block_starts: Int64,
    ) -> None:
        """Settle the nodes whose top bits straddle a threshold with their own block."""
        node = first[rows] + (unsure - starts[rows])
        own = tweaks[rows].copy()
        own[:, 0] ^= node.astype(np.uint64)
        own[:, 1] ^= _OWN_BLOCK
        bits = prf.blocks(own)
        lane = lanes[_LANES * (block_starts[rows] - block_first[rows]) + node].astype(np.int64)
        _search(
            lane, bits, self._first, self._last, self._high, self._low, self.lowest, unsure, noise
        )


def _thresholds(sigma: float) -> list[int]:
    """round(2^128 Phi((k+1/2)/sigma)) for k = -K .. K-1, K past the 2^-130 tail."""
    flint.ctx.prec = _PRECISION
    scale = flint.arb(sigma) * flint.arb(2).sqrt()
    one = flint.arb(2) ** _BITS
    upper: list[int] = []
    k = 0
    while True:
        tail = (flint.arb(2 * k + 1) / (2 * scale)).erfc() / 2 * one
        value = int((tail + flint.arb("0.5")).floor().unique_fmpz())
        if value == 0:
            break
        upper.append(value)
        k += 1
    full = 1 << _BITS
    # P[Z <= k] = 1 - P[Z > k]; the lower half mirrors the upper: k -> -k-1.
    return list(reversed(upper)) + [full - value for value in upper]


def _guide(thresholds: list[int]) -> tuple[Int32, Int32]:
    """For each value of the top 16 bits the first and last result index it can give."""
    tops = np.array([t >> (_BITS - _GUIDE_BITS) for t in thresholds], np.int64)
    exact = np.array([t & ((1 << (_BITS - _GUIDE_BITS)) - 1) == 0 for t in thresholds])
    cells = np.arange(1 << _GUIDE_BITS)
    # result index of U = number of thresholds <= U
    first = np.searchsorted(tops + ~exact, cells, side="right")
    last = np.searchsorted(tops, cells, side="right")
    return first.astype(np.int32), last.astype(np.int32)


@njit(cache=True, nogil=True)
def lane_blocks(
    tweaks: Ids, block_first: Int64, block_counts: Int64, block_starts: Int64, blocks: Ids
) -> None:  # pragma: no cover - compiled
    """Inputs of the shared blocks of each row, numbered from ``block_first``."""
    for i in range(block_first.size):
        for k in range(block_counts[i]):
            blocks[block_starts[i] + k, 0] = tweaks[i, 0] ^ np.uint64(block_first[i] + k)
            blocks[block_starts[i] + k, 1] = tweaks[i, 1]


@njit(cache=True, nogil=True)
def _look_up(
    lanes: UInt32,
    block_first: Int64,
    block_starts: Int64,
    first: Int64,
    last: Int64,
    starts: Int64,
    guide: Int32,
    table: tuple[Int32, Int32, UInt32, int],
    noise: Int32,
    unsure: Int64,
    rows: Int32,
) -> int:  # pragma: no cover - compiled
    lower, upper, top, lowest = table
    found = 0
    for i in range(first.size):
        shift = 4 * (block_starts[i] - block_first[i])
        for node in range(first[i], last[i]):
            at = starts[i] + node - first[i]
            lane = lanes[shift + node]
            value = guide[lane >> 16]
            if value == -2147483648:
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
                    unsure[found] = at
                    rows[found] = i
                    found += 1
            noise[at] = value
    return found


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
