"""One-shot draws: n independent integers of as many sds, exact, without a table for each sd.

For answers that are given once (a histogram, a table, a query) every cell may have its own sd.
Laws (``accounting.mechanisms.laws``; mechanism.md section 5): the rounded Gaussian for
Gaussian-DP claims, the discrete Gaussian for zCDP ones, the discrete Laplace for pure ones, the
staircase for sums that are clamped, and the truncated geometric for counts that are shown above a
threshold only.

**Names.**  A draw's name is (name of the answer, digest of its exact numbers, law, item, scale).
The same name is the same noise, whatever else is drawn beside it and in whatever order; so one
answer must ask for an item once, and noise of two answers differs because their names do.  The
scale, where noise is truncated, and a staircase's steps are part of it: one uniform under two sds
would be noise that can be solved for.  The name is a keyed CBC-MAC like those of streams, over
(3, 0), a keyed digest, the item and (scale, 1).

**Exactness.**  A uniform U is real: its first 64 bits are one word of AES(name xor (attempt, 0)),
its further bits the blocks AES(name xor (attempt, j)), which are drawn only where the first do
not decide.  Rounded Gaussian, discrete Laplace, staircase and truncated geometric are the inverse
of their CDF at U in floats, with a bound on all float errors and on what the further bits can
change; where an integer's edge is within the bound, balls decide (``settle``).  The discrete
Gaussian is drawn as in Canonne, Kamath and Steinke 2020 (algorithm 3): a discrete Laplace Y of
scale t = floor(sigma) + 1 is taken with probability exp(-(|Y| - sigma^2 / t)^2 / (2 sigma^2)),
which a second real uniform decides in the same two ways; about three in four are taken.  No float
error and no cut tail is left: total variation 0, given uniform AES blocks.

Working memory is that of ``_AT_ONCE`` draws, whatever is asked for.
"""

import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any

import flint
import numpy as np

from dpstream.accounting.arrays import Bool, Float64, Ids, Int64
from dpstream.accounting.balls import precision
from dpstream.accounting.libraries import special
from dpstream.accounting.limits import MAX_REAL_SIGMA
from dpstream.accounting.mechanisms.laws import (
    DiscreteGaussianLaw,
    DiscreteLaplaceLaw,
    DiscreteStaircaseLaw,
    Law,
    RoundedGaussianLaw,
    TruncatedGeometricLaw,
    Uniform,
    settle,
)
from dpstream.accounting.mechanisms.optimum import SelectionOptimum
from dpstream.dp_transforms.noise.prf import KeyRing

#: Smallest and largest scale; above, balls would have to decide more than one draw in eight.
LEAST_SCALE, MAX_SCALE = 2.0**-10, MAX_REAL_SIGMA
#: Float errors of the two inverses in scales; tests measure at most a quarter of them.
NORMAL_ERROR, LOG_ERROR = 2.0**-46, 2.0**-44
#: Largest truncation: a sum of it and of any count fits int64.
MAX_TRUNCATED = 1 << 60
#: Float errors of a staircase's inverse in one side's weights, and its steepest fall: e^-32.
STAIRS_ERROR, MAX_FALL = 2.0**-44, 32.0
_AT_ONCE = 1 << 16
#: Upper word of the inputs of blocks that hold further bits of the uniform that accepts.
_ACCEPTS = 1 << 32


def numbered(count: int, first: int = 0) -> Ids:
    """Return (count, 2) items that are the public numbers ``first``, ``first + 1`` and so on.

    They name draws of what has a public order, as cells and nodes do; groups and units are named by
    their keyed ids instead.
    """
    items = np.zeros((count, 2), np.uint64)
    items[:, 0] = np.arange(first, first + count)
    return items


class OneShot:
    """The noise of one answer.

    Args:
        ring: key ring of the deployment.
        name: parts that name the answer: run id (committed before the first draw), digest of the
            question, column.
        inputs: digest of all exact numbers that the answer's noise is added to (`noise.inputs`).
    """

    def __init__(self, ring: KeyRing, name: Sequence[bytes], inputs: bytes) -> None:
        self._ring, self._parts = ring, (*name, inputs)
        self._node, self._tweak = ring.node, ring.tweak
        laws: tuple[type[Law], ...] = (RoundedGaussianLaw, DiscreteGaussianLaw, DiscreteLaplaceLaw)
        parts = {law: (b"one-shot noise", law.label, *name, inputs) for law in laws}
        self._prefix: dict[type, Ids] = {law: ring.name(part) for law, part in parts.items()}

    def rounded_gaussian(self, items: Ids, sigma: Float64 | float) -> Int64:
        """Return (n,) round(N), N of sd ``sigma``.

        Args:
            items: (n, 2) what each draw belongs to: ``numbered``, or keyed ids; each once.
            sigma: (n,) sds or one for all, LEAST_SCALE <= sigma <= MAX_SCALE.

        Raises:
            ValueError: a scale is outside this range.
        """
        return self._draw(RoundedGaussianLaw, items, sigma, self._rounded)

    def discrete_laplace(self, items: Ids, scale: Float64 | float) -> Int64:
        """Return (n,) int64 integers k with chance proportional to e^(-|k| / scale).

        Arguments and errors are those of ``rounded_gaussian``.
        """
        return self._draw(DiscreteLaplaceLaw, items, scale, self._laplace)

    def discrete_gaussian(self, items: Ids, sigma: Float64 | float) -> Int64:
        """Return (n,) int64 integers k with chance proportional to e^(-k^2 / (2 sigma^2)).

        Arguments and errors are those of ``rounded_gaussian``.
        """
        return self._draw(DiscreteGaussianLaw, items, sigma, self._gaussian)

    def truncated_geometric(
        self, items: Ids, scale: float, most: int, sooner: int = 0
    ) -> tuple[Int64, Int64]:
        """Return (n,) truncated geometric integers, and (n,) whether each one's bound k is one
        less.

        An integer j of at most k has a probability proportional to e^(-|j| / scale).  The second
        array is 1 where k is ``most - 1``, 0 where it is ``most``.

        Args:
            items: as above; scale: LEAST_SCALE <= scale <= MAX_SCALE.
            most: from 1 to MAX_TRUNCATED.
            sooner: chance of ``most - 1`` in 2^-32; 0 with ``most`` 1.

        Raises:
            ValueError: a number is outside its range.
        """
        if not (1 <= most <= MAX_TRUNCATED and 0 <= sooner < (1 << 32 if most > 1 else 1)):
            raise ValueError("a truncation is outside the range of one-shot draws")
        law = TruncatedGeometricLaw
        numbers = struct.pack("<qq", most, sooner)
        self._prefix[law] = self._ring.name((b"one-shot noise", law.label, numbers, *self._parts))
        coins: list[Int64] = [np.zeros(0, np.int64)]

        def kernel(names: Ids, scales: Float64) -> Int64:
            words = self._node.blocks(names)
            coins.append(((words[:, 1] >> np.uint64(32)) < np.uint64(sooner)).astype(np.int64))
            return self._truncated(names, scales, words[:, 0], most - coins[-1])

        noise = self._draw(law, items, scale, kernel)
        return noise, np.concatenate(coins)

    def staircase(self, items: Ids, scale: float, sensitivity: int, step: int) -> Int64:
        """Return (n,) integers of the discrete staircase law of q = e^(-sensitivity / scale).

        Args:
            items: as above; scale: LEAST_SCALE <= scale <= MAX_SCALE.
            sensitivity: L, from 1 to MAX_TRUNCATED; step: r, from 1 to L.

        Raises:
            ValueError: a number is outside its range.
        """
        if not 1 <= step <= sensitivity <= min(MAX_TRUNCATED, scale * MAX_FALL):
            raise ValueError("a staircase is outside the range of one-shot draws")
        law = DiscreteStaircaseLaw
        numbers = sensitivity.to_bytes(8, "little") + step.to_bytes(8, "little")
        name = (b"one-shot noise", law.label, numbers, *self._parts)
        self._prefix[law] = self._ring.name(name)
        kernel = functools.partial(self._stairs, sensitivity=sensitivity, step=step)
        return self._draw(law, items, scale, kernel)

    def least_counts(self, items: Ids, optimum: SelectionOptimum) -> Int64:
        """Return (n,) int64 the least exact count M with which each key is shown.

        Its law is ``optimum``'s, whose chances hold exactly: a word decides, and further blocks of
        the draw where the word leaves an edge open.  ``items``: (n, 2) keyed ids of the keys, each
        once.
        """
        numbers = struct.pack("<dd", optimum.epsilon, optimum.delta)
        name = (b"one-shot noise", b"key optimum", numbers, *self._parts)
        self._prefix[SelectionOptimum] = self._ring.name(name)
        out = np.empty(len(items), np.int64)
        for begin in range(0, len(items), _AT_ONCE):
            part = slice(begin, begin + _AT_ONCE)
            ones = np.ones(len(items[part]))
            names = self._names(SelectionOptimum, items[part], ones)
            words = self._node.blocks(names)[:, 0]
            # Chances of which the first bits are a uniform's leave it open on which side it is.
            below = np.searchsorted(optimum.edges, words, "left")
            out[part] = below + 1
            reached = np.searchsorted(optimum.edges, words, "right")
            for row in np.flatnonzero(reached > below):
                uniform = self._uniform(names[row], 0, int(words[row]))
                out[begin + row] = optimum.settle(uniform)
        return out

    def _draw(
        self,
        law: type[Law],
        items: Ids,
        scale: Float64 | float,
        kernel: Callable[[Ids, Float64], Int64],
    ) -> Int64:
        given = np.asarray(scale, np.float64)
        # Also where nothing is drawn: an error must not depend on whether there are items.
        if not ((given >= LEAST_SCALE) & (given <= MAX_SCALE)).all():
            raise ValueError("a scale is outside the range of one-shot draws")
        scales = np.broadcast_to(given, len(items))
        out = np.empty(len(items), np.int64)
        for begin in range(0, len(items), _AT_ONCE):
            part = slice(begin, begin + _AT_ONCE)
            part_scales = np.ascontiguousarray(scales[part])
            out[part] = kernel(self._names(law, items[part], part_scales), part_scales)
        return out

    def _names(self, law: type, items: Ids, scales: Float64) -> Ids:
        """(n, 2) MACs of the names: the blocks that all of them begin with are done once."""
        head = self._tweak.blocks(np.array([(3, 0)], np.uint64)) ^ self._prefix[law]
        names = self._tweak.blocks(self._tweak.blocks(head) ^ items)
        names[:, 0] ^= scales.view(np.uint64)
        names[:, 1] ^= np.uint64(1)
        return self._tweak.blocks(names)

    def _rounded(self, names: Ids, sigma: Float64) -> Int64:
        word = self._node.blocks(names)[:, 0]
        low, tail = _folded(word)
        normals = sigma * -special.ndtri(tail)
        # d ndtri / d tail <= 1.26 / tail, and U may be half a unit of the word beside ``tail``.
        error = sigma * (NORMAL_ERROR + 2.0**-64 / tail)
        value, open_ = _floor(normals + 0.5, error, low)
        value = np.where(low == word, -value, value)
        for row in np.flatnonzero(open_):
            law = RoundedGaussianLaw(float(sigma[row]))
            value[row] = settle(law, self._uniform(names[row], 0, int(word[row])))
        return value

    def _laplace(self, names: Ids, scale: Float64, attempt: int = 0) -> Int64:
        return self._inverse(names, scale, self._base(names, attempt)[:, 0], attempt)

    def _inverse(self, names: Ids, scale: Float64, word: Ids, attempt: int) -> Int64:
        """Discrete Laplace at the uniforms that begin with ``word``."""
        value, open_ = inverse_laplace(word, scale)
        for row in np.flatnonzero(open_):
            law = DiscreteLaplaceLaw(float(scale[row]))
            value[row] = settle(law, self._uniform(names[row], attempt, int(word[row])))
        return value

    def _truncated(self, names: Ids, scale: Float64, word: Ids, most: Int64) -> Int64:
        value, open_ = inverse_truncated(word, scale, most)
        for row in np.flatnonzero(open_):
            law = TruncatedGeometricLaw(float(scale[row]), int(most[row]))
            value[row] = settle(law, self._uniform(names[row], 0, int(word[row])))
        return value

    def _stairs(self, names: Ids, scale: Float64, sensitivity: int, step: int) -> Int64:
        word = self._node.blocks(names)[:, 0]
        low, tail = _folded(word)
        fall = sensitivity / scale
        ratio = np.exp(-fall)
        half = (step + (sensitivity - step) * ratio) / -np.expm1(-fall)
        weight = tail * (2 * half - 1)
        blocks = np.maximum(np.floor(np.log(half / weight) / fall), 0.0)
        beyond = weight * np.exp(blocks * fall)
        rest = half - beyond
        # The error of ``rest``: of floats, and what the further bits can change.
        error = half * STAIRS_ERROR + beyond * (2.0**-64 / tail)
        within = np.where(rest < step, rest, step + (rest - step) / ratio)
        error = np.where(rest + error < step, error, error / ratio)
        value, open_ = _floor(blocks * sensitivity + within, error, low)
        value = np.where(low == word, -value, value)
        for row in np.flatnonzero(open_):
            law = DiscreteStaircaseLaw(float(scale[row]), sensitivity, step)
            value[row] = settle(law, self._uniform(names[row], 0, int(word[row])))
        return value

    def _gaussian(self, names: Ids, sigma: Float64) -> Int64:
        out = np.empty(len(names), np.int64)
        left, attempt = np.arange(len(names)), 0
        while left.size:
            name, sd = names[left], sigma[left]
            words = self._base(name, attempt)
            scale = np.floor(sd) + 1
            value = self._inverse(name, scale, words[:, 0], attempt)
            taken = self._accepted(name, sd, np.abs(value), words[:, 1], attempt)
            out[left[taken]] = value[taken]
            left, attempt = left[~taken], attempt + 1
        return out

    def _accepted(self, names: Ids, sigma: Float64, size: Int64, word: Ids, attempt: int) -> Bool:
        """Whether the uniforms of ``word`` are below exp(-(size - sigma^2/t)^2 / (2 sigma^2))."""
        middle = sigma * (sigma / (np.floor(sigma) + 1))
        exponent = (size - middle) ** 2 / (2 * sigma**2)
        chance = np.exp(-exponent)
        # The difference errs by a few ulps of its terms, which the square and exp pass on.
        relative = np.expm1(((size + middle) / sigma) ** 2 * 2.0**-49 + 2.0**-48)
        uniform = (word + 0.5) * 2.0**-64
        taken = uniform < chance
        open_ = np.abs(uniform - chance) <= chance * relative + 2.0**-63 + uniform * 2.0**-51
        for row in np.flatnonzero(open_):
            bits = self._uniform(names[row], attempt, int(word[row]), _ACCEPTS)
            taken[row] = _below(float(sigma[row]), int(size[row]), bits)
        return np.asarray(taken)

    def _base(self, names: Ids, attempt: int) -> Ids:
        if attempt:
            names = names.copy()
            names[:, 0] ^= np.uint64(attempt)
        return self._node.blocks(names)

    def _uniform(self, name: Ids, attempt: int, word: int, kind: int = 0) -> Uniform:
        """One uniform: a word and as many further blocks as are asked for."""

        def uniform(blocks: int) -> tuple[int, int]:
            value = word
            for block in range(1, blocks + 1):
                at = np.array([(attempt, kind | block)], np.uint64) ^ name
                low, high = self._node.blocks(at)[0].tolist()
                value = value << 128 | high << 64 | low
            return value, 64 + 128 * blocks

        return uniform


def inverse_laplace(word: Ids, scale: Float64 | float) -> tuple[Int64, Bool]:
    """Return discrete Laplace noise at real uniforms.

    Args:
        word: (n,) first 64 bits of each uniform; scale: (n,) scales, or one.

    Returns:
        (values, which of them further bits and balls must decide).
    """
    low, tail = _folded(word)
    size = scale * (-np.log(tail) - np.log1p(np.exp(-1 / scale)))
    error = scale * (LOG_ERROR + 2.0**-64 / tail)
    value, open_ = _floor(size, error, low)
    return np.where(low == word, -value, value), open_


def inverse_truncated(word: Ids, scale: Float64 | float, most: Int64 | int) -> tuple[Int64, Bool]:
    """Return truncated geometric noise at real uniforms; see ``inverse_laplace``.

    Args:
        most: (n,) k, or one.
    """
    low, tail = _folded(word)
    ratio, beyond = np.exp(-1 / scale), np.exp(-(most + 1) / scale)
    total = -np.expm1(-1 / scale) - 2 * ratio * np.expm1(-most / scale)
    inverse = -scale * np.log(tail * total + beyond)
    # The slope is total / (tail total + beyond) <= 1 / tail.
    error = scale * (LOG_ERROR + 2.0**-64 / tail)
    value, open_ = _floor(inverse, error, low)
    return np.where(low == word, -value, value), open_


def _folded(word: Ids) -> tuple[Ids, Float64]:
    """The lower half of the uniforms, as words and as floats in (0, 1/2]."""
    low = np.minimum(word, ~word)
    return low, (low + 0.5) * 2.0**-64


def _floor(numbers: Float64, error: Float64, low: Ids) -> tuple[Int64, Bool]:
    """Floors, and which of them the error leaves open; so is every tail beyond the word."""
    below = np.floor(numbers - error)
    return np.floor(numbers).astype(np.int64), (below != np.floor(numbers + error)) | (low == 0)


def _below(sigma: float, size: int, uniform: Uniform) -> bool:
    """Whether a real uniform is below the chance of taking a proposal, in balls."""
    further = 0
    while True:
        value, bits = uniform(further)
        with precision(2 * bits + 128):
            unit: Any = flint.arb(2) ** bits
            ball = (flint.arb(value) / unit).union(flint.arb(value + 1) / unit)
            square = flint.arb(sigma) ** 2
            middle = square / (int(sigma) + 1)
            chance = (-((size - middle) ** 2) / (2 * square)).exp()
            if ball < chance:
                return True
            if ball >= chance:
                return False
        further += 1
