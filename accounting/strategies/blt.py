"""Buffered linear Toeplitz: near-optimal error, constant state and work per step, any T.

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

theta and omega (``blt_table``) minimise nearly the largest error for each power of two; T uses
the next one.  Against the square-root Toeplitz matrix the largest error is at most 1.6% more and
the mean error 2% less to 0.3% more up to T = 2^17, and at most 7% and 5% more beyond.
"""

import functools
from collections.abc import Sequence
from typing import Any

import flint
import numpy as np
from typing_extensions import override

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.balls import series_quotient
from dpstream.accounting.strategies.base import Ranges
from dpstream.accounting.strategies.blt_table import EXPONENTIALS
from dpstream.accounting.strategies.convolution import ConvolutionStrategy
from dpstream.accounting.strategies.generators import Generators
from dpstream.accounting.strategies.impulse import impulse

#: The most exponentials of a row of the table.
_BUFFERS = 4
#: Up to here the decoder takes milliseconds without a compiler.
_FEW_TRIGGERS = 4096


class BltStrategy(ConvolutionStrategy):
    """BLT with the tabulated exponentials, up to MAX_TRIGGERS."""

    name = "blt"
    rounds_nodes = False
    state_dtype = np.float64

    @override
    def choose(self, parameters: Float64 | None) -> None:
        if parameters is None:
            row = max(min(EXPONENTIALS), (self.triggers - 1).bit_length())
            parameters = np.concatenate([np.array(numbers) for numbers in EXPONENTIALS[row]])
        if len(parameters) % 2 or not 2 <= len(parameters) <= 2 * _BUFFERS:
            raise ValueError("the strategy takes one to four pairs of parameters")
        self.theta, self.omega = np.split(np.array(parameters), 2)

    @property
    @override
    def parameters(self) -> Float64:
        return np.concatenate([self.theta, self.omega])

    @property
    @override
    def generators(self) -> Generators:
        shape = self.triggers, len(self.theta)
        theta, out, one = (
            np.broadcast_to(row, shape) for row in (self.theta, self.omega, np.ones(shape[1]))
        )
        return Generators(theta, out, one, np.broadcast_to(1.0, shape[:1]))

    @override
    def coefficients(self) -> Float64:
        lag = np.arange(self.triggers - 1, dtype=np.float64)
        tail = sum(o * np.power(t, lag) for t, o in zip(self.theta, self.omega, strict=True))
        return np.concatenate([[1.0], tail])[: self.triggers]

    def _polynomials(self) -> tuple[list[Any], list[Any]]:
        """(Q, P) with 1/c = Q/P: Q = prod(1 - theta_i x), P = Q + x sum omega_i Q/(1-theta_i x)."""
        thetas, omegas = ([flint.arb(v) for v in row.tolist()] for row in (self.theta, self.omega))
        top = _product(thetas)
        bottom = list(top)
        for i, omega in enumerate(omegas):
            for k, term in enumerate(_product(thetas[:i] + thetas[i + 1 :])):
                bottom[k + 1] += omega * term
        return top, bottom

    @override
    def _inverse(self) -> Sequence[Any]:
        return series_quotient(*self._polynomials(), self.triggers)

    @functools.cached_property
    @override
    def decoder(self) -> Float64:
        decoder = np.empty(self.triggers)
        fill = impulse
        if self.triggers > _FEW_TRIGGERS:
            from dpstream.accounting.strategies.kernels import fill_impulse as fill
        fill(self.theta, self.omega, decoder)
        return decoder

    @property
    @override
    def state_columns(self) -> int:
        return _BUFFERS + 2

    @functools.cached_property
    def _responses(self) -> Float64:
        """(d,) most that 1 added to a buffer can ever move a prefix, rounded up."""
        from dpstream.accounting.strategies.kernels import largest_response

        moved = [
            largest_response(t, o, self.decoder)
            for t, o in zip(self.theta, self.omega, strict=True)
        ]
        return np.array(moved) * (1 + 1e-6)

    @override
    def _fold(self, ranges: Ranges) -> tuple[Int64, Int64]:
        """See base; the state is the buffers, n_t, and the sum of magnitudes that n_t's float error
        is a multiple of."""
        from dpstream.accounting.strategies.kernels import fold_blt

        given = ranges.noise_error * self.reach + 2.0**-40
        open_: tuple[Int64, Int64] = fold_blt(*ranges.arrays, self._tables, given)
        return open_

    @functools.cached_property
    def _tables(self) -> Float64:
        tables = np.zeros((3, _BUFFERS))
        for row, numbers in zip(tables, (self.theta, self.omega, self._responses), strict=True):
            row[: len(numbers)] = numbers
        return tables


def _product(thetas: Sequence[Any]) -> list[Any]:
    """Coefficients of prod(1 - theta x)."""
    zero, result = flint.arb(0), [flint.arb(1)]
    for theta in thetas:
        shifted = [zero, *(-theta * term for term in result)]
        result = [a + b for a, b in zip([*result, zero], shifted, strict=True)]
    return result
