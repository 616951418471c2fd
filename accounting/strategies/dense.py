"""The lower-triangular encoder with the smallest mean squared error of all prefixes.

It is the Cholesky factor of `prefix_optimum`, within .1% of the certified floor of every
factorisation (root mean squared error over the prefixes; ``blt`` 4 to 5%, the tree 60 to 80%).
Not a convolution: later steps get other coefficients, because fewer prefixes are still to come.

Every entry below the diagonal matters, but all of them come from at most 19 numbers a step
(`Generators`), rounded to 24 bits; these are the run's committed parameters.  The optimum itself
is found by floats that no two processors need agree on, and only when a run begins; encoder,
sensitivity and decoder are those of the committed numbers.  T (T + 1) / 2 coefficients would be
16 MiB at T = 2048, these are 0.15.

The encoder is real: z are Gaussians, and a decoded prefix is the exact rounding of an exact real
number, as for ``blt``.  Sensitivity: one unit of input at step j moves y by column j of A, squared
norm <= col2, the largest of all columns, rounded up.

**The optimum**: the encoder with the smallest weighted squared error of all T prefixes, and its
certificate.  With X = A^T A and V = M^T diag(c) M (M the prefix sums, c_t > 0 what prefix t counts)
the squared error of all prefixes at mu = 1 is tr(V X^-1) if no diagonal entry of X exceeds 1, which
is convex in X.  For any weights d of sum 1 and D = diag(d) no X does better than

    floor = (tr (D^1/2 V D^1/2)^1/2)^2,

and X = D^-1/2 (D^1/2 V D^1/2)^1/2 D^-1/2 reaches it if its diagonal is constant.  Taking d times
that diagonal for the next d converges in a few rounds.

No eigenvectors are needed, because V^-1 is tridiagonal: 1/c_t + 1/c_(t-1) on its diagonal and
-1/c_(t-1) beside it, the second difference where all prefixes count alike.  With
H = D^-1/2 V^-1 D^-1/2 the root above is H^-1/2, and (Hale, Higham, Trefethen 2008)

    H^-1/2 = about sum_k w_k (H + s_k)^-1,   so   X = about sum_k w_k (V^-1 + s_k D)^-1

with poles s_k by elliptic functions, whose error falls exponentially with their number.  The
inverse of a tridiagonal matrix is g_j rho_(j+1) ... rho_i below its diagonal.  So X has few
numbers for each step, and its Cholesky factor A keeps the ratios rho (`Generators`).  X is
scaled to a diagonal of 1 before it is factored.  There the error is stationary under changes of X
that keep the diagonal, so that what few poles miss enters it squared.
"""

import functools
from typing import Any

import numpy as np
from typing_extensions import override

from dpstream.accounting.arrays import Float64
from dpstream.accounting.balls import settled
from dpstream.accounting.libraries import special
from dpstream.accounting.limits import DECODE_BITS, MAX_DENSE_TRIGGERS
from dpstream.accounting.strategies.base import (
    ExactNoise,
    Generators,
    Ranges,
    Responses,
    Strategy,
)

_ROUNDS = 20
#: Poles that give diagonals to about 1e-9.
_MANY = 24
#: Up to so many rows all eigenvalues of a matrix take less time than loading ``scipy.linalg``.
_FEW = 64


def prefix_weights(importance: Float64) -> tuple[Float64, float]:
    """Return (d of sum 1, floor of tr(V X^-1)).

    Args:
        importance: (T,) c, positive: what the squared error of each prefix counts.
    """
    weights = np.full(len(importance), 1 / len(importance))
    floor = 0.0
    for _ in range(_ROUNDS):
        diagonal = weights * _inverses(importance, weights, _MANY)[1].sum(axis=1)
        total = float(diagonal.sum())
        if total**2 > floor:
            best, floor = weights, total**2
        weights = diagonal / total
    return best, floor


def prefix_optimum(importance: Float64, buffers: int) -> Generators:
    """Return the optimum's encoder with ``buffers`` buffers; columns of norm about 1.

    Args:
        importance: (T,) as for ``prefix_weights``; ones: all prefixes alike.
    """
    triggers = len(importance)
    weights, _ = prefix_weights(importance)
    rho, diagonal = _inverses(importance, weights, buffers)
    scale = 1 / np.sqrt(diagonal.sum(axis=1))
    into = diagonal * scale[:, None]
    # A[t, j] = r_t . (ratios between) . into_j; A^T A = X gives, from the last step on,
    #   (r_t r_t^T + rest_t) into_t = scale_t (1, ..., 1),  rest_t what later rows of A add.
    rows, root = np.zeros((triggers, buffers)), np.zeros(triggers)
    rest = np.zeros((buffers, buffers))
    for t in range(triggers - 1, -1, -1):
        wanted = scale[t] - rest @ into[t]
        root[t] = np.sqrt(wanted @ into[t])
        rows[t] = wanted / root[t]
        rest = rho[t][:, None] * (np.outer(rows[t], rows[t]) + rest) * rho[t]
    return Generators(rho, rows * rho, into, 1 / root)


def _second_difference(importance: Float64) -> tuple[Float64, Float64]:
    """(T,) diagonal of V^-1, and (T,) minus its entries before the diagonal, the first one 0."""
    before = np.concatenate([[0.0], 1 / importance[:-1]])
    return 1 / importance + before, before


def _inverses(importance: Float64, weights: Float64, poles: int) -> tuple[Float64, Float64]:
    """(T, poles) ratios rho and diagonals w_k g of w_k (V^-1 + s_k D)^-1 for each pole."""
    shifts, factors = _poles(importance, weights, poles)
    size = len(weights)
    own, before = _second_difference(importance)
    diagonal = np.outer(weights, shifts) + own[:, None]
    above, below = diagonal.copy(), diagonal.copy()
    for t in range(1, size):
        above[t] -= before[t] ** 2 / above[t - 1]
        below[size - 1 - t] -= before[size - t] ** 2 / below[size - t]
    return before[:, None] / below, factors / (above + below - diagonal)


def _poles(importance: Float64, weights: Float64, count: int) -> tuple[Float64, Float64]:
    """(s_k, w_k) for x^-1/2 over the eigenvalues of H."""
    own, before = _second_difference(importance)
    diagonal = own / weights
    beside = -before[1:] / np.sqrt(weights[:-1] * weights[1:])
    low, high = _extremes(diagonal, beside)
    part = low / high
    period = special.ellipkm1(part)
    sn, cn, dn, _ = special.ellipj((np.arange(count) + 0.5) * period / count, 1 - part)
    return low * (sn / cn) ** 2, 2 / np.pi * period / count * np.sqrt(low) * dn / cn**2


def _extremes(diagonal: Float64, beside: Float64) -> tuple[float, float]:
    """Smallest and largest eigenvalue of a symmetric tridiagonal matrix."""
    size = len(diagonal)
    if size <= _FEW:
        values = np.linalg.eigvalsh(np.diag(diagonal) + np.diag(beside, -1))
        return values[0], values[-1]
    from scipy.linalg import eigvalsh_tridiagonal

    low, high = (
        eigvalsh_tridiagonal(diagonal, beside, select="i", select_range=(k, k))[0]
        for k in (0, size - 1)
    )
    return low, high


_SLACK = 1e-10
#: Buffers by the most triggers they serve: what is lost is below 2e-4 of the squared error.
_BUFFERS = ((1, 1), (4, 2), (20, 3), (150, 4), (600, 5), (MAX_DENSE_TRIGGERS, 6))


@functools.lru_cache(maxsize=16)
def rising_parameters(triggers: int, last: float = 1.0) -> Float64:
    """Return the parameters of a run that begins now, each with 24 bits.

    Args:
        last: what the squared error of the last prefix counts, the first one counting 1 and those
            between rising by one ratio: ``last ** ((t - 1) / (T - 1))``.
    """
    buffers = next(count for most, count in _BUFFERS if triggers <= most)
    importance = last ** (np.arange(triggers) / max(1, triggers - 1))
    table = prefix_optimum(importance, buffers).table.astype(np.float32).astype(np.float64)
    table.setflags(write=False)
    return table.reshape(-1)


class DenseStrategy(Strategy):
    """The optimum for T prefixes, up to MAX_DENSE_TRIGGERS."""

    name = "dense"
    rounds_nodes = False
    state_dtype = np.float64

    @override
    def choose(self, parameters: Float64 | None) -> None:
        numbers = rising_parameters(self.triggers) if parameters is None else np.array(parameters)
        buffers, rest = divmod(len(numbers) // self.triggers - 1, 3)
        if rest or buffers < 1 or len(numbers) != self.triggers * (3 * buffers + 1):
            raise ValueError("the strategy takes 3 d + 1 parameters for each trigger")
        self._table = np.ascontiguousarray(numbers.reshape(self.triggers, -1))
        if not (np.isfinite(self._table).all() and (self._table[:, -1] > 0).all()):
            raise ValueError("the strategy's parameters are finite and its gains positive")
        theta, out, into = np.split(self._table[:, :-1], 3, axis=1)
        self._generators = Generators(theta, out, into, self._table[:, -1])

    @property
    @override
    def parameters(self) -> Float64:
        return self._table.reshape(-1).copy()

    @property
    @override
    def generators(self) -> Generators:
        return self._generators

    @functools.cached_property
    def _matrix(self) -> Float64:
        return self._generators.matrix()

    @functools.cached_property
    def _responses(self) -> Responses:
        return self._generators.responses()

    @property
    def decoder(self) -> Float64:
        """(T, T) row t has the weights of z in n_t."""
        return self._responses.decoder

    @property
    @override
    def col2(self) -> float:
        return float((self._matrix**2).sum(axis=0).max() * (1 + _SLACK))

    @property
    @override
    def sd_factors(self) -> Float64:
        squares = (self._responses.decoder**2).sum(axis=1)
        return np.asarray(np.sqrt(squares) * (1 + _SLACK))

    @property
    @override
    def reach(self) -> float:
        return float(np.abs(self._responses.decoder).sum(axis=1).max() * (1 + _SLACK))

    @override
    def matrix(self) -> Float64:
        return self._matrix.copy()

    @property
    @override
    def state_columns(self) -> int:
        return int(self._generators.theta.shape[1]) + 2

    @override
    def fold(self, ranges: Ranges) -> None:
        """Fold as in the base; the state is the buffers, n_t, and a sum of magnitudes.

        The float error of n_t is a multiple of that sum.
        """
        from dpstream.accounting.strategies.kernels import fold_generators

        given = ranges.noise_error * self.reach + 2.0**-40
        moves = np.append(self._responses.buffers, self._responses.step) * (1 + 1e-6)
        open_ = fold_generators(*ranges.arrays, self._table, moves, given)
        ranges.settle(open_, lambda row, at: self.exact(ranges.exact(row, at), at))

    def exact(self, noise: ExactNoise, step_index: int) -> int:
        """Return n_t * 2^DECODE_BITS at ``step_index``, with whatever precision it takes."""

        def prefix(bits: int) -> Any:
            return self._generators.prefix(noise(bits), step_index)

        return settled(prefix, DECODE_BITS)
