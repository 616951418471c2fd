"""The public reference population: standings by their definition, keys to expect by simulation."""

import math

import numpy as np
import pytest
from scipy.stats import norm

from dpstream.accounting.budget import allocate
from dpstream.accounting.tuning.reference import chances, expected_keys, kept, stand
from dpstream.accounting.weights import MILD, STEEP
from tests.accounting.plans import COUNT, MEAN, UNITS, Make


def test_a_plan_against_itself_and_half_the_budget(make_plan: Make) -> None:
    plan, poor = make_plan(aggregates=(COUNT, MEAN)), make_plan(aggregates=(COUNT, MEAN), epsilon=3)
    own, other = stand(plan, allocate(plan)), stand(poor, allocate(poor))
    assert own.keys_against(own) == own.noise_against(own) == 1
    assert other.keys_against(own) < 0.7 and other.noise_against(own) > 1.5
    sds = [math.sqrt((of.sd[-1] ** 2 + (of.sd**2).mean()) / 2) for of in allocate(plan).values]
    assert list(own.noise.values()) == pytest.approx(sds) and set(own.noise) == {"count", "level"}
    half = {name: sd / 2 for name, sd in own.noise.items()}
    half["count"] *= 8
    mixed = type(own)(own.keys, own.units, half)
    assert mixed.noise_against(own) == pytest.approx(math.sqrt((16 + 1 / 4) / 2))


def test_only_columns_that_both_have_are_compared(make_plan: Make) -> None:
    both, one = make_plan(aggregates=(COUNT, UNITS)), make_plan(aggregates=(UNITS,))
    first, second = stand(both, allocate(both)), stand(one, allocate(one))
    assert set(second.noise) == {"units"}
    assert second.noise_against(first) == second.noise["units"] / first.noise["units"]
    assert math.isnan(second.noise_against(type(second)(1.0, 1.0, {"other": 1.0})))


def test_public_keys_are_all_there(make_plan: Make) -> None:
    plan, other = make_plan(public_keys="list"), make_plan()
    own = stand(plan, allocate(plan))
    assert own.keys_against(stand(other, allocate(other))) == math.inf
    assert expected_keys(plan, allocate(plan), 7, 41) == 41


def test_chances_are_those_of_the_easiest_test(make_plan: Make) -> None:
    plan = make_plan(12, select_every=4)
    budget = allocate(plan)
    assert budget.tau is not None and budget.statistic is not None
    for count in (1.0, 40.0, 90.0, 400.0):
        by_hand = max(
            norm.cdf((count * (t + 1) / 3 - budget.tau[t] / 256) / budget.statistic.sd[t])
            for t in range(3)
        )
        assert chances(budget, np.array([count]))[0] == pytest.approx(by_hand)
    long = allocate(make_plan(2_000))
    assert long.tau is not None and long.statistic is not None
    last = norm.cdf((300.0 - long.tau[-1] / 256) / long.statistic.sd[-1])
    assert chances(long, np.array([300.0]))[0] >= last  # the last of many tests is looked at


def test_a_smaller_bound_keeps_fewer_records(make_plan: Make) -> None:
    assert kept(1) == 1 and kept(4) == pytest.approx(1 + 1 / 2 + 1 / 3 + 1 / 4)
    plan = make_plan(contributions=16)
    budget = allocate(plan)
    assert stand(plan, budget, 32).keys < stand(plan, budget, 16).keys == stand(plan, budget).keys


@pytest.mark.parametrize("weights", [None, MILD, STEEP])
def test_keys_to_expect_are_those_of_a_simulation(make_plan: Make, weights: object) -> None:
    """Units draw 1, 2, ... records with chance 1/i of at least i, keys by Zipf's law."""
    total, units, keys = 8, 4_000, 60
    plan = make_plan(6, contributions=total, weights=weights, epsilon=2.0)
    budget = allocate(plan)
    assert budget.statistic is not None
    draw = np.random.default_rng(3)
    popular = 1 / np.arange(1, keys + 1)
    records = np.minimum((1 / draw.random(units)).astype(np.int64), total)
    unit = np.repeat(np.arange(units), records)
    number = np.concatenate([np.arange(n) for n in records])
    key = draw.choice(keys, len(unit), p=popular / popular.sum())
    _, first = np.unique(unit * keys + key, return_index=True)
    adds = np.ones(total) if budget.weights is None else budget.weights
    statistic = np.bincount(key[first], adds[number[first]], minlength=keys)
    seen = chances(budget, budget.statistic.weighted * statistic).sum()
    found = expected_keys(plan, budget, units, keys)
    assert 8 < found < keys - 8
    assert found == pytest.approx(seen, rel=0.05)


def test_more_units_publish_more_keys(make_plan: Make) -> None:
    plan = make_plan(24, contributions=100_000, epsilon=1.0, strategy="blt")
    budget = allocate(plan)
    found = [expected_keys(plan, budget, n, 10**6) for n in (1, 10**4, 10**6, 10**8)]
    assert found == sorted(found) and found[0] < 1e-3 and found[-1] < 10**6
    assert expected_keys(plan, budget, 10**12, 3) == pytest.approx(3)
