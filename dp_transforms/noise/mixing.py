"""Noise of mixed cells: n_c(t) = sum_j L[c, j] n_j(t), rounded exactly to 2^-MIXED_BITS.

All cells' noise of a trigger is one product with L (or with its Kronecker factors in turn), in
floats with a bound of their error.  A cell whose rounding the bound leaves open is summed again in
pairs of floats, by products of slices short enough that every sum of them is exact; one that is
open even then, in ball arithmetic from the nodes themselves, which for many cells takes long and
for pairs of 75 bits happens once in billions of triggers.  What comes out is the rounding of the
exact real number, on every machine.

**Components** are what mixed cells are made of: n_j(t) of all j together, to 75 bits.  Component j
of a (window, stream) is a path of the time strategy under a name of its own (run, window, role,
stream, number j: public, so that any shard can draw it).  All components are at the same step.
Their noise is not rounded: what is published are cells, sums over all components, and it is their
rounding that must be exact.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import flint
import numpy as np

from dpstream.accounting.arrays import Float64, Ids, Int64
from dpstream.accounting.balls import ROUND_UP, settled
from dpstream.accounting.errors import InvariantError, required
from dpstream.accounting.libraries import njit
from dpstream.accounting.limits import MIXED_BITS
from dpstream.accounting.mixing import Mixing
from dpstream.accounting.strategies.base import ExactNoise, Strategy
from dpstream.dp_transforms.noise import continuous
from dpstream.dp_transforms.noise.continuous import ContinuousGaussian, plus, scaled, two_sum
from dpstream.dp_transforms.noise.paths import NoiseStream

#: Components worked on together: their state stays in the cache.
_COMPONENT_ROWS = 1 << 12
#: No 128-bit uniform gives a draw of more sds.
_FARTHEST = 14.0
_SCALE = float(1 << MIXED_BITS)
_UNIT_ROUND_OFF = 2.0**-53
#: What ROUND_UP's float lacks of 1/2 + 2^-12 / 3.
_UP_LOW = float(Fraction(1, 2) + Fraction(1, 3 << 12) - Fraction(ROUND_UP))
#: Slices of a factor and of the components; each has half the bits that a sum leaves free.
_SLICES = 4
#: Rows of the first factor that are sliced together.
_ROWS = 128
#: Triggers whose noise is kept, for shards that come a little later.
_MOST_CACHED = 3
#: Sets of components at different steps, for shards that are far from each other.
_HEADS = 4


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
        """Fold in the node noise of all steps up to ``upto``; earlier steps stay as they are."""
        for begin in range(0, len(self.high), _COMPONENT_ROWS):
            rows = slice(begin, begin + _COMPONENT_ROWS)
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
        """Return n_j at the step reached, one ball, as a function of the precision in bits.

        It draws all nodes of component ``number`` again, which takes long: only roundings that
        pairs of floats leave open need it.
        """
        nodes = self._sampler.exact(self._prf, self._tweaks[number], self.step_index)
        return lambda bits: [self._generators.prefix(nodes(bits), self.step_index)]


@functools.lru_cache(maxsize=16)
def error_in_sds(strategy: Strategy) -> float:
    """Bound of the error of n_j for nodes of sd 1: that of draws, and that of the fold.

    An operation is off by at most ``continuous.OPERATION_ERROR`` times the magnitudes it adds up;
    what that moves in a prefix is at most the response of a step or a buffer
    (``Generators.responses``).
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
    of_folding = local * continuous.OPERATION_ERROR * _FARTHEST
    return float((reach * continuous.QUANTILE_ERROR + of_folding) * (1 + 1e-6))


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
    """Compute one step of all rows; see ``Generators``.

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


class MixedNoise:
    """Noise of all cells of one (window, stream), for all shards of a process.

    Args:
        stream: names, sampler and time strategy of the column.
        mixing: L.
    """

    def __init__(self, stream: NoiseStream, mixing: Mixing) -> None:
        self._stream, self._mixing = stream, mixing
        self._heads: list[Components] = []
        self._mixed: dict[int, Int64] = {}
        self._lock = threading.Lock()

    def at(self, trigger: int) -> Int64:
        """Return (size,) int64 n_c(trigger) * 2^MIXED_BITS of every cell; the array is read-only.

        Shards of a process share it: it is computed for the first that asks, by one thread, and the
        last few triggers are kept.
        """
        with self._lock:
            if trigger not in self._mixed:
                head = self._head(trigger)
                head.advance(trigger)
                noise = mixed(head, self._mixing)
                noise.setflags(write=False)
                self._mixed[trigger] = noise
                for old in sorted(self._mixed, key=lambda t: abs(t - trigger))[_MOST_CACHED:]:
                    del self._mixed[old]
            return self._mixed[trigger]

    def _head(self, trigger: int) -> Components:
        """The components nearest before a trigger, or new ones."""
        before = [head for head in self._heads if head.step_index <= trigger]
        if before:
            return max(before, key=lambda head: head.step_index)
        if len(self._heads) == _HEADS:
            self._heads.remove(max(self._heads, key=lambda head: head.step_index))
        self._heads.append(Components(self._stream, self._mixing.size))
        return self._heads[-1]


def mixed(components: Components, mixing: Mixing) -> Int64:
    """Return (size,) int64 noise of every cell at the components' step, in units of 2^-MIXED_BITS.

    Each is the exact rounding of the real number sum_j L[c, j] n_j, whatever floats lose on the
    way.
    """
    high, low = components.high, components.low
    largest = float(np.abs(high).max()) * 1.01
    # Of what pairs know; and what a product of floats loses: (m + 1) units for m terms, the low
    # numbers, and the addition of ROUND_UP.
    given = mixing.row_sum * components.error
    lost = (sum(size + 1 for size in mixing.shape) + 4) * _UNIT_ROUND_OFF * 1.01
    error = given + mixing.row_sum * largest * lost
    sums = _product(mixing.factors, high)
    out = np.empty(mixing.size, np.int64)
    open_ = _round(sums, error * _SCALE + 2.0**-50, out)
    if len(open_):
        sums, rest = _pairs_of(mixing, high, low, open_)
        # Slices that are left out, at most 28 m of their last unit; and sums of pairs.
        bits = _slice_bits(mixing.shape[0]) * _SLICES
        lost = mixing.shape[0] * 2.0 ** (5 - bits) + sum(mixing.shape) * 2.0**-95
        error = given + mixing.row_sum * largest * lost
        left = _round_pairs(sums, rest, error * _SCALE, open_, out)
        numbers: dict[int, list[Any]] = {}
        for cell in left.tolist():
            out[cell] = settled(_ball_of(components, mixing, cell, numbers), MIXED_BITS)
    return out


def _product(factors: Sequence[Float64], values: Float64) -> Float64:
    """The Kronecker product of the factors times a vector; one factor at a time."""
    for factor in factors:
        # The axis in front is summed over and goes to the back: after all, the order is as before.
        values = (factor @ values.reshape(len(factor), -1)).T
    return np.ascontiguousarray(values).reshape(-1)


def _pairs_of(mixing: Mixing, high: Float64, low: Float64, cells: Int64) -> tuple[Float64, Float64]:
    """Sums of some cells as pairs."""
    first, behind = mixing.factors[0], mixing.size // mixing.shape[0]
    values = _slices(high.reshape(-1, behind), len(first), low.reshape(-1, behind))
    cell_sums, rest = np.empty(len(cells)), np.empty(len(cells))
    rows, which = np.unique(cells // behind, return_inverse=True)
    for begin in range(0, len(rows), _ROWS):
        chunk = rows[begin : begin + _ROWS]
        sums, sums_low = _sliced_product(_slices(first[chunk], len(first)), values)
        for at in np.flatnonzero((which >= begin) & (which < begin + _ROWS)):
            line, line_low = sums[which[at] - begin], sums_low[which[at] - begin]
            number = int(cells[at]) % behind
            size = behind
            for factor in mixing.factors[1:]:
                size //= len(factor)
                index, number = divmod(number, size)
                line, line_low = _contract(factor[index], line, line_low)
            cell_sums[at], rest[at] = line[0], line_low[0]
    return cell_sums, rest


def _slice_bits(terms: int) -> int:
    """Bits of a slice such that a sum of ``terms`` products of two slices is exact."""
    return (53 - (terms - 1).bit_length()) // 2


def _slices(values: Float64, terms: int, low: Float64 | None = None) -> list[Float64]:
    """Parts of few bits each, the largest first; what is left is below the last one's unit.

    Args:
        low: rests of the values, where they are pairs.
    """
    bits = _slice_bits(terms)
    largest = float(np.abs(values).max())
    unit = 2.0 ** int(np.ceil(np.log2(largest)) + 1) if largest else 1.0
    parts, rest = [], values
    for number in range(_SLICES):
        unit *= 2.0**-bits
        part = np.rint(rest / unit) * unit
        rest = rest - part  # exact
        if number == 1 and low is not None:
            rest = rest + low
        parts.append(part)
    return parts


def _sliced_product(left: list[Float64], right: list[Float64]) -> tuple[Float64, Float64]:
    """Product of sliced matrices as pairs: products of slices are exact, small ones come first."""
    total = total_low = np.zeros((left[0].shape[0], right[0].shape[1]))
    for level in range(_SLICES - 1, -1, -1):
        for i in range(level + 1):
            part = left[i] @ right[level - i]
            total, lost = _two_sums(total, part)
            total_low = total_low + lost
    return total, total_low


def _two_sums(a: Float64, b: Float64) -> tuple[Float64, Float64]:
    total = a + b
    other = total - a
    return total, (a - (total - other)) + (b - other)


def _ball_of(
    components: Components, mixing: Mixing, cell: int, numbers: dict[int, list[Any]]
) -> Callable[[int], Any]:
    """A cell's sum as a ball, by precision; ``numbers`` keeps the components' balls."""
    row = np.ones(1)
    exact_row: list[list[float]] = []
    number, size = cell, mixing.size
    for factor in mixing.factors:
        size //= len(factor)
        index, number = divmod(number, size)
        exact_row.append(factor[index].tolist())
        row = (row[:, None] * (factor[index] != 0)).reshape(-1)
    used = np.flatnonzero(row).tolist()

    def ball(bits: int) -> Any:
        if bits not in numbers:
            numbers[bits] = [None] * mixing.size
        total = flint.arb(0)
        for j in used:
            if numbers[bits][j] is None:
                numbers[bits][j] = components.exact(j)(bits)[0]
            weight, rest = flint.arb(1), j
            for line in reversed(exact_row):
                rest, at = divmod(rest, len(line))
                weight *= line[at]
            total += weight * numbers[bits][j]
        return total

    return ball


@njit(cache=True, nogil=True)
def _round(values: Float64, error: float, out: Int64) -> Int64:  # pragma: no cover - compiled
    """floor(2^MIXED_BITS v + ROUND_UP) of each; returns where ``error`` could change it."""
    count = 0
    for i in range(values.size):
        number = values[i] * _SCALE + ROUND_UP
        floor = np.floor(number)
        out[i] = np.int64(floor)
        count += number - floor < error or number - floor > 1 - error
    open_indices = np.empty(count, np.int64)
    count = 0
    for i in range(values.size if open_indices.size else 0):
        number = values[i] * _SCALE + ROUND_UP
        part = number - np.floor(number)
        if part < error or part > 1 - error:
            open_indices[count] = i
            count += 1
    return open_indices


@njit(cache=True, nogil=True)
def _round_pairs(
    values: Float64, rest: Float64, error: float, cells: Int64, out: Int64
) -> Int64:  # pragma: no cover - compiled
    """As ``_round``, of pairs, into ``out[cells]``; returns the cells that are still open."""
    open_cells, count = np.empty(cells.size, np.int64), 0
    for i in range(cells.size):
        number, low = plus(values[i] * _SCALE, rest[i] * _SCALE, ROUND_UP, _UP_LOW)
        floor = np.floor(number)
        part = (number - floor) + low
        if part < 0:
            floor, part = floor - 1, part + 1
        if part >= 1:
            floor, part = floor + 1, part - 1
        out[cells[i]] = np.int64(floor)
        if part < error or part > 1 - error:
            open_cells[count] = cells[i]
            count += 1
    return open_cells[:count]


@njit(cache=True, nogil=True)
def _contract(
    weights: Float64, values: Float64, rest: Float64
) -> tuple[Float64, Float64]:  # pragma: no cover - compiled
    """Sum over the first axis of pairs, which are reshaped to (len(weights), -1)."""
    width = values.size // weights.size
    sums, found_low = np.zeros(width), np.zeros(width)
    for i in range(weights.size):
        for k in range(width):
            value, low = two_sum(values[i * width + k], rest[i * width + k])
            part, part_low = scaled(weights[i], value, low)
            sums[k], found_low[k] = plus(sums[k], found_low[k], part, part_low)
    return sums, found_low
