"""Weights and tau of selection, against exact laws and high-precision arithmetic."""

import itertools
import math
from unittest import mock

import mpmath
import numpy as np
import pytest
from scipy import stats

from dpstream.accounting.query import thresholds
from dpstream.accounting.query.calibration import QueryBudget, allocate_query
from dpstream.accounting.query.parts import parts_of
from dpstream.accounting.query.plan import QueryColumn, QueryPlan
from dpstream.accounting.query.thresholds import WEIGHT_BITS, Selection, count_tested
from tests.accounting.query.losses import loss
from tests.queries import COUNT, MEAN, ROWS, SUM, UNITS, query

PLANS = [
    query(COUNT, epsilon=6.0, delta=1e-9, groups=32),
    query(COUNT, SUM, epsilon=6.0, delta=1e-9, groups=32),
    query(UNITS, epsilon=0.3, delta=1e-6, groups=5),
    query(SUM, epsilon=1.0, delta=1e-5, groups=8),
    query(MEAN, epsilon=1.0, delta=1e-5, groups=1),
    query(UNITS, SUM, epsilon=2.0, delta=1e-8, groups=100),
]


def selection(plan: QueryPlan) -> tuple[QueryBudget, Selection]:
    budget = allocate_query(plan)
    assert budget.selection is not None
    return budget, budget.selection


@pytest.mark.parametrize("plan", PLANS)
def test_weights_fall_and_fill_the_budget(plan: QueryPlan) -> None:
    budget, chosen = selection(plan)
    weights = chosen.weights
    assert all(a >= b > 0 for a, b in itertools.pairwise(weights))
    losses = [loss(budget, n) for n in range(1, len(weights) + 1)]
    assert max(losses) <= 1 and losses[-1] > 0.999
    # Norm 1 for a unit of kappa groups.
    assert weights[-1] == pytest.approx((1 << WEIGHT_BITS) / math.sqrt(len(weights)), rel=1e-3)
    assert weights[-1] <= (1 << WEIGHT_BITS) / math.sqrt(len(weights))


def by_hand(budget: QueryBudget, chosen: Selection) -> mpmath.mpf:
    """tau of the definition with 50 digits."""
    with mpmath.workdps(50):
        part = None if chosen.tested is None else budget.parts[chosen.tested]
        variance = (mpmath.mpf(chosen.weighted) * chosen.sigma) ** 2
        if part is not None:
            variance += (mpmath.mpf(chosen.counted) * part.scale) ** 2
        sd, tau = mpmath.sqrt(variance), mpmath.mpf(0)
        for t, weight in enumerate(chosen.weights, 1):
            tail = mpmath.mpf(budget.threshold_delta) / t
            at = mpmath.findroot(
                lambda z, tail=tail: (
                    mpmath.log(mpmath.erfc(z / mpmath.sqrt(2)) / 2) - mpmath.log(tail)
                ),
                6,
            )
            alone = chosen.weighted * weight + chosen.counted * (0 if part is None else 1)
            tau = max(tau, alone + sd * at)
        return tau + mpmath.mpf(chosen.weighted + chosen.counted) / 2


@pytest.mark.parametrize("plan", PLANS)
def test_tau_to_twelve_digits(plan: QueryPlan) -> None:
    budget, chosen = selection(plan)
    exact = by_hand(budget, chosen)
    assert exact <= chosen.tau <= exact * (1 + mpmath.mpf("1e-12"))
    assert 0 <= chosen.threshold - chosen.tau < 1


def released(budget: QueryBudget, chosen: Selection, groups: int) -> float:
    """P[a group that one unit of so many groups is alone in is released], by its exact law."""
    weight = chosen.weights[groups - 1]
    if chosen.tested is None:
        need = math.floor(chosen.threshold / chosen.weighted) + 1 - weight
        return float(stats.norm.sf((need - 0.5) / chosen.sigma))
    sigma = budget.parts[chosen.tested].scale
    k = np.arange(-math.ceil(14 * sigma), math.ceil(14 * sigma) + 1)
    mass = stats.norm.cdf((k + 0.5) / sigma) - stats.norm.cdf((k - 0.5) / sigma)
    # The least weighted noise that passes, for each noise of the count.
    left = chosen.threshold - chosen.weighted * weight - chosen.counted * (1 + k)
    needs = left // chosen.weighted + 1
    return float((mass * stats.norm.sf((needs - 0.5) / chosen.sigma)).sum())


def worst_release(plan: QueryPlan) -> float:
    """Largest t P[release] over delta_tau, t <= n <= kappa groups, t of them alone."""
    budget, chosen = selection(plan)
    chances = [released(budget, chosen, n) for n in range(1, len(chosen.weights) + 1)]
    return max(n * chance for n, chance in enumerate(chances, 1)) / budget.threshold_delta


@pytest.mark.parametrize("plan", PLANS)
def test_a_unit_alone_is_released_with_at_most_delta(plan: QueryPlan) -> None:
    assert 0.7 < worst_release(plan) <= 1


def test_tau_without_its_maximum_is_caught() -> None:
    def first_only(
        alone: list[int], sd: float, rounding: float, delta_tau: float, isfs: tuple[float, ...]
    ) -> float:
        return alone[0] + sd * isfs[0] + rounding

    with mock.patch.object(thresholds, "tau_of", first_only):
        assert worst_release(PLANS[1]) > 1


def test_a_forgotten_count_is_caught() -> None:
    """Leaving out what the unit adds to the published count."""
    real = thresholds.alone_of

    def without(weights: list[int], weighted: int, counted: int, part: object) -> tuple[int, ...]:
        return real(weights, weighted, counted, None)

    with mock.patch.object(thresholds, "alone_of", without):
        assert worst_release(PLANS[0]) > 1


def test_weights_of_a_larger_norm_are_caught() -> None:
    real = thresholds.weights_of

    def plain(*args: object) -> tuple[int, ...]:
        return tuple(min(1 << WEIGHT_BITS, 2 * w) for w in real(*args))  # type: ignore[arg-type]

    with mock.patch.object(thresholds, "weights_of", plain):
        budget, _ = selection(PLANS[1])
    assert max(loss(budget, n) for n in range(1, 33)) > 1.1


def test_which_count_joins() -> None:
    def joins(*columns: QueryColumn) -> int | None:
        plan = query(*columns)
        units = frozenset(c.name for c in columns if c.kind == "units")
        return count_tested(parts_of(plan), units)

    assert joins(SUM) is None and joins(ROWS) is None
    assert joins(SUM, COUNT) == 1
    assert joins(COUNT, UNITS) == 1  # a count of units rather than one of rows
    assert joins(QueryColumn("m", "mean", 0, 1, per="group", grid=0.1)) == 1


def test_need_grows_with_the_units_asked_for() -> None:
    _, chosen = selection(PLANS[0])
    assert chosen.need(1) == chosen.threshold
    assert chosen.need(3) - chosen.need(1) == 2 * chosen.most
    assert chosen.most == chosen.weighted * chosen.weights[0] + chosen.counted


def test_even_chance() -> None:
    _, chosen = selection(PLANS[0])
    few, many = chosen.even_chance(1), chosen.even_chance(32)
    assert 5 < few < many < 100
    assert chosen.even_chance(1, min_units=50) >= 50


def test_with_a_norm_a_count_is_whole_in_one_group() -> None:
    plan = query(COUNT, groups=None, norm=8.0, epsilon=6.0, delta=1e-9)
    budget, chosen = selection(plan)
    part = budget.parts[0].part
    alone = thresholds.alone_of(chosen.weights, chosen.weighted, chosen.counted, part)
    assert len(alone) == 4096
    assert all(
        most == chosen.weighted * w + chosen.counted * part.unit
        for most, w in zip(alone, chosen.weights, strict=True)
    )
    small = query(COUNT, groups=None, norm=0.5, epsilon=6.0, delta=1e-9)
    assert parts_of(small)[0].alone == 0.5 * (1 << 16)


def test_a_sum_of_zeros_and_ones_does_not_join() -> None:
    bit = QueryColumn("b", "sum", 0, 1, per="group")
    assert count_tested(parts_of(query(bit)), frozenset()) is None
    assert count_tested(parts_of(query(bit, COUNT)), frozenset()) == 1


def test_the_counts_coefficient_is_by_precision() -> None:
    """d / a = (alone / part sd^2) / (typical weight / sd^2), of units of up to 32 groups."""
    part = parts_of(query(COUNT))[0]
    weights = [90] * 16 + [60] * 16 + [1] * 1_000
    assert thresholds.coefficient(weights, 6.0, part, 0.5) == round(256 * 6.0**2 / 75 / 0.5**2)
    assert thresholds.coefficient(weights, 6.0, part, 5e5) == 1
    assert thresholds.coefficient([0, 0], 6.0, part, 0.5) == 1
    _, alone = selection(query(SUM))
    assert alone.tested is None and alone.counted == 0


def test_even_chance_is_where_the_statistic_reaches_what_it_needs() -> None:
    plan = query(COUNT, epsilon=6.0, delta=1e-9, groups=32)
    _, chosen = selection(plan)
    each = chosen.weighted * chosen.weights[4] + chosen.counted
    assert chosen.even_chance(5) == pytest.approx(chosen.threshold / each)
    assert chosen.even_chance(5, 3) == pytest.approx((chosen.threshold + 2 * chosen.most) / each)
    halves = chosen.weighted * chosen.weights[4] + 0.5 * chosen.counted
    assert chosen.even_chance(5, count=0.5) == pytest.approx(chosen.threshold / halves)


def test_tau_finds_its_own_tails() -> None:
    alone = (9, 7, 5)
    tau = thresholds.tau_of(alone, 2.0, 0.5, 1e-6)
    assert tau == thresholds.tau_of(alone, 2.0, 0.5, 1e-6, thresholds.tails(1e-6, 3))
    assert tau > thresholds.tau_of(alone, 2.0, 0.5, 1e-5)


@pytest.mark.parametrize("plan", PLANS[:3])
def test_no_cut_of_the_weights_has_a_lower_tau(plan: QueryPlan) -> None:
    budget, chosen = selection(plan)
    parts, shares = parts_of(plan), [noise.share for noise in budget.parts]
    full_weights = thresholds.weights_of(chosen.share, parts, shares, plan.most_groups)
    part = None if chosen.tested is None else parts[chosen.tested]
    part_sigma = 0.0 if chosen.tested is None else budget.parts[chosen.tested].scale
    taus = []
    for cap in (1, 2, 3, 4):
        weights = [min(w, full_weights[cap - 1]) for w in full_weights]
        d = 0 if part is None else thresholds.coefficient(weights, chosen.sigma, part, part_sigma)
        sd = math.hypot(256 * chosen.sigma, d * part_sigma)
        alone = thresholds.alone_of(weights, 256, d, part)
        taus.append(thresholds.tau_of(alone, sd, (256 + d) / 2, budget.threshold_delta))
    assert chosen.tau == pytest.approx(min(taus), rel=1e-9)
