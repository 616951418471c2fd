"""Exact rounded Gaussian by inverse CDF at a 128-bit uniform named by its node.

A draw is Z = round(N), N ~ Normal(0, sigma^2): for integer q, round(q + N) = q + Z, so the
analytic Gaussian calibration holds exactly for every integer shift (mechanism.md section 5).
A uniform has its top 32 bits from the node's lane of a shared block and, only where these do not
decide, 96 further bits from the node's own block (``lanes``).  Thresholds are
round(2^128 * Phi((k + 1/2)/sigma)) computed in ball arithmetic, so the total variation per draw
is about (table entries) * 2^-129.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import flint
import numpy as np
import numpy.typing as npt
from numba import njit

from dpstream.accounting.balls import precision
from dpstream.accounting.limits import MAX_SIGMA
from dpstream.dp_transforms.noise.lanes import Lanes, own_blocks, shared_lanes
from dpstream.dp_transforms.noise.prf import Prf

Ids = npt.NDArray[np.uint64]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt32 = npt.NDArray[np.uint32]

_BITS = 128
_PRECISION = 256
_GUIDE_BITS = 16
_AMBIGUOUS = np.iinfo(np.int32).min


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
        shared = shared_lanes(prf, tweaks, first, last, np.uint32)
        noise = np.empty(shared.size, np.int32)
        rows = np.empty(shared.size, np.int32)
        unsure = np.empty(shared.size, np.int64)
        table = (self._first, self._last, self._top, self.lowest)
        found = _look_up(*shared[:3], first, last, self._guide, table, noise, unsure, rows)
        if found:
            self._decide(prf, tweaks, first, shared, unsure[:found], rows[:found], noise)
        return noise, shared.starts

    def exact(self, prf: Prf, tweak: Ids, last: int) -> Callable[[int], Sequence[Any]]:
        """Nodes ``0 .. last - 1`` of one name, as a function of the precision in bits."""
        none = np.zeros(1, np.int64)
        noise, _ = self.draw(prf, tweak.reshape(1, 2), none, none + last)
        return lambda _: [flint.arb(int(z)) for z in noise]

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


def _thresholds(sigma: float) -> list[int]:
    """round(2^128 Phi((k+1/2)/sigma)) for k = -K .. K-1, K past the 2^-130 tail."""
    upper: list[int] = []
    with precision(_PRECISION):
        scale = flint.arb(sigma) * flint.arb(2).sqrt()
        one = flint.arb(2) ** _BITS
        while True:
            tail = (flint.arb(2 * len(upper) + 1) / (2 * scale)).erfc() / 2 * one
            value = int((tail + flint.arb("0.5")).floor().unique_fmpz())
            if value == 0:
                break
            upper.append(value)
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
    found = 0
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
