"""Budgets of queries: shares, laws, ranges, what is told before any data is read."""

import math

import msgspec
import numpy as np
import pytest
from scipy import stats

from dpstream.accounting.composition import epsilon_spent
from dpstream.accounting.errors import UsageError
from dpstream.accounting.gaussian import delta_of
from dpstream.accounting.mechanisms.optimum import truncation
from dpstream.accounting.query.calibration import (
    THETA,
    PartNoise,
    QueryBudget,
    allocate_query,
    expected,
)
from dpstream.accounting.query.parts import QueryPart, rank_factor
from dpstream.accounting.query.plan import QueryColumn, QueryPlan
from dpstream.dp_transforms.noise.oneshot import LEAST_SCALE, MAX_SCALE
from tests.accounting.query.losses import loss
from tests.queries import ALL, COUNT, MEAN, QUANTILES, SUM, UNITS, VAR, query

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


@pytest.mark.parametrize("plan", PLANS)
def test_a_budget_is_committed_as_text(plan: QueryPlan) -> None:
    budget = allocate_query(plan)
    assert msgspec.json.decode(msgspec.json.encode(budget), type=QueryBudget) == budget


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


def test_one_group_of_everything() -> None:
    """No GROUP BY: one public group, and kappa 1."""
    budget = allocate_query(query(SUM, groups=1, selects=False, epsilon=1.0, delta=1e-6))
    assert budget.selection is None and budget.mu is not None
    assert math.isclose(budget.parts[0].scale, 10 / budget.mu, rel_tol=1e-9)


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


def test_a_threshold_beyond_integers_is_refused() -> None:
    with pytest.raises(UsageError, match="too small for any group") as caught:
        allocate_query(query(COUNT, epsilon=1e-12, delta=1e-12))
    assert caught.value.field == "epsilon"


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
