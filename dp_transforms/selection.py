"""SELECT: which keys pass the noisy threshold (Algorithm 2; mechanism.md section 4).

A key is selected at leaf j of its round when ``units + n_j > tau_j``, n_j the decoded noise of
the selection stream.  With everything on the lattice of 2^-DECODE_BITS this is the integer
test ``units >= need_j`` with ``need_j = floor(tau_j - n_j) + 1``, and need_j does
not depend on data: prediction and test compare with the same number, bit for bit.

Sensitivity: an added unit raises one (key, round) count by 1 from its leaf on, so the encoded
stream moves by one column of the encoder, squared norm <= col2, in at most C (key, round)
pairs.  The test is made only where the exact count exceeds mu_count; the thresholds carry the
probability that this matters (C b of delta).
"""

import numpy as np
import numpy.typing as npt
from numba import njit

from accounting.limits import DECODE_BITS
from accounting.plan import Plan
from dp_transforms.noise.paths import NoiseStream, Paths
from state.store import KeyShard

Bool = npt.NDArray[np.bool_]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


@njit(cache=True, nogil=True)
def _need(
    needs: Int32, slots: Int64, leaf: Int64, upto: Int64, noise: Int64, tau: Int64, least: int
) -> None:  # pragma: no cover - compiled
    """Needs of leaves ``leaf .. upto``; leaf t goes to column t mod horizon, so nothing moves."""
    horizon = needs.shape[1]
    for i in range(slots.size):
        for t in range(leaf[i], upto[i] + 1):
            need = ((tau[t - 1] - noise[i, t - leaf[i]]) >> DECODE_BITS) + 1
            needs[slots[i], t % horizon] = min(max(need, least), 2147483647)


class Needs:
    """``need`` of the next leaves of each key's round, each noise node drawn once.

    Args:
        stream: selection noise of the window.
        tau: (T,) int64 thresholds in units of 2^-DECODE_BITS.
        pre_threshold: mu_count.
        look_ahead: leaves computed beyond the one that is asked for (performance only).
    """

    def __init__(
        self, stream: NoiseStream, tau: Int64, pre_threshold: int, look_ahead: int
    ) -> None:
        self._paths = Paths(stream)
        self._tau, self._least = tau, pre_threshold + 1
        self.horizon = max(1, min(look_ahead, len(tau)))
        #: (slots, horizon) needs; leaf t of the round stands in column t mod horizon.
        self.needs = np.zeros((0, self.horizon), np.int32)
        #: last leaf of the round that is computed, and the round it belongs to; by slot.
        self.known = np.zeros(0, np.int64)
        self._round = np.zeros(0, np.int64)

    def ensure(self, states: KeyShard, slots: Int64, leaf: Int64) -> None:
        """Compute needs so that ``leaf`` of each slot's current round is covered."""
        self._grow(states.size)
        fresh = slots[self._round[slots] != states.round[slots]]
        if len(fresh):
            self._paths.start(fresh, states.table.ids[fresh], states.round[fresh].astype(np.int64))
            self._round[fresh] = states.round[fresh]
            self.known[fresh] = 0
        short = self.known[slots] < leaf
        slots, leaf = slots[short], leaf[short]
        if len(slots) == 0:
            return
        behind = self.known[slots] < leaf - 1
        if behind.any():
            self._paths.advance(slots[behind], leaf[behind] - 1)
        upto = np.minimum(leaf + self.horizon - 1, len(self._tau))
        noise = self._paths.advance(slots, upto, self.horizon)
        _need(self.needs, slots, leaf, upto, noise, self._tau, self._least)
        self.known[slots] = upto

    def at(self, slots: Int64, leaf: Int64) -> Int64:
        """Needs of one covered leaf each."""
        return self.needs[slots, leaf % self.horizon].astype(np.int64)

    def _grow(self, size: int) -> None:
        have = len(self.known)
        if size <= have:
            return
        more = max(size, have + have // 2, 1024) - have
        self.known = np.concatenate([self.known, np.zeros(more, np.int64)])
        self._round = np.concatenate([self._round, np.full(more, -1, np.int64)])
        self.needs = np.concatenate([self.needs, np.zeros((more, self.horizon), np.int32)])


def candidates(plan: Plan, states: KeyShard, slots: Int64) -> Int64:
    """Slots that are tested: more units than mu_count, and (sticky) not yet selected."""
    tested = states.units[slots] > plan.privacy.pre_threshold
    if plan.privacy.mode == "sticky":
        tested &= states.round[slots] == 0
    return slots[tested]


def select(needs: Needs, states: KeyShard, slots: Int64, trigger: int) -> Bool:
    """Which candidates pass at window trigger ``trigger``."""
    leaf = trigger - states.base[slots].astype(np.int64)
    needs.ensure(states, slots, leaf)
    return states.units[slots] >= needs.at(slots, leaf)
