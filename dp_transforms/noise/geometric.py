"""Two-sided geometric noise of nodes by inverse CDF at a real uniform, exact at every scale.

P[Z = k] is proportional to e^(-|k| / scale).  A uniform's first 64 bits are the node's lane of a
shared block, its further bits the node's own block and those after it (``sampler``), which are
drawn only where floats with an error bound leave an integer's edge open.  Then balls decide
(``accounting.mechanisms.laws.settle``), with as many bits as it takes: there is no table, no cut
tail and no float error, so that the total variation from the law is 0, given uniform AES blocks,
and a plain epsilon needs no delta for it.

**Truncated** noise (``TruncatedNodes``) is of a count that is tested once and then published.
``mechanisms.optimum`` has the law, its coin and the proof.  A key has two nodes: node 0 is the
uniform at which the noise is drawn exactly, and the first bits of node 1 are the coin.  The test
compares count + noise + coin with k: where the coin replaces k by k - 1 the count needs one unit
less.  The published count has the noise without the coin.  Both read the same nodes.
"""

import hashlib
import struct

import numpy as np
from typing_extensions import override

from dpstream.accounting.arrays import Ids, Int64
from dpstream.accounting.errors import InvariantError
from dpstream.accounting.limits import COIN_BITS
from dpstream.accounting.mechanisms.laws import (
    DiscreteLaplaceLaw,
    TruncatedGeometricLaw,
    Uniform,
    settle,
)
from dpstream.dp_transforms.noise.oneshot import (
    LEAST_SCALE,
    MAX_SCALE,
    inverse_laplace,
    inverse_truncated,
)
from dpstream.dp_transforms.noise.prf import Prf
from dpstream.dp_transforms.noise.sampler import IntegerSampler, own_blocks, shared_lanes


class GeometricNodes(IntegerSampler):
    """Sampler of one scale.

    Args:
        scale: in grid units, LEAST_SCALE <= scale <= MAX_SCALE of one-shot draws.

    Raises:
        ValueError: the scale is outside this range.
    """

    def __init__(self, scale: float) -> None:
        if not LEAST_SCALE <= scale <= MAX_SCALE:
            raise ValueError("scale is outside the sampler's range")
        self._scale = scale
        self._law = DiscreteLaplaceLaw(scale)
        #: names the law in the names of its nodes: another scale is other noise
        self.digest = hashlib.blake2b(
            b"two-sided geometric of nodes" + struct.pack("<d", scale), digest_size=16
        ).digest()

    @override
    def draw(self, prf: Prf, tweaks: Ids, first: Int64, last: Int64) -> tuple[Int64, Int64]:
        shared = shared_lanes(prf, tweaks, first, last, np.uint64)
        counts = last - first
        rows = np.repeat(np.arange(len(first)), counts)
        nodes = first[rows] + np.arange(shared.size) - shared.starts[rows]
        words = shared.lanes[shared.shift[rows] + nodes]
        noise, undecided = inverse_laplace(words, self._scale)
        for at in np.flatnonzero(undecided).tolist():
            name = tweaks[rows[at]].reshape(1, 2)
            noise[at] = settle(self._law, further_bits(prf, name, int(nodes[at]), int(words[at])))
        return noise, shared.starts


def further_bits(prf: Prf, name: Ids, node: int, word: int) -> Uniform:
    """Return the uniform of one node for ``settle``, which asks for as many bits as it needs.

    Its first 64 bits are ``word``, the node's lane; each further block that is asked for adds 128.
    ``name``: (1, 2) the name of the row.
    """

    def uniform(blocks: int) -> tuple[int, int]:
        value, number = word, np.array([node])
        for block in range(blocks):
            low, high = own_blocks(prf, name, number, block)[0].tolist()
            value = value << 128 | high << 64 | low
        return value, 64 + 128 * blocks

    return uniform


class TruncatedNodes(IntegerSampler):
    """Sampler of one law.

    Args:
        scale: LEAST_SCALE <= scale <= MAX_SCALE of one-shot draws.
        most: k; sooner: the coin's chance of k - 1, in 2^-32.
        tested: whether draws are noise + coin, for the test.

    Raises:
        ValueError: a number is outside its range.
    """

    def __init__(self, scale: float, most: int, sooner: int, tested: bool = False) -> None:
        if not (LEAST_SCALE <= scale <= MAX_SCALE and most >= 1 and 0 <= sooner < 1 << COIN_BITS):
            raise ValueError("the law is outside the sampler's range")
        self._scale, self._most, self._sooner, self._tested = scale, most, sooner, tested
        #: names the law in the names of its nodes: another one is other noise
        self.digest = hashlib.blake2b(
            b"truncated geometric of nodes" + struct.pack("<dqq", scale, most, sooner),
            digest_size=16,
        ).digest()

    @override
    def draw(self, prf: Prf, tweaks: Ids, first: Int64, last: Int64) -> tuple[Int64, Int64]:
        """Return noise of the one node of each row's name; see ``IntegerSampler.draw``.

        Raises:
            InvariantError: more than one node of a name is asked for.
        """
        if ((first > 0) | (last > 1)).any():
            raise InvariantError("truncated noise is of one step")
        count = len(first)
        shared = shared_lanes(prf, tweaks, 0 * first, np.full(count, 2), np.uint64)
        at = shared.shift + np.zeros(count, np.int64)
        words, coins = shared.lanes[at], shared.lanes[at + 1]
        less = (coins >> np.uint64(64 - COIN_BITS)).astype(np.int64) < self._sooner
        most = self._most - less
        noise, undecided = inverse_truncated(words, self._scale, most)
        for row in np.flatnonzero(undecided).tolist():
            law = TruncatedGeometricLaw(self._scale, int(most[row]))
            name = tweaks[row].reshape(1, 2)
            noise[row] = settle(law, further_bits(prf, name, 0, int(words[row])))
        if self._tested:
            noise = noise + less
        drawn = last > first
        return noise[drawn], np.cumsum(drawn) - drawn
