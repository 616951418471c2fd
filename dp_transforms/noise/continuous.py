"""Gaussian noise by inverse CDF at a 128-bit uniform named by its node, in floats and exactly.

For strategies with a real encoder (``blt`` and ``dense``): the node noise is the real
number N = sigma * Phi^-1((u + 1/2) / 2^128) with u the 128 bits of the node.  ``draw`` gives
it as float64 with a bounded error, ``exact`` as balls of any precision; what is released is
the exact rounding of a linear map of N, so the float error never shows.

u's upper 64 bits are the node's lane of a shared block (``sampler``), its lower 64 bits the first
word of the node's own block, which is drawn only in the tails and when a rounding must be settled.
"""

import ctypes
import functools
import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import Any

import flint
import numpy as np

from dpstream.accounting.arrays import Float64, Ids, Int32, Int64
from dpstream.accounting.balls import precision
from dpstream.accounting.libraries import njit, special
from dpstream.accounting.limits import MAX_REAL_SIGMA
from dpstream.dp_transforms.noise.prf import Prf
from dpstream.dp_transforms.noise.quantile import quantiles
from dpstream.dp_transforms.noise.sampler import own_blocks, shared_lanes

#: Below this the upper 64 bits alone would leave a relative error above 2^-50.
_TAIL = 2.0**-14
#: |float draw - exact draw| in sds; tests measure at most 2^-48 (scipy's ndtri and rounding).
_ERROR = 2.0**-46


class ContinuousGaussian:
    """Sampler of one sd.

    Args:
        sigma: sd in grid units, 0 < sigma <= MAX_REAL_SIGMA.
    """

    def __init__(self, sigma: float) -> None:
        if not 0 < sigma <= MAX_REAL_SIGMA:
            raise ValueError("sigma is outside the sampler's range")
        self.sigma = sigma
        self.error = sigma * _ERROR
        self.digest = hashlib.blake2b(
            b"gaussian of 128 bits" + struct.pack("<d", sigma), digest_size=16
        ).digest()

    def draw(self, prf: Prf, tweaks: Ids, first: Int64, last: Int64) -> tuple[Float64, Int64]:
        """Return the noise of nodes ``first[i] .. last[i] - 1`` of each row's name.

        Args:
            prf: AES under the node key.
            tweaks: (n, 2) name of each row.
            first, last: (n,) node numbers, 0 <= first <= last.

        Returns:
            (noise, starts): flat float64 noises within ``error`` of the exact ones, and the
            (n,) index of each row's first.
        """
        shared = shared_lanes(prf, tweaks, first, last, np.uint64)
        noise = np.empty(shared.size)
        tails, rows = np.empty(shared.size, np.int64), np.empty(shared.size, np.int32)
        count = _inverter()(*shared[:3], first, last, noise, tails, rows)
        if count:
            tails, rows = tails[:count], rows[:count]
            node = first[rows] + tails - shared.starts[rows]
            high = shared.lanes[shared.shift[rows] + node]
            noise[tails] = _far(high, own_blocks(prf, tweaks[rows], node)[:, 0])
        noise *= self.sigma
        return noise, shared.starts

    def pairs(self, prf: Prf, tweaks: Ids, node: int) -> tuple[Float64, Float64]:
        """Return one node of each name in sds, as (n,) pairs of floats within ``quantile.ERROR``.

        A pair (high, low) stands for the number high + low.  Where ``draw`` is exact to 46 bits,
        these are to about 82, which mixed cells need (`noise.mixing`).
        """
        shared = tweaks.copy()
        shared[:, 0] ^= np.uint64(node >> 1)
        high = prf.blocks(shared)[:, node & 1]
        return quantiles(high, own_blocks(prf, tweaks, np.full(1, node))[:, 0])

    def exact(self, prf: Prf, tweak: Ids, last: int) -> Callable[[int], Sequence[Any]]:
        """Return nodes ``0 .. last - 1`` of one name as a function of the precision in bits.

        Every sampler has this method: where floats leave a rounding open, the noise of a strategy
        is summed of its balls.  ``tweak``: (2,) the name.
        """
        zero, node = np.zeros(1, np.int64), np.arange(last)
        tweaks = tweak.reshape(1, 2)
        high = shared_lanes(prf, tweaks, zero, zero + last, np.uint64).lanes[:last]
        low = own_blocks(prf, np.repeat(tweaks, last, axis=0), node)[:, 0]
        bits = [(int(h) << 64) | int(low_) for h, low_ in zip(high, low, strict=True)]

        def balls(wanted: int) -> Sequence[Any]:
            with precision(wanted):
                scale = flint.arb(self.sigma) * flint.arb(2).sqrt()
                # 2 (u + 1/2) / 2^128 - 1 = (2 u + 1 - 2^128) / 2^128
                signed = [flint.arb(2 * u + 1 - (1 << 128)) / (1 << 128) for u in bits]
                return [scale * x.erfinv() for x in signed]

        return balls


def _far(high: Ids, low: Ids) -> Float64:
    """Draws in the tails from all 128 bits, in sds."""
    upper = high >> np.uint64(63) == 1
    high, low = np.where(upper, ~high, high), np.where(upper, ~low, low)
    tail = (high.astype(np.float64) + (low.astype(np.float64) + 0.5) * 2.0**-64) * 2.0**-64
    value: Float64 = special.ndtri(tail)
    return np.asarray(np.where(upper, -value, value))


@functools.cache
def _inverter() -> Any:
    """The kernel of ``draw``, with SciPy's own ``ndtri`` by its address; never cached on disk."""
    from numba.extending import get_cython_function_address

    ndtri = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double)(
        get_cython_function_address("scipy.special.cython_special", "ndtri")
    )

    @njit(nogil=True)
    def invert(
        lanes: Ids,
        shift: Int64,
        starts: Int64,
        first: Int64,
        last: Int64,
        noise: Float64,
        tails: Int64,
        rows: Int32,
    ) -> int:  # pragma: no cover - compiled
        """Fill ``noise`` in sds; returns how many ``tails`` (in ``rows``) need more bits."""
        count = 0
        for i in range(first.size):
            row_shift = shift[i]
            for node in range(first[i], last[i]):
                at = starts[i] + node - first[i]
                lane = lanes[row_shift + node]
                upper = lane >> np.uint64(63) == 1
                tail = np.float64(~lane if upper else lane) * 2.0**-64
                if tail < _TAIL:
                    tails[count] = at
                    rows[count] = i
                    count += 1
                    continue
                value = ndtri(tail)
                noise[at] = -value if upper else value
        return count

    return invert
