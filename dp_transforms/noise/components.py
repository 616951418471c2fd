"""Noise of the components that mixed cells are made of: n_j(t) of all j together, to 75 bits.

Component j of a (window, stream) is a path of the time strategy under a name of its own (run,
window, role, stream, number j: public, so that any shard can draw it).  All components are at the
same step.  Their noise is not rounded here: what is published are cells, sums over all components
(``mixing``), and it is their rounding that must be exact.
"""

import functools

import numpy as np

from dpstream.accounting.arrays import Float64, Ids
from dpstream.accounting.compiled import njit
from dpstream.accounting.errors import InvariantError, required
from dpstream.accounting.strategies.base import ExactNoise, Strategy
from dpstream.dp_transforms.noise import doubles, quantile
from dpstream.dp_transforms.noise.continuous import ContinuousGaussian
from dpstream.dp_transforms.noise.doubles import plus, scaled
from dpstream.dp_transforms.noise.paths import NoiseStream

#: Components worked on together: their state stays in the cache.
_ROWS = 1 << 12
#: No 128-bit uniform gives a draw of more sds.
_FARTHEST = 14.0


class Components:
    """Paths of ``count`` components, all at one step.

    Args:
        stream: names, sampler and strategy of the column; the strategy has real nodes.

    Attributes:
        step_index: steps folded in; high, low: (count,) n_j after them, in grid units, as pairs.
    """

    def __init__(self, stream: NoiseStream, count: int) -> None:
        generators, sampler = stream.strategy.generators, stream.sampler
        if generators is None or not isinstance(sampler, ContinuousGaussian):
            raise InvariantError("components have generators and a continuous sampler")
        self._generators, self._sampler, self._prf = generators, sampler, stream.node
        self._tweaks = stream.component_names(np.arange(count))
        self._table = generators.table
        self._buffers = np.zeros((2 * generators.theta.shape[1], count))
        self.step_index = 0
        self.high, self.low = np.zeros(count), np.zeros(count)
        #: bound of |n_j - (high + low)|
        self.error = error_in_sds(stream.strategy) * sampler.sigma

    def advance(self, upto: int) -> None:
        """Fold in the steps up to ``upto``."""
        for begin in range(0, len(self.high), _ROWS):
            rows = slice(begin, begin + _ROWS)
            tweaks: Ids = self._tweaks[rows]
            # Contiguous copies: the kernel's loops are over neighbours.
            buffers = self._buffers[:, rows].copy()
            for node in range(self.step_index, upto):
                high, low = self._sampler.pairs(self._prf, tweaks, node)
                line = self._table[node]
                fold(line, self._sampler.sigma, high, low, buffers, self.high[rows], self.low[rows])
            self._buffers[:, rows] = buffers
        self.step_index = max(self.step_index, upto)

    def exact(self, number: int) -> ExactNoise:
        """n_j at the step reached, as balls: a list of one, by the precision in bits."""
        nodes = self._sampler.exact(self._prf, self._tweaks[number], self.step_index)
        return lambda bits: [self._generators.prefix(nodes(bits), self.step_index)]


@functools.lru_cache(maxsize=16)
def error_in_sds(strategy: Strategy) -> float:
    """Bound of the error of n_j for nodes of sd 1: that of draws, and that of the fold.

    An operation is off by at most ``doubles.ERROR`` times the magnitudes it adds up; what that
    moves in a prefix is at most the response of a step or a buffer (``Generators.responses``).
    """
    generators, reach = strategy.generators, strategy.reach
    generators = required(generators, "generators is there")
    responses, size = generators.responses(), generators.theta.shape[1]
    around = 1 + (np.abs(generators.out) * responses.filled).sum(axis=1)
    of_steps = (3 * size + 4) * responses.step * generators.gain * around
    decayed = (
        np.abs(generators.theta) * responses.filled + np.abs(generators.into) * responses.steps
    )
    of_buffers = 4 * (responses.buffers * decayed).sum(axis=1)
    local = float((of_steps + of_buffers).sum()) + (reach + responses.steps) * len(of_steps)
    return (reach * quantile.ERROR + local * doubles.ERROR * _FARTHEST) * (1 + 1e-6)


@njit(cache=True, nogil=True)
def fold(
    line: Float64,
    sigma: float,
    high: Float64,
    low: Float64,
    buffers: Float64,
    total: Float64,
    total_low: Float64,
) -> None:  # pragma: no cover - compiled
    """One step of all rows; see ``Generators``.

    Args:
        line: theta, out, into and gain of the step.
        high, low: (n,) node noise in sds; overwritten.
        buffers: (2 d, n) pairs; total, total_low: (n,) n_j.  Both are updated.
    """
    size = buffers.shape[0] // 2
    for i in range(high.size):
        high[i], low[i] = scaled(sigma, high[i], low[i])
    for k in range(size):
        out, held, rest = -line[size + k], buffers[2 * k], buffers[2 * k + 1]
        for i in range(high.size):
            part, part_low = scaled(out, held[i], rest[i])
            high[i], low[i] = plus(high[i], low[i], part, part_low)
    gain = line[3 * size]
    for i in range(high.size):
        high[i], low[i] = scaled(gain, high[i], low[i])
    for k in range(size):
        theta, into = line[k], line[2 * size + k]
        held, rest = buffers[2 * k], buffers[2 * k + 1]
        for i in range(high.size):
            decayed, kept_low = scaled(theta, held[i], rest[i])
            added, added_low = scaled(into, high[i], low[i])
            held[i], rest[i] = plus(decayed, kept_low, added, added_low)
    for i in range(high.size):
        total[i], total_low[i] = plus(total[i], total_low[i], high[i], low[i])
