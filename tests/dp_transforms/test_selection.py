"""Noisy thresholds: the integers of the paths, whatever is computed ahead; who is tested at all.

Due dates: the first later test that passes without data, or the end of what is computed.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dpstream.accounting.budget.allocation import Budget, allocate
from dpstream.accounting.limits import DECODE_BITS
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.weights import SelectionWeights
from dpstream.dp_transforms import selection
from dpstream.dp_transforms.noise.paths import Paths
from dpstream.dp_transforms.selection import (
    NoisyThresholds,
    candidates,
    next_publication,
    predict,
    publishes,
    select,
    wait_for_test,
)
from dpstream.state.store import NEVER, KeyShard
from tests.dp_transforms.pairs import noise_stream, states_of
from tests.streams import COUNT, SUM, make_plan

TEN = range(10)


def thresholds_of(plan: Plan, look_ahead: int = 3) -> NoisyThresholds:
    budget = allocate(plan)
    assert budget.selection is not None
    terms = [(noise_stream(plan, budget.selection, "selection"), 1)]
    return NoisyThresholds(terms, plan, budget, look_ahead)


def by_definition(plan: Plan, states: KeyShard) -> npt.NDArray[np.int64]:
    """(keys, tests) floor(tau - n) + 1, at least 0."""
    budget: Budget = allocate(plan)
    assert budget.selection is not None and budget.tau is not None
    paths, keys = Paths(noise_stream(plan, budget.selection, "selection")), states.size
    paths.start(np.arange(keys), states.table.ids[:keys])
    tests = len(budget.tau)
    noise = paths.advance(np.arange(keys), np.full(keys, tests), tests)
    exact = np.floor((budget.tau - noise) / (1 << DECODE_BITS)).astype(np.int64) + 1
    return np.maximum(exact, 0)


@pytest.mark.parametrize("look_ahead", [1, 2, 5, 1000])
@pytest.mark.parametrize("strategy", ["tree", "blt"])
def test_thresholds_are_those_of_the_paths(strategy: str, look_ahead: int) -> None:
    plan = make_plan(triggers=13, strategy=strategy)
    states, thresholds = states_of(plan, TEN), thresholds_of(plan, look_ahead)
    expected, slots = by_definition(plan, states), np.arange(10)
    for step in (1, 2, 5, 6, 13):
        thresholds.ensure(states, slots, np.full(10, step))
        assert thresholds.at(slots, np.full(10, step)).tolist() == expected[:, step - 1].tolist()
    assert thresholds.horizon == min(look_ahead, 13)


@pytest.mark.parametrize(("every", "look_ahead"), [(2, 1), (4, 1), (4, 3), (2, 1000), (4, 1000)])
@pytest.mark.parametrize("strategy", ["tree", "blt"])
def test_a_combined_test_takes_the_counts_noise_of_its_own_trigger(
    strategy: str, every: int, look_ahead: int
) -> None:
    """Tests at triggers 4, 8, 12 and 13, say; the published count has noise at every trigger."""
    options: dict[str, Any] = {"weights": SelectionWeights(), "per_key_bound": 1, "combine": True}
    plan = make_plan(triggers=13, select_every=every, strategy=strategy, **options)
    budget, keys = allocate(plan), np.arange(10)
    assert budget.selection is not None and budget.statistic is not None
    assert budget.tau is not None and len(budget.tau) == plan.design.tests
    own, tests = list(range(plan.design.tests)), [t for t in range(13) if (t + 1) % every == 0]
    at_tests = tests if tests[-1] == 12 else [*tests, 12]
    terms = [
        (noise_stream(plan, budget.selection, "selection"), budget.statistic.weighted),
        (noise_stream(plan, budget.values[0]), budget.statistic.counted),
    ]
    states, exact = states_of(plan, TEN), np.tile(budget.tau, (10, 1))
    for (stream, coefficient), at in zip(terms, (own, at_tests), strict=True):
        paths = Paths(stream)
        paths.start(keys, states.table.ids[:10])
        last = at[-1] + 1
        exact -= coefficient * paths.advance(keys, np.full(10, last), last)[:, at]
    expected = np.maximum((exact >> DECODE_BITS) + 1, 0)
    for slots, steps in ((keys, (1, 2, 4)), (keys, (3,)), (keys[4:5], (1, 3)), (keys[:1], (4,))):
        thresholds = NoisyThresholds(terms, plan, budget, look_ahead)
        for step in steps:
            test_steps = np.full(len(slots), step)
            thresholds.ensure(states, slots, test_steps)
            assert thresholds.at(slots, test_steps).tolist() == expected[slots, step - 1].tolist()


@pytest.mark.parametrize("coefficient", [1, 2, 3])
def test_noise_counts_as_often_as_its_stream(coefficient: int) -> None:
    plan, keys = make_plan(triggers=13), np.arange(10)
    budget, states = allocate(plan), states_of(plan, TEN)
    assert budget.selection is not None and budget.tau is not None
    stream = noise_stream(plan, budget.selection, "selection")
    paths = Paths(stream)
    paths.start(keys, states.table.ids[:10])
    noise = paths.advance(keys, np.full(10, 5), 5)[:, 4]
    thresholds = NoisyThresholds([(stream, coefficient)], plan, budget, 3)
    thresholds.ensure(states, keys, np.full(10, 5))
    exact = ((budget.tau[4] - coefficient * noise) >> DECODE_BITS) + 1
    assert thresholds.at(keys, np.full(10, 5)).tolist() == np.maximum(exact, 0).tolist()


def test_a_threshold_beyond_32_bits_is_the_largest_number() -> None:
    """A plan with such a threshold is refused; wrapped, it would let every key pass."""
    out, one = np.zeros((1, 3), np.int32), np.ones(1, np.int64)
    tau = np.array([2**31 - 2, 2**31 - 1, 2**40]) << DECODE_BITS
    selection._fill_thresholds(out, 0 * one, one, 3 * one, np.zeros((1, 3), np.int64), tau)
    assert out[0, [1, 2, 0]].tolist() == [2**31 - 1] * 3
    selection._fill_thresholds(out, 0 * one, one, 3 * one, np.zeros((1, 3), np.int64), -tau)
    assert out.tolist() == [[0, 0, 0]]


def test_few_keys_at_a_time_are_all_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(triggers=13)
    states, slots = states_of(plan, TEN), np.arange(10)
    monkeypatch.setattr(selection, "MAX_DRAWS_AT_ONCE", 1)
    thresholds = thresholds_of(plan)
    thresholds.ensure(states, slots, np.full(10, 4))
    levels = thresholds.at(slots, np.full(10, 4))
    assert levels.tolist() == by_definition(plan, states)[:, 3].tolist()


@pytest.mark.parametrize("above", [-1, 0])
def test_a_key_passes_at_its_threshold(above: int) -> None:
    plan = make_plan(triggers=13, select_every=1)
    states, slots = states_of(plan, TEN), np.arange(10)
    states.units[:10] = by_definition(plan, states)[:, 3] + above
    passed = select(plan, thresholds_of(plan), states, slots, 4)
    assert passed.tolist() == [above == 0] * 10


def test_the_statistic_of_weights_is_the_last_sum() -> None:
    options: dict[str, Any] = {"weights": SelectionWeights(), "per_key_bound": 1, "combine": True}
    plan = make_plan(aggregates=(COUNT, SUM), **options)
    budget, states = allocate(plan), states_of(plan, [1, 2])
    assert budget.statistic is not None and budget.selection is not None
    states.units[:2], states.values[:2, -1] = [3, 4], [100, 50]
    stream = noise_stream(plan, budget.selection, "selection")
    statistics = NoisyThresholds([(stream, 1)], plan, budget, 2).statistic(states, np.arange(2))
    one, each = budget.statistic.weighted, budget.statistic.counted
    assert (
        one > 0 and each > 0 and statistics.tolist() == [100 * one + 3 * each, 50 * one + 4 * each]
    )


def test_who_is_tested() -> None:
    """More units than the pre-threshold, and a key is selected once."""
    plan = make_plan(pre_threshold=3, aggregates=(COUNT,))
    states = states_of(plan, [1, 2, 3, 4])
    states.units[:4], states.round[3] = [2, 3, 4, 9], 1
    assert candidates(plan, states, np.arange(4)).tolist() == [2]


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
