"""Buffered linear Toeplitz (BLT): near-optimal error, constant state and work per step, any T.

A is lower-triangular Toeplitz with first column c; the released prefix is

    q_t = round(2^D (B y)_t) / 2^D,   B = M A^-1 (M: prefix sums),   so   q_t = prefix_t + n_t,
    n_t = round(2^D (b * z)_t) / 2^D,   b = coefficients of 1 / ((1 - x) c(x)),

because the prefix is a whole number of lattice points.  q is a function of y alone only if
the rounding is that of the exact real number.  ``fold`` therefore computes in floats with a
bound of their error, and ``exact`` settles every prefix whose rounding the bound leaves open in
ball arithmetic of growing precision.  The result depends neither on the order of float
operations nor on the machine.

The encoder's coefficients are sums of few exponentials (Dvijotham, McMahan, Pillutla, Steinke and
Thakurta 2024),

    c_0 = 1,   c_k = sum_i omega_i theta_i^(k-1),   theta_i in (0, 1), omega_i > 0,

so that w = A^-1 z, and with it n_t = w_1 + ... + w_t, needs one buffer per exponential:

    w_t = z_t - sum_i omega_i s_i,   then   s_i <- theta_i s_i + w_t.

The encoder is real, so node noise must be too: z are Gaussians, not rounded ones, given by
128 bits of the node's name, and a decoded prefix is the exact rounding of an exact real number.

Sensitivity: one unit of input at any step moves y by a column of A, squared norm <= col2,
the first column's (all columns are its beginnings).
The total variation from a true Gaussian's release is that of a 128-bit uniform: the chance that
2^-128 in a uniform moves n_t over a rounding boundary, below 2^-100 per release for every T.

theta and omega (`EXPONENTIALS`) minimise nearly the largest error for each power of two; T uses
the next one.  Against the square-root Toeplitz matrix (the coefficients of (1 - x)^(-1/2)) the
largest error is at most 1.6% more and the mean error 2% less to 0.3% more up to T = 2^17, and at
most 7% and 5% more beyond.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import flint
import numpy as np
import numpy.typing as npt
from typing_extensions import override

from dpstream.accounting.arrays import Float64
from dpstream.accounting.balls import FIRST_PRECISION, precision, series_quotient, settled
from dpstream.accounting.limits import DECODE_BITS
from dpstream.accounting.strategies.base import (
    ExactNoise,
    Generators,
    Ranges,
    Strategy,
)
from dpstream.accounting.strategies.kernels import impulse

_SLACK = 1e-10


# Exponentials of the BLT encoder by ceil(log2 T): (theta, omega); see above.
#
# Found by minimising (mean over t of (sd_t / sd_T)^16)^(1/16) sd_T, a mean that lies near the
# largest error, with L-BFGS and Nelder-Mead; any values in range are private, only the error
# depends on them (``tests/accounting`` holds them against the square-root Toeplitz matrix).

EXPONENTIALS: dict[int, tuple[tuple[float, ...], tuple[float, ...]]] = {
    2: ((0.677940178, 0.6779401944, 0.6779403822), (0.1769928052, 0.1694281054, 0.1449976558)),
    3: ((1e-06, 0.8015956486, 0.801595836), (0.0376762608, 0.3022517195, 0.1633394082)),
    4: ((0.2622991545, 0.8878590253, 0.8878590585), (0.1155803291, 0.1259261568, 0.2656678784)),
    5: ((0.4805822527, 0.9394387157, 0.9394387404), (0.1989031804, 0.1028261592, 0.2041622851)),
    6: ((0.6218962621, 0.9673642148, 0.9673643866), (0.2619346857, 0.0809646542, 0.1556634907)),
    7: ((0.3907307849, 0.8312345463, 0.9836689027), (0.1447079732, 0.19098953, 0.1673289607)),
    8: ((0.5150513346, 0.9022231877, 0.9915755071), (0.2058919019, 0.1726161109, 0.1218220833)),
    9: ((0.6065385379, 0.9412839354, 0.9956304221), (0.2517814178, 0.1548335342, 0.0890441605)),
    10: ((0.6787278176, 0.963806234, 0.997716782), (0.2854353346, 0.1374241532, 0.065482807)),
    11: ((0.7371294836, 0.9772765888, 0.9987982681), (0.3088567101, 0.1208157955, 0.0484311213)),
    12: ((0.7848266816, 0.9855466865, 0.9993634854), (0.323624409, 0.1053874392, 0.0359822798)),
    13: (
        (0.658513885, 0.9576851527, 0.9955779501, 0.999707979),
        (0.2769531643, 0.1416831079, 0.048201829, 0.0232770357),
    ),
    14: (
        (0.7051926237, 0.9701655522, 0.9974063659, 0.9998488329),
        (0.2970160764, 0.1300643226, 0.0397253874, 0.0169604206),
    ),
    15: (
        (0.740878055, 0.9785080138, 0.9984498567, 0.9999210824),
        (0.3126550992, 0.1199651316, 0.0328488336, 0.0124599144),
    ),
    16: (
        (0.7764595048, 0.984599971, 0.9990746001, 0.9999589739),
        (0.3232735835, 0.1089793656, 0.0270885696, 0.0091117615),
    ),
    17: (
        (0.8111946625, 0.9891863146, 0.9994440227, 0.9999784769),
        (0.3292099588, 0.0965227169, 0.0221107838, 0.0067026626),
    ),
    18: ((0.9359565692, 0.9989071616, 0.9999847702), (0.299433059, 0.0416860259, 0.0062907568)),
    19: ((0.9477674907, 0.9992818854, 0.9999917608), (0.2855593245, 0.0352641859, 0.0047105392)),
    20: ((0.9573252757, 0.9995268048, 0.9999955388), (0.2706502112, 0.0297538868, 0.003520043)),
}


#: The most exponentials of a row of the table.
_BUFFERS = 4
#: Up to here the decoder takes milliseconds without a compiler.
_FEW_TRIGGERS = 4096


class BltStrategy(Strategy):
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

    def coefficients(self) -> Float64:
        """Return (T,) c_k, first column of the encoder, within 1e-13 of the exact numbers."""
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

    @functools.cached_property
    def decoder(self) -> Float64:
        """(T,) b_k, each within 1e-10 of the exact number."""
        decoder = np.empty(self.triggers)
        fill = impulse
        if self.triggers > _FEW_TRIGGERS:
            from dpstream.accounting.strategies.kernels import fill_impulse as fill
        fill(self.theta, self.omega, decoder)
        return decoder

    def decoder_balls(self, bits: int) -> list[Any]:
        """Return (T,) b_k as balls of that precision."""
        with precision(bits):
            inverse = series_quotient(*self._polynomials(), self.triggers)
            return list(itertools.accumulate(inverse))

    @functools.cached_property
    def _balls(self) -> list[Any]:
        return self.decoder_balls(FIRST_PRECISION)

    @property
    @override
    def col2(self) -> float:
        return float(np.sum(self.coefficients() ** 2) * (1 + _SLACK))

    @property
    @override
    def sd_factors(self) -> Float64:
        return np.asarray(np.sqrt(np.cumsum(self.decoder**2)) * (1 + _SLACK))

    @property
    @override
    def reach(self) -> float:
        return float(np.abs(self.decoder).sum() * (1 + _SLACK))

    @override
    def matrix(self) -> npt.NDArray[Any]:
        column, size = self.coefficients(), self.triggers
        lag = np.subtract.outer(np.arange(size), np.arange(size))
        return np.where(lag >= 0, column[np.maximum(lag, 0)], 0)

    def exact(self, noise: ExactNoise, step_index: int) -> int:
        """Return n_t * 2^DECODE_BITS at ``step_index``, with whatever precision it takes."""

        def prefix(bits: int) -> Any:
            decoder = self._balls if bits == FIRST_PRECISION else self.decoder_balls(bits)
            terms = zip(reversed(decoder[:step_index]), noise(bits)[:step_index], strict=True)
            return sum((weight * node for weight, node in terms), flint.arb(0))

        return settled(prefix, DECODE_BITS)

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
    def fold(self, ranges: Ranges) -> None:
        """See base; the state is the buffers, n_t, and the sum of magnitudes that n_t's float error
        is a multiple of."""
        from dpstream.accounting.strategies.kernels import fold_blt

        given = ranges.noise_error * self.reach + 2.0**-40
        open_ = fold_blt(*ranges.arrays, self._tables, given)
        ranges.settle(open_, lambda row, at: self.exact(ranges.exact(row, at), at))

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
