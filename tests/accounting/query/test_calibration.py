"""Budgets of queries: shares, laws, ranges, what is told before any data is read.

Weights and tau of selection, against exact laws and high-precision arithmetic.
"""

import itertools
import math
from unittest import mock

import mpmath
import msgspec
import numpy as np
import pytest
from scipy import stats

from dpstream.accounting.composition import epsilon_spent
from dpstream.accounting.errors import UsageError
from dpstream.accounting.gaussian import delta_of
from dpstream.accounting.mechanisms.optimum import truncation
from dpstream.accounting.query import thresholds
from dpstream.accounting.query.calibration import (
    THETA,
    PartNoise,
    QueryBudget,
    allocate_query,
    expected,
)
from dpstream.accounting.query.parts import QueryPart, parts_of, rank_factor
from dpstream.accounting.query.plan import QueryColumn, QueryPlan
from dpstream.accounting.query.thresholds import WEIGHT_BITS, Selection, count_tested
from dpstream.dp_transforms.noise.oneshot import LEAST_SCALE, MAX_SCALE
from tests.accounting.query.losses import loss
from tests.golden.refusals import Refused
from tests.queries import ALL, COUNT, MEAN, QUANTILES, ROWS, SUM, UNITS, VAR, query

PLANS = [
    query(*ALL),
    query(COUNT),
    query(SUM, selects=False),
    query(*ALL, groups=None, norm=3.0),
    query(*ALL, groups=1),
    query(MEAN, QUANTILES, mechanism="geometric"),
    query(UNITS, SUM, mechanism="geometric"),
    query(SUM, mechanism="geometric", selects=False, delta=0.0),
    query(SUM, COUNT, mechanism="geometric", epsilon=0.25),
    query(),
    query(epsilon=0.25, groups=256),
    query(mechanism="geometric"),
]


@pytest.mark.parametrize("plan", PLANS)
def test_no_unit_uses_more_than_the_budget(plan: QueryPlan) -> None:
    budget = allocate_query(plan)
    losses = [loss(budget, n) for n in range(1, budget.groups + 1)]
    assert 0.99 < max(losses) <= 1
    if budget.mu is not None:
        delta = delta_of(plan.epsilon, budget.mu) + budget.threshold_delta
        assert delta <= plan.delta
        assert budget.threshold_delta == (THETA * plan.delta if plan.selects else 0)


def test_laplace_is_charged_plain() -> None:
    budget = allocate_query(query(UNITS, SUM, mechanism="geometric"))
    assert budget.mu is None and budget.threshold_delta == 0
    assert len(budget.parts) == 2  # the published count is the tested one
    lone = allocate_query(query(SUM, mechanism="geometric"))
    assert [noise.part.column for noise in lone.parts] == ["s", ""]
    for noise in (*budget.parts, *lone.parts):
        most = 4 * noise.part.most * noise.part.nodes
        assert noise.scale >= most / (noise.share * 1.0)
    assert sum(noise.share for noise in lone.parts) <= 1


def test_budgets_are_spends_of_an_account() -> None:
    class Charge(msgspec.Struct):
        epsilon: float
        delta: float
        mu: float | None
        threshold_delta: float
        rho: float | None = None

    budgets = [allocate_query(query(COUNT)), allocate_query(query(COUNT, mechanism="geometric"))]
    spends = [Charge(b.epsilon, b.delta, b.mu, b.threshold_delta) for b in budgets]
    assert epsilon_spent(spends[:1], 1e-6) <= 1.0 < epsilon_spent(spends, 1e-5) <= 2.5


@pytest.mark.parametrize("scale", [0.2, 0.3, 2.0, 17.5])
@pytest.mark.parametrize("law", ["gaussian", "geometric"])
def test_margins_are_exact_quantiles(law: str, scale: float) -> None:
    part = allocate_query(query(COUNT)).parts[0].part
    noise = PartNoise(part, law, 1.0, 1.0, scale)

    def beyond(k: int) -> float:
        if law == "gaussian":
            return float(2 * stats.norm.sf((k + 0.5) / scale))
        ratio = math.exp(-1 / scale)
        return 2 * ratio ** (k + 1) / (1 + ratio)

    assert beyond(noise.margin) <= 0.05 + 1e-12
    assert noise.margin == 0 or beyond(noise.margin - 1) > 0.05
    if law == "gaussian" and scale >= 2:
        variance = sum(k * k * (beyond(k - 1) - beyond(k)) for k in range(1, 1000))
        assert math.isclose(noise.sd, math.sqrt(variance), rel_tol=1e-9)
    if law == "geometric":
        masses = [(1 - math.exp(-1 / scale)) / (1 + math.exp(-1 / scale)) * math.exp(-k / scale)
                  for k in range(1000)]  # fmt: skip
        variance = 2 * sum(k * k * mass for k, mass in enumerate(masses))
        assert math.isclose(noise.sd, math.sqrt(variance), rel_tol=1e-9)


@pytest.mark.parametrize(("scale", "most"), [(0.2, 1), (2.0, 3), (17.5, 200), (1e7, 40)])
def test_margins_and_sds_of_truncated_noise(scale: float, most: int) -> None:
    part = allocate_query(query(COUNT)).parts[0].part
    noise = PartNoise(part, "geometric", 1.0, 1.0, scale, most)
    size = np.abs(np.arange(-most, most + 1))
    mass = np.exp(-size / scale) / np.exp(-size / scale).sum()
    assert math.isclose(noise.sd, math.sqrt((mass * size**2).sum()), rel_tol=1e-5)
    assert mass[size > noise.margin].sum() <= 0.05 + 1e-12
    assert noise.margin == 0 or mass[size > noise.margin - 1].sum() > 0.05


def test_refusals() -> None:
    with pytest.raises(UsageError) as caught:
        allocate_query(query(QueryColumn("a", "mean")))
    assert caught.value.field == "column[0].bounds"
    with pytest.raises(UsageError) as caught:
        allocate_query(query(QueryColumn("s", "sum", 0, 1, grid=2.0**-31, rows=1), epsilon=1e-6))
    assert caught.value.field == "epsilon"


def test_expected_errors_are_in_the_columns_units() -> None:
    plan = query(SUM, groups=None, norm=3.0)
    [row] = expected(plan, allocate_query(plan))
    [part] = row["parts"]
    noise = allocate_query(plan).parts[0]
    assert math.isclose(part["sd"], noise.sd * 0.5 / 65536) and part["within"] > 1.9 * part["sd"]


def test_a_laplace_threshold_is_of_plain_counts() -> None:
    plan = query(SUM, mechanism="geometric", groups=3)
    budget = allocate_query(plan)
    chosen, last = budget.selection, budget.parts[-1]
    assert chosen is not None and budget.delta == plan.delta and budget.weights == ()
    assert last.part == QueryPart("", "count", 0, 1, 1, None, 0, last.part.share)
    assert chosen.tested == len(budget.parts) - 1
    assert (chosen.share, chosen.sigma, chosen.weighted, chosen.sd) == (0, 0, 0, 0)
    assert (chosen.counted, chosen.most, chosen.tau) == (1, 1, chosen.threshold)
    assert chosen.threshold == last.most
    assert (last.most, last.sooner) == truncation(last.scale, plan.delta, 3)
    assert [noise.most for noise in budget.parts[:-1]] == [None] * (len(budget.parts) - 1)
    public = allocate_query(query(SUM, mechanism="geometric", selects=False, delta=1e-6))
    assert public.selection is None and public.delta == 0 and public.weights == ()


def test_the_count_of_units_is_tested_before_one_of_rows() -> None:
    for mechanism in ("gaussian", "geometric"):
        chosen = allocate_query(query(COUNT, UNITS, mechanism=mechanism)).selection
        assert chosen is not None and chosen.tested == 1


def test_half_widths_in_sds() -> None:
    assert allocate_query(query(COUNT)).quantile == pytest.approx(stats.norm.isf(0.025))
    # P[|X| > q sd] = exp(-sqrt(2) q) of a Laplace variable.
    quantile = allocate_query(query(COUNT, mechanism="geometric")).quantile
    assert math.exp(-math.sqrt(2) * quantile) == pytest.approx(0.05)


def test_a_threshold_beyond_integers_is_refused(refused: Refused) -> None:
    refused(lambda: allocate_query(query(COUNT, epsilon=1e-12, delta=1e-12)))


@pytest.mark.parametrize("columns", [(COUNT,), (UNITS,), ()])
@pytest.mark.parametrize("epsilon", 10.0 ** np.arange(-12, 0))
def test_a_budget_has_noise_that_can_be_drawn(
    columns: tuple[QueryColumn, ...], epsilon: float
) -> None:
    """That of the selection as well: else its draw would fail behind the charge."""
    try:
        budget = allocate_query(query(*columns, epsilon=epsilon, delta=1e-8))
    except UsageError as refused:
        assert refused.field == "epsilon" and epsilon < 1e-6
        return
    scales = [part.scale for part in budget.parts]
    scales += [] if budget.selection is None else [budget.selection.sigma]
    assert all(LEAST_SCALE <= scale <= MAX_SCALE for scale in scales)


def test_expected_errors_of_every_part() -> None:
    var = msgspec.structs.replace(VAR, grid=0.5)
    plan = query(COUNT, SUM, var, QUANTILES)
    budget = allocate_query(plan)
    steps = [1.0, 0.5, 0.5, 0.25, 1.0, rank_factor(QUANTILES)]
    parts = [part for row in expected(plan, budget) for part in row["parts"]]
    assert [part["what"] for part in parts] == [noise.part.what for noise in budget.parts]
    for part, noise, step in zip(parts, budget.parts, steps, strict=True):
        assert part["sd"] == pytest.approx(noise.sd * step)
        assert part["within"] == pytest.approx(noise.margin * step)


@pytest.mark.parametrize("epsilon", [0.125, 8.0])
def test_laplace_scales_follow_epsilon(epsilon: float) -> None:
    plan = query(SUM, QUANTILES, mechanism="geometric", epsilon=epsilon)
    parts = allocate_query(plan).parts
    for noise in parts:
        most = 4 * noise.part.most * noise.part.nodes
        assert noise.sensitivity == most
        assert most / (noise.share * epsilon) <= noise.scale
        assert noise.scale == pytest.approx(most / (noise.share * epsilon))
    # The count that thresholds alone need has an average column's share.
    assert [noise.share for noise in parts] == pytest.approx([1 / 3] * 3)


THRESHOLDS_PLANS = [
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


@pytest.mark.parametrize("plan", THRESHOLDS_PLANS)
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


@pytest.mark.parametrize("plan", THRESHOLDS_PLANS)
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
    needed = chosen.threshold - chosen.weighted * weight - chosen.counted * (1 + k)
    needs = needed // chosen.weighted + 1
    return float((mass * stats.norm.sf((needs - 0.5) / chosen.sigma)).sum())


def worst_release(plan: QueryPlan) -> float:
    """Largest t P[release] over delta_tau, t <= n <= kappa groups, t of them alone."""
    budget, chosen = selection(plan)
    chances = [released(budget, chosen, n) for n in range(1, len(chosen.weights) + 1)]
    return max(n * chance for n, chance in enumerate(chances, 1)) / budget.threshold_delta


@pytest.mark.parametrize("plan", THRESHOLDS_PLANS)
def test_a_unit_alone_is_released_with_at_most_delta(plan: QueryPlan) -> None:
    assert 0.7 < worst_release(plan) <= 1


def test_tau_without_its_maximum_is_caught() -> None:
    def first_only(
        alone: list[int], sd: float, rounding: float, delta_tau: float, isfs: tuple[float, ...]
    ) -> float:
        return alone[0] + sd * isfs[0] + rounding

    with mock.patch.object(thresholds, "tau_of", first_only):
        assert worst_release(THRESHOLDS_PLANS[1]) > 1


def test_a_forgotten_count_is_caught() -> None:
    """Leaving out what the unit adds to the published count."""
    real = thresholds.alone_of

    def without(weights: list[int], weighted: int, counted: int, part: object) -> tuple[int, ...]:
        return real(weights, weighted, counted, None)

    with mock.patch.object(thresholds, "alone_of", without):
        assert worst_release(THRESHOLDS_PLANS[0]) > 1


def test_weights_of_a_larger_norm_are_caught() -> None:
    real = thresholds.weights_of

    def plain(*args: object) -> tuple[int, ...]:
        return tuple(min(1 << WEIGHT_BITS, 2 * w) for w in real(*args))  # type: ignore[arg-type]

    with mock.patch.object(thresholds, "weights_of", plain):
        budget, _ = selection(THRESHOLDS_PLANS[1])
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


@pytest.mark.parametrize("plan", THRESHOLDS_PLANS[:3])
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
