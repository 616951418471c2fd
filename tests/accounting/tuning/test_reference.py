"""The public reference population: standings by their definition, keys to expect by simulation."""

import math

import numpy as np
import pytest
from scipy.stats import binom, norm

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.fields import Aggregate
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.tuning.reference import (
    _MASS,
    LARGEST,
    SIZES,
    expected_keys,
    final_sd,
    harmonic,
    mean_contributions,
    reference_figures,
)
from dpstream.accounting.weights import MILD, SPARED, STEEP
from tests.accounting.plans import COUNT, MEAN, UNITS, Make


def test_a_plan_against_itself_and_half_the_budget(make_plan: Make) -> None:
    plan, poor = make_plan(aggregates=(COUNT, MEAN)), make_plan(aggregates=(COUNT, MEAN), epsilon=3)
    own, other = reference_figures(plan, allocate(plan)), reference_figures(poor, allocate(poor))
    assert own.keys_against(own) == own.noise_against(own) == 1
    assert other.keys_against(own) < 0.7 and other.noise_against(own) > 1.5
    sds = [math.sqrt((of.sd[-1] ** 2 + (of.sd**2).mean()) / 2) for of in allocate(plan).values]
    assert list(own.noise.values()) == pytest.approx(sds) and set(own.noise) == {"count", "level"}
    half = {name: sd / 2 for name, sd in own.noise.items()}
    half["count"] *= 8
    mixed = type(own)(own.keys, own.early, own.units, half)
    assert mixed.noise_against(own) == pytest.approx(math.sqrt((16 + 1 / 4) / 2))


def mean_weights(plan: Plan, triggers: int) -> list[float]:
    """What a record weighs on average up to each of T triggers, records in the order of time."""
    if plan.privacy.weights is None:
        return [1.0] * triggers
    total = plan.privacy.contributions
    weighs, fine = plan.privacy.weights.integers(total), 40
    times = (np.arange(triggers * fine) + 0.5) / (triggers * fine)
    at, unit_total = np.zeros(len(times)), 0.0
    for records in range(1, total + 1):
        # At least i records with chance 1/i; others of the unit are earlier with chance s each.
        units = records * (1 / records - (0 if records == total else 1 / (records + 1)))
        earlier = binom.pmf(np.arange(records)[:, None], records - 1, times)
        at, unit_total = at + units * (weighs[:records] @ earlier), unit_total + units
    return list((np.cumsum(at / unit_total) / np.arange(1, len(at) + 1))[fine - 1 :: fine])


def expected(plan: Plan) -> tuple[float, float]:
    """(keys, units of an even chance) on the reference population, size by size."""
    budget = allocate(plan)
    statistic, tau = budget.statistic, budget.tau
    assert statistic is not None and tau is not None
    triggers = len(tau)
    adds = [statistic.weighted * of + statistic.counted for of in mean_weights(plan, triggers)]
    sizes, keys, even = np.geomspace(1, 1e6, 400), [], math.nan
    for n in sizes:
        best = max(
            (n * adds[t - 1] * t / triggers - tau[t - 1] / 256) / statistic.sd[t - 1]
            for t in range(1, triggers + 1)
        )
        chance = norm.cdf(best)
        even = n if chance < 0.5 else even
        keys.append(n**-1.7 * chance)
    return np.trapezoid(keys, sizes), even


@pytest.mark.parametrize("strategy", ["tree", "blt"])
@pytest.mark.parametrize(
    "options",
    [
        {"selection_share": 0.7},
        {"select_every": 5, "refresh_every": 5},
        {"aggregates": (Aggregate("total", "sum", "v", (-1.0, 7.0), 0.5),)},
        {"weights": MILD},
        {"per_key_bound": 1},
        {"per_key_bound": 1, "weights": STEEP, "combine": True},
    ],
)
def test_standings_by_their_definition(
    make_plan: Make, strategy: str, options: dict[str, object]
) -> None:
    plan = make_plan(20, strategy=strategy, skip=False, **options)
    keys, even = expected(plan)
    own = reference_figures(plan, allocate(plan))
    assert own.keys == pytest.approx(keys, rel=1e-3)
    assert even <= own.units <= even * 1.04
    sd = allocate(plan).values[0].sd[-1]
    assert final_sd(plan, allocate(plan)) == sd / plan.design.streams[0].sensitivity


def test_the_last_sd_of_a_count_of_units(make_plan: Make) -> None:
    plan = make_plan(24, aggregates=(Aggregate("people", "units"),), strategy="tree")
    units = allocate(plan).units
    assert units is not None and len(set(units.sd[-3:].tolist())) > 1
    assert final_sd(plan, allocate(plan)) == units.sd[-1]


def test_only_columns_that_both_have_are_compared(make_plan: Make) -> None:
    both, one = make_plan(aggregates=(COUNT, UNITS)), make_plan(aggregates=(UNITS,))
    first, second = reference_figures(both, allocate(both)), reference_figures(one, allocate(one))
    assert set(second.noise) == {"units"}
    assert second.noise_against(first) == second.noise["units"] / first.noise["units"]
    assert math.isnan(second.noise_against(type(second)(1.0, 1.0, 1.0, {"other": 1.0})))


def test_public_keys_are_all_there(make_plan: Make) -> None:
    plan, other = make_plan(public_keys="list"), make_plan()
    own = reference_figures(plan, allocate(plan))
    assert own.keys_against(reference_figures(other, allocate(other))) == math.inf
    assert expected_keys(plan, allocate(plan), 7, 41) == 41


def test_a_smaller_bound_keeps_fewer_records(make_plan: Make) -> None:
    assert mean_contributions(1) == 1 and mean_contributions(4) == pytest.approx(
        1 + 1 / 2 + 1 / 3 + 1 / 4
    )
    plan = make_plan(contributions=16)
    budget = allocate(plan)
    assert (
        reference_figures(plan, budget, 32).keys
        < reference_figures(plan, budget, 16).keys
        == reference_figures(plan, budget).keys
    )


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
    own = {name: reference_figures(plan, allocate(plan)) for name, plan in plans.items()}
    late = own["skips"].keys_against(own["not"]), own["combined"].keys_against(own["not"])
    early = own["skips"].early_against(own["not"]), own["combined"].early_against(own["not"])
    assert late == pytest.approx((81_938 / 65_893, 140_843 / 65_893), rel=0.1)
    assert early == pytest.approx((15_372 / 12_616, 28_872 / 12_616), rel=0.1)


def test_more_units_publish_more_keys(make_plan: Make) -> None:
    plan = make_plan(24, contributions=100_000, epsilon=1.0, strategy="blt")
    budget = allocate(plan)
    key_counts = [expected_keys(plan, budget, n, 10**6) for n in (1, 10**4, 10**6, 10**8)]
    assert key_counts == sorted(key_counts) and key_counts[0] < 1e-3 and key_counts[-1] < 10**6
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
