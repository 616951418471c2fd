"""The lower-triangular encoder with the smallest mean squared error of all prefixes.

It is the Cholesky factor of ``prefix_optimum``, within .1% of the certified floor of every
factorisation (root mean squared error over the prefixes; ``blt`` 4 to 5%, the tree 60 to 80%).
Not a convolution: later steps get other coefficients, because fewer prefixes are still to come.

Every entry below the diagonal matters, but all of them come from at most 19 numbers a step
(``generators``), rounded to 24 bits; these are the run's committed parameters.  The optimum itself
is found by floats that no two processors need agree on, and only when a run begins; encoder,
sensitivity and decoder are those of the committed numbers.  T (T + 1) / 2 coefficients would be
16 MiB at T = 2048, these are 0.15.

The encoder is real: z are Gaussians, and a decoded prefix is the exact rounding of an exact real
number, as for ``blt``.  Sensitivity: one unit of input at step j moves y by column j of A, squared
norm <= col2, the largest of all columns, rounded up.
"""

import functools
from typing import Any

import numpy as np
from typing_extensions import override

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.limits import DECODE_BITS, MAX_DENSE_TRIGGERS
from dpstream.accounting.strategies.base import ExactNoise, Ranges, Strategy
from dpstream.accounting.strategies.convolution import ROUND_UP, heavy_split
from dpstream.accounting.strategies.generators import Generators, Responses
from dpstream.accounting.strategies.prefix_optimum import prefix_optimum
from dpstream.accounting.strategies.settle import settled

_SLACK = 1e-10
#: Buffers by the most triggers they serve: what is lost is below 2e-4 of the squared error.
_BUFFERS = ((1, 1), (4, 2), (20, 3), (150, 4), (600, 5), (MAX_DENSE_TRIGGERS, 6))


@functools.lru_cache(maxsize=16)
def rising_parameters(triggers: int, last: float = 1.0) -> Float64:
    """Parameters of a run that begins now: 24 bits are kept of each number.

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
        if self.triggers > MAX_DENSE_TRIGGERS:
            raise ValueError("too many triggers for the dense strategy")
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

    @functools.cached_property
    def _gram(self) -> Float64:
        """(T,) the largest |Gram entry| of two columns at least that many steps apart."""
        gram = np.abs(self._matrix.T @ self._matrix)
        lags = np.array([gram.diagonal(lag).max() for lag in range(self.triggers)])
        return np.asarray(np.maximum.accumulate(lags[::-1])[::-1] + lags.max() * _SLACK)

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

    @property
    @override
    def rounding(self) -> Float64:
        return np.full(self.triggers, ROUND_UP / (1 << DECODE_BITS) * (1 + _SLACK))

    @override
    def worst_split(self, pieces: int, total: int | Int64) -> float | Float64:
        """See base; as for a convolution, every pair charged the largest entry of its lag."""
        return heavy_split(self._gram, min(pieces, self.triggers), total)

    @override
    def matrix(self) -> Float64:
        return self._matrix.copy()

    @override
    def nodes_through(self, step_index: int | Int64) -> Int64:
        return np.asarray(step_index, np.int64).copy()

    @property
    @override
    def state_columns(self) -> int:
        return int(self._generators.theta.shape[1]) + 2

    @override
    def fold(self, ranges: Ranges) -> None:
        """See base; the state is the buffers, n_t, and the sum of magnitudes that n_t's float error
        is a multiple of."""
        from dpstream.accounting.strategies.kernels import fold_generators

        given = ranges.noise_error * self.reach + 2.0**-40
        moves = np.append(self._responses.buffers, self._responses.step) * (1 + 1e-6)
        open_ = fold_generators(*ranges.arrays, self._table, moves, given)
        for row, step_index in zip(*(where.tolist() for where in open_), strict=True):
            column = step_index - ranges.step_index[row] - 1 if ranges.out.shape[1] > 1 else 0
            ranges.out[row, column] = self.exact(ranges.exact(row, step_index), step_index)

    def exact(self, noise: ExactNoise, step_index: int) -> int:
        """n_t * 2^DECODE_BITS at ``step_index``, whatever precision that takes."""

        def prefix(bits: int) -> Any:
            return self._generators.prefix(noise(bits), step_index)

        return settled(prefix, DECODE_BITS)
