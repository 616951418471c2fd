"""SELECT and PREDICT: which keys pass the noisy threshold (Algorithm 2; mechanism.md section 4).

A key is selected at step j of its window when ``statistic + n_j > tau_j``: the statistic is the
exact count of units, or ``a * weighted count + d * count`` (``accounting.weights``), and n_j
the same combination of the decoded noises of its streams.  With everything on the lattice of
2^-DECODE_BITS this is the integer test ``statistic >= need_j``, ``need_j = floor(tau_j - n_j)
+ 1``, and need_j does not depend on data: prediction and test compare with the same number,
bit for bit.

Sensitivity: an added unit raises one (window, key) count by 1 (or its weight) from its step on,
so the encoded stream moves by one column of the encoder, squared norm <= col2 (times the squared
weight), in at most C (window, key) pairs.  A plain count that joins the statistic is a published
stream with its own share of the budget: the test is post-processing of both.  It is made only
where the exact count exceeds mu_count; the thresholds carry the probability that this matters
(C b of delta).

PREDICT says when a key that receives nothing must be looked at again (Algorithm 4).  For each
tested and not selected key: the first later trigger at which it passes if no data comes, within the
computed look-ahead; else the trigger after the look-ahead, so that the end of the horizon is itself
a due date.  Testing at due dates and with new data equals testing every key at every trigger, byte
for byte, because the thresholds are the same numbers.
"""

from collections.abc import Sequence

import numpy as np

from dpstream.accounting.arrays import Bool, Int32, Int64
from dpstream.accounting.budget.allocation import Budget
from dpstream.accounting.errors import InvariantError
from dpstream.accounting.libraries import njit
from dpstream.accounting.limits import DECODE_BITS, MAX_DRAWS_AT_ONCE
from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms.noise.paths import NoiseStream, Paths
from dpstream.state.store import NEVER, KeyShard


@njit(cache=True, nogil=True)
def _fill_thresholds(
    thresholds: Int32, slots: Int64, step_index: Int64, upto: Int64, noise: Int64, tau: Int64
) -> None:  # pragma: no cover - compiled
    """Noisy thresholds of steps ``step_index .. upto``; step t is in column t mod horizon."""
    horizon = thresholds.shape[1]
    for i in range(slots.size):
        for t in range(step_index[i], upto[i] + 1):
            threshold = ((tau[t - 1] - noise[i, t - step_index[i]]) >> DECODE_BITS) + 1
            thresholds[slots[i], t % horizon] = min(max(threshold, 0), 2147483647)


class NoisyThresholds:
    """Noisy thresholds (``need`` above) of the next steps of each key.

    Each noise node is drawn once.

    Args:
        terms: (noise stream, coefficient) of each part of the statistic.
        plan, budget: when keys are tested, on what statistic, against which thresholds.
        look_ahead: steps computed beyond the one that is asked for (performance only).
    """

    def __init__(
        self, terms: Sequence[tuple[NoiseStream, int]], plan: Plan, budget: Budget, look_ahead: int
    ) -> None:
        if budget.tau is None or budget.statistic is None:
            raise InvariantError("budget.tau is not None and budget.statistic is not None")
        self._paths = [(Paths(stream), coefficient) for stream, coefficient in terms]
        self._tau, self._statistic = budget.tau, budget.statistic
        self._weighted = budget.statistic.alone != 1
        self.horizon = max(1, min(look_ahead, len(self._tau)))
        #: (tests + 1,) trigger of each test, before them 0; a published count with a step for each
        #: trigger is asked for its noise at the tests.
        self._at = np.concatenate([[0], plan.design.test_triggers])
        self._published = [stream.strategy.triggers != len(self._tau) for stream, _ in terms]
        #: (slots, horizon) noisy thresholds; step t stands in column t mod horizon.
        self.thresholds = np.zeros((0, self.horizon), np.int32)
        #: last step that is computed, and whether the noise was begun; by slot.
        self.computed = np.zeros(0, np.int64)
        self._begun = np.zeros(0, np.bool_)

    def statistic(self, states: KeyShard, slots: Int64) -> Int64:
        """Return the exact statistic of the slots."""
        units: Int64 = states.units[slots]
        if not self._weighted:
            return units
        weighted = states.values[slots, -1]
        return np.asarray(self._statistic.weighted * weighted + self._statistic.counted * units)

    def ensure(self, states: KeyShard, slots: Int64, step_index: Int64) -> None:
        """Compute thresholds so that ``step_index`` of each slot is covered."""
        self._grow(states.size)
        fresh = slots[~self._begun[slots]]
        if len(fresh):
            for paths, _ in self._paths:
                paths.start(fresh, states.table.ids[fresh])
            self._begun[fresh] = True
        short = self.computed[slots] < step_index
        slots, step_index = slots[short], step_index[short]
        if len(slots) == 0:
            return
        upto = np.minimum(step_index + self.horizon - 1, len(self._tau))
        rows = max(1, MAX_DRAWS_AT_ONCE // self.horizon)
        for begin in range(0, len(slots), rows):
            part = slice(begin, begin + rows)
            noise = self._noise(slots[part], step_index[part], upto[part])
            _fill_thresholds(
                self.thresholds, slots[part], step_index[part], upto[part], noise, self._tau
            )
        self.computed[slots] = upto

    def _noise(self, slots: Int64, step_index: Int64, upto: Int64) -> Int64:
        """(n, horizon) noise of the statistic from ``step_index`` on, in 2^-DECODE_BITS."""
        total = np.zeros((len(slots), self.horizon), np.int64)
        behind = self.computed[slots] < step_index - 1
        for number, (paths, coefficient) in enumerate(self._paths):
            published = self._published[number]
            if behind.any():
                begin = step_index[behind] - 1
                paths.seek(slots[behind], self._at[begin] if published else begin)
            if published:
                noise = self._at_tests(paths, slots, step_index, upto)
            else:  # with a step for each test
                noise = paths.advance(slots, upto, self.horizon)
            total += noise if coefficient == 1 else coefficient * noise
        return total

    def _at_tests(self, paths: Paths, slots: Int64, step_index: Int64, upto: Int64) -> Int64:
        """(n, horizon) noise of a stream with a step for each trigger, decoded at the tests."""
        noise = np.zeros((len(slots), self.horizon), np.int64)
        for ahead in range(self.horizon):
            rows = np.flatnonzero(step_index + ahead <= upto)
            test = self._at[step_index[rows] + ahead]
            noise[rows, ahead] = paths.advance(slots[rows], test)[:, 0]
        return noise

    def at(self, slots: Int64, step_index: Int64) -> Int64:
        """Return the noisy threshold of one covered step for each slot."""
        return self.thresholds[slots, step_index % self.horizon].astype(np.int64)

    def _grow(self, size: int) -> None:
        have = len(self.computed)
        if size <= have:
            return
        more = max(size, have + have // 2, 1024) - have
        self.computed = np.concatenate([self.computed, np.zeros(more, np.int64)])
        self._begun = np.concatenate([self._begun, np.zeros(more, np.bool_)])
        self.thresholds = np.concatenate(
            [self.thresholds, np.zeros((more, self.horizon), np.int32)]
        )


def candidates(plan: Plan, states: KeyShard, slots: Int64) -> Int64:
    """Return the slots to test: more units than mu_count, and not yet selected."""
    tested = (states.units[slots] > plan.privacy.pre_threshold) & (states.selected[slots] == 0)
    return np.asarray(slots[tested])


def select(
    plan: Plan, thresholds: NoisyThresholds, states: KeyShard, slots: Int64, trigger: int
) -> Bool:
    """Return (n,) whether each candidate passes at window trigger ``trigger``."""
    step_index: Int64 = np.full(len(slots), plan.design.selection_step_index(trigger))
    thresholds.ensure(states, slots, step_index)
    return thresholds.statistic(states, slots) >= thresholds.at(slots, step_index)


@njit(cache=True, nogil=True)
def _first_pass(
    thresholds: Int32,
    slots: Int64,
    statistic: Int64,
    step_index: Int64,
    last_steps: Int64,
    out: Int64,
) -> None:  # pragma: no cover - compiled
    horizon = thresholds.shape[1]
    for i in range(slots.size):
        row = slots[i]
        out[i] = last_steps[row] + 1
        for t in range(step_index[i] + 1, last_steps[row] + 1):
            if statistic[i] >= thresholds[row, t % horizon]:
                out[i] = t
                break


def predict(
    plan: Plan, thresholds: NoisyThresholds, states: KeyShard, slots: Int64, trigger: int
) -> None:
    """Set ``due`` of tested, unselected slots after trigger ``trigger``."""
    step_index = np.full(len(slots), plan.design.selection_step_index(trigger))
    due = np.empty(len(slots), np.int64)
    statistic = thresholds.statistic(states, slots)
    _first_pass(thresholds.thresholds, slots, statistic, step_index, thresholds.computed, due)
    tests = plan.design.test_triggers
    test = tests[np.minimum(due, len(tests)) - 1]
    states.due[slots] = np.where(due <= len(tests), test, NEVER)


def wait_for_test(plan: Plan, states: KeyShard, slots: Int64, trigger: int) -> None:
    """Set ``due`` of unselected slots to the next test, between two tests."""
    states.due[slots] = plan.design.test_triggers[plan.design.selection_step_index(trigger) - 1]


def next_publication(plan: Plan, trigger: int) -> int:
    """Return the next public trigger after ``trigger``."""
    every, last = plan.design.refresh_every, plan.timeline.triggers
    if trigger >= last:
        return NEVER
    return min((trigger // every + 1) * every, last)


def is_quiet(plan: Plan, trigger: int) -> bool:
    """Return whether a step tests and publishes nothing, and no key enters: it only adds rows.

    A key that is due at it, or that its rows touch, waits for the next test or publication, which
    looks at the same keys whether a quiet step looked at them before or not.
    """
    tests = plan.design.selects and plan.design.selects_at(trigger)
    return trigger > 1 and not tests and not publishes(plan, trigger)


def publishes(plan: Plan, trigger: int) -> bool:
    """Return whether all selected keys are published at this trigger (refresh, or window close)."""
    return trigger % plan.design.refresh_every == 0 or trigger == plan.timeline.triggers
