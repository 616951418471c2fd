"""Due dates: the first later test that passes without data, or the end of what is computed."""

import numpy as np
import pytest

from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms.prediction import (
    next_publication,
    predict,
    publishes,
    wait_for_test,
)
from dpstream.state.store import NEVER
from tests.dp_transforms.pairs import states_of
from tests.dp_transforms.test_selection import by_definition, thresholds_of
from tests.streams import make_plan

KEYS = 60


@pytest.mark.parametrize("look_ahead", [1, 4, 100])
@pytest.mark.parametrize("every", [1, 3])
def test_a_key_is_due_when_it_passes_by_itself(look_ahead: int, every: int) -> None:
    plan = make_plan(triggers=14, select_every=every, refresh_every=every)
    states, thresholds = states_of(plan, range(KEYS)), thresholds_of(plan, look_ahead)
    expected, slots, tests = by_definition(plan, states), np.arange(KEYS), plan.design.tests
    states.units[:KEYS] = np.arange(KEYS) % 20
    thresholds.ensure(states, slots, np.full(KEYS, 2))
    predict(plan, thresholds, states, slots, 2 * every)
    horizon = min(1 + look_ahead, tests)
    due = []
    for key in range(KEYS):
        later = [t for t in range(3, horizon + 1) if states.units[key] >= expected[key, t - 1]]
        test = later[0] if later else horizon + 1
        due.append(min(test * every, 14) if test <= tests else NEVER)
    assert states.due[:KEYS].tolist() == due and len(set(due)) > (look_ahead > 1)


def test_a_round_is_due_on_its_own_clock() -> None:
    plan = make_plan(mode="rounds", triggers=20)
    states, thresholds = states_of(plan, range(KEYS)), thresholds_of(plan, 4)
    states.base[:KEYS] = 6
    slots = np.arange(KEYS)
    thresholds.ensure(states, slots, np.full(KEYS, 2))
    predict(plan, thresholds, states, slots, 8)
    # Steps 3 to 5 of the round are known; its step 6 is the end of the horizon.
    assert set(states.due[:KEYS].tolist()) <= {9, 10, 11, 12}


@pytest.mark.parametrize(("trigger", "test"), [(1, 4), (4, 4), (5, 8), (9, 10)])
def test_between_two_tests_keys_wait_for_the_next(trigger: int, test: int) -> None:
    plan = make_plan(triggers=10, select_every=4, refresh_every=4)
    states = states_of(plan, [1, 2])
    wait_for_test(plan, states, np.array([1]), trigger)
    assert states.due[:2].tolist() == [NEVER, test]


@pytest.mark.parametrize("every", [1, 3, 10, 99])
def test_the_calendar_of_publications(every: int) -> None:
    plan: Plan = make_plan(triggers=10, refresh_every=every)
    days = [t for t in range(1, 11) if publishes(plan, t)]
    assert days == sorted({*range(every, 11, every), 10})
    for trigger in range(10):
        assert next_publication(plan, trigger) == min(day for day in days if day > trigger)
    assert next_publication(plan, 10) == NEVER
