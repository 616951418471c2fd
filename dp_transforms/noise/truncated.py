"""Truncated two-sided geometric noise of a count that is tested once and then published.

``mechanisms.optimum`` has the law, its coin and the proof.  A key has two nodes: node 0 is
the uniform at which the noise is drawn exactly (``geometric``), and the first bits of node 1 are
the coin.  The test compares count + noise + coin with k: where the coin replaces k by k - 1 the
count needs one unit less.  The published count has the noise without the coin.  Both read the same
nodes.
"""

import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import Any

import flint
import numpy as np

from dpstream.accounting.arrays import Ids, Int64
from dpstream.accounting.errors import InvariantError
from dpstream.accounting.limits import COIN_BITS
from dpstream.accounting.mechanisms.laws import TruncatedGeometricLaw, settle
from dpstream.dp_transforms.noise.geometric import further_bits
from dpstream.dp_transforms.noise.lanes import shared_lanes
from dpstream.dp_transforms.noise.oneshot import LEAST_SCALE, MAX_SCALE, inverse_truncated
from dpstream.dp_transforms.noise.prf import Prf


class TruncatedNodes:
    """Sampler of one law.

    Args:
        scale: LEAST_SCALE <= scale <= MAX_SCALE of one-shot draws.
        most: k; sooner: the coin's chance of k - 1, in 2^-32.
        tested: whether draws are noise + coin, for the test.

    Raises:
        ValueError: a number is outside its range.
    """

    #: draws are integers: no float error
    error = 0.0

    def __init__(self, scale: float, most: int, sooner: int, tested: bool = False) -> None:
        if not (LEAST_SCALE <= scale <= MAX_SCALE and most >= 1 and 0 <= sooner < 1 << COIN_BITS):
            raise ValueError("the law is outside the sampler's range")
        self._scale, self._most, self._sooner, self._tested = scale, most, sooner, tested
        #: names the law in the names of its nodes: another one is other noise
        self.digest = hashlib.blake2b(
            b"truncated geometric of nodes" + struct.pack("<dqq", scale, most, sooner),
            digest_size=16,
        ).digest()

    def draw(self, prf: Prf, tweaks: Ids, first: Int64, last: Int64) -> tuple[Int64, Int64]:
        """Noise of the one node of each row's name; see ``GeometricNodes.draw``.

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

    def exact(self, prf: Prf, tweak: Ids, last: int) -> Callable[[int], Sequence[Any]]:
        """The node of one name, as a function of the precision in bits."""
        none = np.zeros(1, np.int64)
        noise, _ = self.draw(prf, tweak.reshape(1, 2), none, none + last)
        return lambda _: [flint.arb(z) for z in noise.tolist()]
