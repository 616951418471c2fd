"""Square-root Toeplitz on the integer lattice (mechanism.md section 3).

c_k = rint(2^g C(2k, k) / 4^k), the coefficients of (1 - x)^(-1/2) on the lattice of 2^-g:
g = 6 up to T = 1000, 8 above.  Nodes are integers with rounded Gaussian noise; the decoder
inverts the integer matrix that is actually used.  A path has no state: it starts at
step 0 and is a matrix product over many rows.  Sensitivity: see ``convolution``; col2 is an
integer, that of the rounded coefficients.
"""

import functools
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.balls import series_quotient
from dpstream.accounting.limits import DECODE_BITS, MAX_TOEPLITZ_TRIGGERS
from dpstream.accounting.strategies.base import Ranges
from dpstream.accounting.strategies.convolution import ConvolutionStrategy

_SCALE = 1 << DECODE_BITS
#: Float error of a sum of products, per term, relative to its largest term.
_ULP = 2.0**-52


@functools.lru_cache(maxsize=8)
def _integers(triggers: int) -> tuple[int, ...]:
    """rint(2^g C(2k, k) / 4^k), exactly."""
    scaled = Fraction(1 << (6 if triggers <= 1000 else 8))
    integers = []
    for k in range(1, triggers + 1):
        integers.append(round(scaled))
        scaled = scaled * (2 * k - 1) / (2 * k)
        # Fractions would grow with k.  96 bits leave an error below 2^-84, which decides nothing:
        # 17.5 (k = 4, g = 6) is exact and no other number comes within 2^-13 of a half.
        scaled = Fraction(round(scaled * (1 << 96)), 1 << 96)
    return tuple(integers)


class ToeplitzStrategy(ConvolutionStrategy):
    """Square-root Toeplitz with integer coefficients; up to MAX_TOEPLITZ_TRIGGERS."""

    name = "toeplitz"

    @override
    def choose(self, parameters: Float64 | None) -> None:
        if self.triggers > MAX_TOEPLITZ_TRIGGERS:
            raise ValueError("too many triggers for the Toeplitz strategy")
        if parameters is None:
            self._integers = _integers(self.triggers)
        elif len(parameters) != self.triggers or (parameters % 1).any():
            raise ValueError("the strategy takes a whole number for each trigger")
        else:
            self._integers = tuple(int(number) for number in parameters)

    @property
    @override
    def parameters(self) -> Float64:
        return np.array(self._integers, np.float64)

    @override
    def coefficients(self) -> Float64:
        return np.array(self._integers, np.float64)

    @property
    @override
    def col2(self) -> float:
        return float(sum(c * c for c in self._integers))

    @override
    def matrix(self) -> npt.NDArray[Any]:
        return super().matrix().astype(np.int64)

    @override
    def _inverse(self) -> Sequence[Any]:
        return series_quotient([1], self._integers, self.triggers)

    @property
    @override
    def state_columns(self) -> int:
        return 0

    @functools.cached_property
    def _products(self) -> Float64:
        """(T, T) b_(t-k) in row k, column t: noise rows times this are all prefixes."""
        size = self.triggers
        lag = np.subtract.outer(-np.arange(size), -np.arange(size))
        return np.where(lag >= 0, self.decoder[np.maximum(lag, 0)], 0.0)

    @override
    def _fold(self, ranges: Ranges) -> tuple[Int64, Int64]:
        from dpstream.accounting.strategies.kernels import round_where_open

        noise, starts, step_index, upto, _, out = ranges.arrays
        rows, step_indices = [], []
        for begin, end, group in _groups(step_index, upto):
            first = begin if out.shape[1] > 1 else end - 1
            nodes = noise[starts[group][:, None] + np.arange(end)].astype(np.float64)
            prefixes = nodes @ self._products[:end, first:end]
            error = (end + 8) * _ULP * float(np.abs(nodes).max()) * self.reach
            decoded = np.empty(prefixes.shape, np.int64)
            open_ = round_where_open(
                prefixes.reshape(-1), error * _SCALE + 1e-9, decoded.reshape(-1)
            )
            out[group, : end - first] = decoded
            rows.append(group[open_ // (end - first)])
            step_indices.append(first + 1 + open_ % (end - first))
        none = np.zeros(0, np.int64)
        return np.concatenate([none, *rows]), np.concatenate([none, *step_indices])


def _groups(step_index: Int64, upto: Int64) -> list[tuple[int, int, Int64]]:
    """(step, upto, rows) of rows that share both; rows that stand still are left out."""
    name = step_index * (MAX_TOEPLITZ_TRIGGERS + 1) + upto
    order = np.argsort(name, kind="stable")
    edges = np.flatnonzero(np.diff(name[order])) + 1
    groups = [g for g in np.split(order, edges) if len(g)]
    return [
        (int(step_index[g[0]]), int(upto[g[0]]), g) for g in groups if step_index[g[0]] < upto[g[0]]
    ]
