"""PREDICT: when a key that receives nothing must be looked at again (Algorithm 4).

For each tested and not selected key: the first later trigger at which it passes if no data
comes, within the computed look-ahead; else the trigger after the look-ahead, so that the end
of the horizon is itself a due date.  Testing at due dates and with new data equals testing
every key at every trigger, byte for byte, because the thresholds are the same numbers.
"""

import numpy as np

from dpstream.accounting.arrays import Int32, Int64
from dpstream.accounting.compiled import njit
from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms.selection import NoisyThresholds, step_index_of
from dpstream.state.store import NEVER, KeyShard


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
    step_index = step_index_of(plan, states, slots, trigger)
    due = np.empty(len(slots), np.int64)
    statistic = thresholds.statistic(states, slots)
    _first_pass(thresholds.thresholds, slots, statistic, step_index, thresholds.computed, due)
    due += states.base[slots]
    tests = plan.design.test_triggers
    test = tests[np.minimum(due, len(tests)) - 1]
    states.due[slots] = np.where(due <= len(tests), test, NEVER)


def wait_for_test(plan: Plan, states: KeyShard, slots: Int64, trigger: int) -> None:
    """Between two tests: set ``due`` of unselected slots to the next one."""
    states.due[slots] = plan.design.test_triggers[plan.design.selection_step_index(trigger) - 1]


def next_publication(plan: Plan, trigger: int) -> int:
    """The publication calendar of sticky mode: next public trigger after ``trigger``."""
    every, last = plan.design.refresh_every, plan.timeline.triggers
    if trigger >= last:
        return NEVER
    return min((trigger // every + 1) * every, last)


def publishes(plan: Plan, trigger: int) -> bool:
    """Whether all selected keys are published at this trigger (refresh, or window close)."""
    return trigger % plan.design.refresh_every == 0 or trigger == plan.timeline.triggers
