"""One-shot draws: n independent integers of as many sds, exact, without a table for each sd.

For answers that are given once (a histogram, a table, a query) every cell may have its own sd.
Laws (``accounting.mechanisms.laws``; mechanism.md section 5): the rounded Gaussian for
Gaussian-DP claims, the discrete Laplace for pure ones, the staircase for sums that are clamped,
and the truncated geometric for counts that are shown above a threshold only.

**Names.**  A draw's name is (name of the answer, digest of its exact numbers, law, item, scale).
The same name is the same noise, whatever else is drawn beside it and in whatever order; so one
answer must ask for an item once, and noise of two answers differs because their names do.  The
scale, where noise is truncated, and a staircase's steps are part of it: one uniform under two sds
would be noise that can be solved for.  The name is a keyed CBC-MAC like those of streams, over
(3, 0), a keyed digest, the item and (scale, 1).

**Exactness.**  A uniform U is real: its first 64 bits are one word of AES(name), its further bits
the blocks AES(name xor (0, j)), which are drawn only where the first do not decide.  A draw is the
inverse of its law's CDF at U in floats, with a bound on all float errors and on what the further
bits can change; where an integer's edge is within the bound, balls decide (``settle``).  No float
error and no cut tail is left: total variation 0, given uniform AES blocks.

Working memory is that of ``_AT_ONCE`` draws, whatever is asked for.
"""

import struct
from collections.abc import Callable, Sequence

import numpy as np

from dpstream.accounting.arrays import Bool, Float64, Ids, Int64
from dpstream.accounting.libraries import special
from dpstream.accounting.limits import MAX_REAL_SIGMA
from dpstream.accounting.mechanisms.laws import (
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

    Attributes:
        parts: name and inputs, which all draws have in their names.
    """

    def __init__(self, ring: KeyRing, name: Sequence[bytes], inputs: bytes) -> None:
        self._ring, self.parts = ring, (*name, inputs)
        self._node, self._tweak = ring.node, ring.tweak

    def rounded_gaussian(self, items: Ids, sigma: Float64 | float) -> Int64:
        """Return (n,) round(N), N of sd ``sigma``.

        Args:
            items: (n, 2) what each draw belongs to: ``numbered``, or keyed ids; each once.
            sigma: (n,) sds or one for all, LEAST_SCALE <= sigma <= MAX_SCALE.

        Raises:
            ValueError: a scale is outside this range.
        """
        return self._inverted(RoundedGaussianLaw, inverse_gaussian, items, sigma)

    def discrete_laplace(self, items: Ids, scale: Float64 | float) -> Int64:
        """Return (n,) int64 integers k with chance proportional to e^(-|k| / scale).

        Arguments and errors are those of ``rounded_gaussian``.
        """
        return self._inverted(DiscreteLaplaceLaw, inverse_laplace, items, scale)

    def _inverted(
        self,
        law: type[RoundedGaussianLaw | DiscreteLaplaceLaw],
        inverse: Callable[[Ids, Float64], tuple[Int64, Bool]],
        items: Ids,
        scale: Float64 | float,
    ) -> Int64:
        """Draw by the inverse of a law's distribution function, each at one word."""

        def kernel(names: Ids, scales: Float64) -> Int64:
            word = self._node.blocks(names)[:, 0]
            inverses = inverse(word, scales)
            return self._settled(names, word, inverses, lambda row: law(float(scales[row])))

        return self._draw((law.label,), items, scale, kernel)

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
        coins: list[Int64] = [np.zeros(0, np.int64)]

        def kernel(names: Ids, scales: Float64) -> Int64:
            words, law = self._node.blocks(names), TruncatedGeometricLaw
            coins.append(((words[:, 1] >> np.uint64(32)) < np.uint64(sooner)).astype(np.int64))
            word, bound = words[:, 0], most - coins[-1]
            inverse = inverse_truncated(word, scales, bound)
            return self._settled(
                names, word, inverse, lambda row: law(float(scales[row]), int(bound[row]))
            )

        name = TruncatedGeometricLaw.label, struct.pack("<qq", most, sooner)
        noise = self._draw(name, items, scale, kernel)
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

        def kernel(names: Ids, scales: Float64) -> Int64:
            word, law = self._node.blocks(names)[:, 0], DiscreteStaircaseLaw
            inverse = inverse_stairs(word, scales, sensitivity, step)
            return self._settled(
                names, word, inverse, lambda row: law(float(scales[row]), sensitivity, step)
            )

        name = DiscreteStaircaseLaw.label, struct.pack("<qq", sensitivity, step)
        return self._draw(name, items, scale, kernel)

    def least_counts(self, items: Ids, optimum: SelectionOptimum) -> Int64:
        """Return (n,) int64 the least exact count M with which each key is shown.

        Its law is ``optimum``'s, whose chances hold exactly: a word decides, and further blocks of
        the draw where the word leaves an edge open.  ``items``: (n, 2) keyed ids of the keys, each
        once.
        """

        def kernel(names: Ids, _: Float64) -> Int64:
            words = self._node.blocks(names)[:, 0]
            # Chances of which the first bits are a uniform's leave it open on which side it is.
            below = np.searchsorted(optimum.edges, words, "left")
            least = below + 1
            reached = np.searchsorted(optimum.edges, words, "right")
            for row in np.flatnonzero(reached > below):
                least[row] = optimum.settle(self._uniform(names[row], int(words[row])))
            return least

        numbers = struct.pack("<dd", optimum.epsilon, optimum.delta)
        return self._draw((b"key optimum", numbers), items, 1.0, kernel)

    def _draw(
        self,
        law: tuple[bytes, ...],
        items: Ids,
        scale: Float64 | float,
        kernel: Callable[[Ids, Float64], Int64],
    ) -> Int64:
        """Draw by ``kernel``, which gets names and scales; ``law``: the parts that name it."""
        given = np.asarray(scale, np.float64)
        # Also where nothing is drawn: an error must not depend on whether there are items.
        if not ((given >= LEAST_SCALE) & (given <= MAX_SCALE)).all():
            raise ValueError("a scale is outside the range of one-shot draws")
        scales = np.broadcast_to(given, len(items))
        prefix = self._ring.name((b"one-shot noise", *law, *self.parts))
        out = np.empty(len(items), np.int64)
        for begin in range(0, len(items), _AT_ONCE):
            part = slice(begin, begin + _AT_ONCE)
            part_scales = np.ascontiguousarray(scales[part])
            out[part] = kernel(self._names(prefix, items[part], part_scales), part_scales)
        return out

    def _names(self, prefix: Ids, items: Ids, scales: Float64) -> Ids:
        """(n, 2) MACs of the names: the blocks that all of them begin with are done once."""
        head = self._tweak.blocks(np.array([(3, 0)], np.uint64)) ^ prefix
        names = self._tweak.blocks(self._tweak.blocks(head) ^ items)
        names[:, 0] ^= scales.view(np.uint64)
        names[:, 1] ^= np.uint64(1)
        return self._tweak.blocks(names)

    def _settled(
        self, names: Ids, word: Ids, inverse: tuple[Int64, Bool], law: Callable[[int], Law]
    ) -> Int64:
        """The values of an inverse; those that it leaves open by the ``law`` of their row."""
        value, open_ = inverse
        for row in np.flatnonzero(open_):
            value[row] = settle(law(int(row)), self._uniform(names[row], int(word[row])))
        return value

    def _uniform(self, name: Ids, word: int) -> Uniform:
        """One uniform: a word and as many further blocks as are asked for."""

        def uniform(blocks: int) -> tuple[int, int]:
            value = word
            for block in range(1, blocks + 1):
                at = np.array([(0, block)], np.uint64) ^ name
                low, high = self._node.blocks(at)[0].tolist()
                value = value << 128 | high << 64 | low
            return value, 64 + 128 * blocks

        return uniform


def inverse_gaussian(word: Ids, sigma: Float64) -> tuple[Int64, Bool]:
    """Return rounded Gaussian noise at real uniforms; see ``inverse_laplace``."""
    tail = _tail(word)
    # d ndtri / d tail <= 1.26 / tail, and U may be half a unit of the word beside ``tail``.
    error = sigma * (NORMAL_ERROR + 2.0**-64 / tail)
    return _floor(sigma * -special.ndtri(tail) + 0.5, error, word)


def inverse_laplace(word: Ids, scale: Float64 | float) -> tuple[Int64, Bool]:
    """Return discrete Laplace noise at real uniforms.

    Args:
        word: (n,) first 64 bits of each uniform; scale: (n,) scales, or one.

    Returns:
        (values, which of them further bits and balls must decide).
    """
    tail = _tail(word)
    size = scale * (-np.log(tail) - np.log1p(np.exp(-1 / scale)))
    return _floor(size, scale * (LOG_ERROR + 2.0**-64 / tail), word)


def inverse_truncated(word: Ids, scale: Float64 | float, most: Int64 | int) -> tuple[Int64, Bool]:
    """Return truncated geometric noise at real uniforms; see ``inverse_laplace``.

    Args:
        most: (n,) k, or one.
    """
    tail = _tail(word)
    ratio, beyond = np.exp(-1 / scale), np.exp(-(most + 1) / scale)
    total = -np.expm1(-1 / scale) - 2 * ratio * np.expm1(-most / scale)
    # The slope is total / (tail total + beyond) <= 1 / tail.
    error = scale * (LOG_ERROR + 2.0**-64 / tail)
    return _floor(-scale * np.log(tail * total + beyond), error, word)


def inverse_stairs(word: Ids, scale: Float64, sensitivity: int, step: int) -> tuple[Int64, Bool]:
    """Return staircase noise at real uniforms; see ``inverse_laplace``."""
    tail, fall = _tail(word), sensitivity / scale
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
    return _floor(blocks * sensitivity + within, error, word)


def _tail(word: Ids) -> Float64:
    """The lower half of the uniforms in (0, 1/2]."""
    return np.asarray((np.minimum(word, ~word) + 0.5) * 2.0**-64)


def _floor(sizes: Float64, error: Float64, word: Ids) -> tuple[Int64, Bool]:
    """Floors of sizes, negative in the lower half of the uniforms, and which of them the error
    leaves open; so is every tail beyond the word."""
    low = np.minimum(word, ~word)
    value = np.floor(sizes).astype(np.int64)
    open_ = (np.floor(sizes - error) != np.floor(sizes + error)) | (low == 0)
    return np.where(low == word, -value, value), open_
