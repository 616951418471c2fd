"""The public reference population: standings by their definition, keys to expect by simulation."""

import math

import pytest

from dpstream.accounting.budget import allocate
from dpstream.accounting.tuning.reference import (
    _MASS,
    LARGEST,
    SIZES,
    expected_keys,
    harmonic,
    kept,
    stand,
)
from dpstream.accounting.weights import MILD, SPARED
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
    mixed = type(own)(own.keys, own.early, own.units, half)
    assert mixed.noise_against(own) == pytest.approx(math.sqrt((16 + 1 / 4) / 2))


def test_only_columns_that_both_have_are_compared(make_plan: Make) -> None:
    both, one = make_plan(aggregates=(COUNT, UNITS)), make_plan(aggregates=(UNITS,))
    first, second = stand(both, allocate(both)), stand(one, allocate(one))
    assert set(second.noise) == {"units"}
    assert second.noise_against(first) == second.noise["units"] / first.noise["units"]
    assert math.isnan(second.noise_against(type(second)(1.0, 1.0, 1.0, {"other": 1.0})))


def test_public_keys_are_all_there(make_plan: Make) -> None:
    plan, other = make_plan(public_keys="list"), make_plan()
    own = stand(plan, allocate(plan))
    assert own.keys_against(stand(other, allocate(other))) == math.inf
    assert expected_keys(plan, allocate(plan), 7, 41) == 41


def test_a_smaller_bound_keeps_fewer_records(make_plan: Make) -> None:
    assert kept(1) == 1 and kept(4) == pytest.approx(1 + 1 / 2 + 1 / 3 + 1 / 4)
    plan = make_plan(contributions=16)
    budget = allocate(plan)
    assert stand(plan, budget, 32).keys < stand(plan, budget, 16).keys == stand(plan, budget).keys


def test_records_fall_on_keys_as_they_are_met() -> None:
    """What decides how much skipping saves: the integral of n n^-1.7 up to the largest key."""
    assert _MASS[SIZES > LARGEST].sum() == 0 and _MASS.sum() == pytest.approx(1)
    for size in (12, 100, 3_000):
        above = (LARGEST**0.3 - size**0.3) / (LARGEST**0.3 - 1)
        assert _MASS[size < SIZES].sum() == pytest.approx(above, abs=0.02)


def test_skipping_gives_more_keys_early_and_late(make_plan: Make) -> None:
    """As simulated at full scale (docs/benchmarks.md), within a tenth."""
    kind = {"strategy": "blt", "weights": MILD}
    plans = {
        "skips": make_plan(**kind), "not": make_plan(**kind, skip=False),
        "combined": make_plan(**{**kind, "weights": SPARED}, skip=True, per_key_bound=1,
                              combine=True),
    }  # fmt: skip
    own = {name: stand(plan, allocate(plan)) for name, plan in plans.items()}
    late = own["skips"].keys_against(own["not"]), own["combined"].keys_against(own["not"])
    early = own["skips"].early_against(own["not"]), own["combined"].early_against(own["not"])
    assert late == pytest.approx((73_426 / 60_932, 115_300 / 60_932), rel=0.1)
    assert early == pytest.approx((15_728 / 13_690, 29_600 / 13_690), rel=0.1)


def test_more_units_publish_more_keys(make_plan: Make) -> None:
    plan = make_plan(24, contributions=100_000, epsilon=1.0, strategy="blt")
    budget = allocate(plan)
    found = [expected_keys(plan, budget, n, 10**6) for n in (1, 10**4, 10**6, 10**8)]
    assert found == sorted(found) and found[0] < 1e-3 and found[-1] < 10**6
    assert expected_keys(plan, budget, 10**12, 3) == pytest.approx(3)


def test_keys_beyond_memory(make_plan: Make) -> None:
    """Numbers that a person types, up to the most that a command takes: no array of all keys."""
    for count in (100_001, 1_000_000):
        exact = math.fsum(1 / k for k in range(1, count + 1))
        assert harmonic(count) == pytest.approx(exact, rel=1e-15)
    plan = make_plan()
    few = expected_keys(plan, allocate(plan), 10**6, 10**6)
    many = expected_keys(plan, allocate(plan), 10**6, 10**15)
    assert 0 <= many < few
    assert math.isfinite(expected_keys(plan, allocate(plan), 10**15, 10**15))
