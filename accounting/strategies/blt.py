"""Buffered linear Toeplitz: near-optimal error, constant state and work per leaf, any T.

The encoder's coefficients are sums of few exponentials (Dvijotham, McMahan, Pillutla, Steinke
and Thakurta 2024),

    c_0 = 1,   c_k = sum_i omega_i theta_i^(k-1),   theta_i in (0, 1), omega_i > 0,

so that w = A^-1 z, and with it n_t = w_1 + ... + w_t, needs one buffer per exponential:

    w_t = z_t - sum_i omega_i s_i,   then   s_i <- theta_i s_i + w_t.

The encoder is real, so node noise must be too: z are Gaussians, not rounded ones, given by
128 bits of the node's name, and a decoded prefix is the exact rounding of an exact real number
(``convolution``).  Sensitivity: as there.  The total variation from a true Gaussian's release
is that of a 128-bit uniform: the chance that 2^-128 in a uniform moves n_t over a rounding
boundary, below 2^-100 per release for every T.

theta and omega (``blt_table``) minimise the mean squared error for each power of two; T uses
the next one.  Mean error is 2% below the square-root Toeplitz matrix's up to T = 10^4.
"""

import functools
from collections.abc import Sequence
from typing import Any

import flint
import numpy as np
import numpy.typing as npt
from numba import njit
from scipy.signal import lfilter
from typing_extensions import override

from accounting.limits import DECODE_BITS
from accounting.strategies.base import Float64, Int64
from accounting.strategies.blt_table import EXPONENTIALS
from accounting.strategies.convolution import ROUND_UP, ConvolutionStrategy, series_quotient

_SCALE = float(1 << DECODE_BITS)
_UNIT_ROUND_OFF = 2.0**-53


class BltStrategy(ConvolutionStrategy):
    """BLT with the tabulated exponentials, up to MAX_TRIGGERS."""

    name = "blt"
    rounds_nodes = False
    state_dtype = np.float64

    def __init__(self, triggers: int) -> None:
        super().__init__(triggers)
        row = max(min(EXPONENTIALS), (triggers - 1).bit_length())
        self.theta, self.omega = (np.array(numbers) for numbers in EXPONENTIALS[row])

    @override
    def coefficients(self) -> Float64:
        lag = np.arange(self.triggers - 1, dtype=np.float64)
        tail = sum(o * np.power(t, lag) for t, o in zip(self.theta, self.omega, strict=True))
        return np.concatenate([[1.0], tail])[: self.triggers]

    def _polynomials(self, ring: Any) -> tuple[list[Any], list[Any]]:
        """(Q, P) with 1/c = Q/P: Q = prod(1 - theta_i x), P = Q + x sum omega_i Q/(1-theta_i x)."""
        thetas, omegas = ([ring(float(v)) for v in row] for row in (self.theta, self.omega))
        top = _product(thetas, ring)
        bottom = list(top)
        for i, omega in enumerate(omegas):
            for k, term in enumerate(_product(thetas[:i] + thetas[i + 1 :], ring)):
                bottom[k + 1] += omega * term
        return top, bottom

    @override
    def _inverse(self) -> Sequence[Any]:
        return series_quotient(*self._polynomials(flint.arb), self.triggers)

    @functools.cached_property
    @override
    def decoder(self) -> Float64:
        top, bottom = self._polynomials(float)
        impulse = np.zeros(self.triggers)
        impulse[0] = 1.0
        return np.cumsum(lfilter(top, bottom, impulse))

    @property
    @override
    def state_columns(self) -> int:
        return len(self.theta) + 2

    @functools.cached_property
    def _responses(self) -> Float64:
        """(d,) most that 1 added to a buffer can ever move a prefix, rounded up."""
        moved = [
            np.abs(lfilter([0.0, -o], [1.0, -t], self.decoder)).max()
            for t, o in zip(self.theta, self.omega, strict=True)
        ]
        return np.array(moved) * (1 + 1e-6)

    @override
    def fold(
        self,
        noise: npt.NDArray[Any],
        starts: Int64,
        leaf: Int64,
        upto: Int64,
        stack: npt.NDArray[Any],
        out: Int64,
        noise_error: float = 0.0,
    ) -> tuple[Int64, Int64]:
        """See base; ``stack`` holds the buffers, n_t, and the sum of magnitudes its float
        error is a multiple of."""
        given = noise_error * self.reach + 2.0**-40
        tables = self.theta, self.omega, self._responses
        open_: tuple[Int64, Int64] = _fold(noise, starts, leaf, upto, stack, out, *tables, given)
        return open_


def _product(thetas: Sequence[Any], ring: Any) -> list[Any]:
    """Coefficients of prod(1 - theta x)."""
    result = [ring(1)]
    for theta in thetas:
        shifted = [ring(0), *(-theta * term for term in result)]
        result = [a + b for a, b in zip([*result, ring(0)], shifted, strict=True)]
    return result


@njit(cache=True, nogil=True)
def _fold(
    noise: Float64,
    starts: Int64,
    leaf: Int64,
    upto: Int64,
    stack: Float64,
    out: Int64,
    theta: Float64,
    omega: Float64,
    responses: Float64,
    given: float,
) -> tuple[Int64, Int64]:  # pragma: no cover - compiled
    """Every local rounding error reaches a prefix through a bounded linear response: 1 for an
    error of w or n, ``responses[i]`` for one of buffer i."""
    size, width = theta.size, out.shape[1]
    rows, leaves = np.empty(16, np.int64), np.empty(16, np.int64)
    found = 0
    for i in range(leaf.size):
        total, magnitude = stack[i, size], stack[i, size + 1]
        for t in range(leaf[i] + 1, upto[i] + 1):
            node = noise[starts[i] + t - leaf[i] - 1]
            step = node
            large = abs(node)
            for k in range(size):
                step -= omega[k] * stack[i, k]
                large += omega[k] * abs(stack[i, k])
            magnitude += (size + 1) * large
            for k in range(size):
                magnitude += responses[k] * abs(stack[i, k])
                stack[i, k] = theta[k] * stack[i, k] + step
                magnitude += responses[k] * abs(stack[i, k])
            total += step
            magnitude += abs(total)
            column = t - leaf[i] - 1
            if width == 1:
                if t < upto[i]:
                    continue
                column = 0
            scaled = total * _SCALE + ROUND_UP
            whole = np.floor(scaled)
            out[i, column] = np.int64(whole)
            error = (magnitude * 1.01 * _UNIT_ROUND_OFF + given) * _SCALE
            if scaled - whole < error or scaled - whole > 1 - error:
                if found == rows.size:
                    rows = np.concatenate((rows, np.empty(found, np.int64)))
                    leaves = np.concatenate((leaves, np.empty(found, np.int64)))
                rows[found], leaves[found] = i, t
                found += 1
        stack[i, size], stack[i, size + 1] = total, magnitude
    return rows[:found].copy(), leaves[:found].copy()
