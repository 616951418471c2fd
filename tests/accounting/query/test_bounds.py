"""Automatic bounds: what histograms cost, and what is read off them."""

import math
from typing import Literal, get_args

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from dpstream.accounting.query.bounds import (
    BoundsDesign,
    Cut,
    candidates,
    cells_of_values,
    cut_of,
    design_bounds,
    not_estimated,
    settled,
)
from dpstream.accounting.query.calibration import allocate_query, noise_by_bound
from dpstream.accounting.query.plan import GROUPS, ColumnKind, QueryColumn, QueryPlan
from dpstream.accounting.tuning.question import Histogram, encoder_matrix, histogram
from tests.accounting.query.losses import loss
from tests.golden.refusals import Refused
from tests.queries import COUNT, MEAN, ROWS, SUM, UNITS, query

Int64 = npt.NDArray[np.int64]
COUNTED = QueryColumn("c", "count", per="group")


def prefixes(histogram: Histogram, values: Int64) -> npt.NDArray[np.float64]:
    return np.cumsum(
        np.bincount(cells_of_values(histogram, values), minlength=histogram.cells)
    ).astype(float)


def tree(edges: tuple[int, ...]) -> Histogram:
    return histogram("c", edges, len(edges), (0.01, 0.99), 1, 0.5, 1.0)


def chosen(column: QueryColumn, values: Int64, seed: int, epsilon: float = 1.0) -> Cut:
    """Of bounds that are chosen from noisy nodes."""
    plan = query(column, groups=1, selects=False, epsilon=epsilon)
    design = design_bounds(plan)
    assert design is not None
    [of] = design.histograms
    counts = np.bincount(cells_of_values(of, values), minlength=of.cells)
    nodes = encoder_matrix(of.cells) @ counts
    noise = np.rint(np.random.default_rng(seed).normal(0, of.sigma, len(nodes)))
    return settled(plan, design, [nodes + noise.astype(np.int64)]).cuts[column.name]


def of_counts(values: Int64, bound: float) -> float:
    """Share of the rows that a bound on rows cuts."""
    return float(np.maximum(values - bound, 0).sum() / values.sum())


def test_shares_of_values_are_exact_without_noise() -> None:
    of = tree((-8, -4, -2, -1, 0, 1, 2, 4, 8))
    values = np.array([-9, -8, -3, -1, 0, 0, 1, 2, 3, 5, 8, 20])
    for low, high in ((-2, 2), (-4, 4), (-1, 0), (0, 1), (1, 4), (-4, -1), (-8, 8)):
        cut = cut_of(of, prefixes(of, values), "values", (low, high), 0.5, True)
        # A bound nearer to 0 takes values that are equal to it as beyond: their cell is not divided
        under = values < low if low <= 0 else values <= low
        over = values > high if high >= 0 else values >= high
        if high == 8:  # the last cell of a tree holds all beyond
            over[:], under[:] = False, False
        assert (cut.low, cut.high) == (low / 2, high / 2)
        assert cut.below == pytest.approx(under.mean()) and cut.above == pytest.approx(over.mean())
        assert 0 <= (cut.amount or 0) <= (cut.amount_at_most or 0) <= 1


@pytest.mark.parametrize("units", [3_000, 30_000, 300_000])
@pytest.mark.parametrize("sigma", [0.5, 1.0, 2.0])
def test_the_cut_of_log_normal_rows_is_near_the_truth(units: int, sigma: float) -> None:
    draw = np.random.default_rng(units)
    rows = np.ceil(draw.lognormal(1.5, sigma, units)).astype(np.int64)
    errors, truths, within = [], [], []
    for seed in range(9):
        cut = chosen(COUNTED, rows, seed)
        assert cut.of == "rows" and cut.amount is not None and cut.amount_at_most is not None
        truths.append(of_counts(rows, cut.high))
        errors.append(abs(cut.amount - truths[-1]))
        within.append(cut.amount <= cut.amount_at_most >= truths[-1])
        assert abs(cut.above - np.mean(rows > cut.high)) <= cut.within
    assert np.mean(errors) < 0.01 + np.mean(truths) < 0.2 and sum(within) >= 8


def test_a_power_law_is_within_what_is_reported_at_most() -> None:
    rows = np.ceil(np.random.default_rng(4).pareto(1.5, 100_000) + 1e-9).astype(np.int64)
    cuts = [chosen(COUNTED, rows, seed) for seed in range(9)]
    within = [of_counts(rows, cut.high) <= (cut.amount_at_most or 0) for cut in cuts]
    assert sum(within) >= 8


@pytest.mark.parametrize("kind", ["sum", "var"])
def test_values_beyond_all_candidates_are_reported_as_beyond(kind: str) -> None:
    column = QueryColumn("c", kind, per="row" if kind == "var" else "group")  # type: ignore[arg-type]
    values = np.where(np.arange(50_000) % 4 > 0, 100, 1 << 40)
    cut = chosen(column, values, 1)
    assert cut.above == pytest.approx(0.25, abs=0.02) and cut.high < 1 << 40


def test_an_estimate_is_of_noisy_counts() -> None:
    """Another draw of noise gives another share: the exact one is nowhere."""
    rows = np.ceil(np.random.default_rng(7).lognormal(1, 1, 20_000)).astype(np.int64)
    shares = {chosen(COUNTED, rows, seed).above for seed in range(6)}
    assert len(shares) > 4


def test_what_is_not_estimated_is_named() -> None:
    plan = query(SUM, MEAN, COUNT, ROWS, UNITS)
    given = not_estimated(plan, (), True)
    assert given == ("groups", "bounds of s", "bounds of m", "rows of m", "bounds of n",
                     "rows of rows")  # fmt: skip
    names = not_estimated(plan, {GROUPS, "m", MEAN.rows_histogram, "n"}, True)
    assert names == ("bounds of s", "rows of rows")
    assert not_estimated(query(UNITS), (), False) == ()
    assert math.isfinite(chosen(COUNTED, np.ones(9_000, np.int64), 1).within)


AUTO = QueryColumn("a", "mean", grid=0.5, rows=2)
PLANS = [
    query(AUTO),
    query(AUTO, COUNT, SUM),
    query(AUTO, COUNTED, selects=False),
    query(QueryColumn("v", "var"), groups=None, norm=2.0),
    query(AUTO, COUNTED, mechanism="geometric"),
    query(AUTO, mechanism="geometric", selects=False, delta=0.0),
]


def designed(plan: QueryPlan) -> BoundsDesign:
    design = design_bounds(plan)
    assert design is not None
    return design


def exact(design: BoundsDesign, *values: list[int]) -> list[np.ndarray]:
    out = []
    for of, given in zip(design.histograms, values, strict=True):
        counts = np.bincount(cells_of_values(of, np.array(given)), minlength=of.cells)
        out.append(encoder_matrix(of.cells) @ counts)
    return out


@pytest.mark.parametrize("plan", PLANS)
def test_bounds_and_answer_share_one_budget(plan: QueryPlan) -> None:
    design = designed(plan)
    values = [[1, 2, 3, 4] * 100_000 for _ in design.histograms]
    settlement = settled(plan, design, exact(design, *values))
    assert not settlement.nulls
    budget = allocate_query(settlement.plan, design.reserved)
    assert budget.reserved == pytest.approx(sum(design.reserved.values())) and budget.reserved > 0
    losses = [loss(budget, n) for n in range(1, budget.groups + 1)]
    assert 0.99 < max(losses) <= 1
    for of in design.histograms:
        levels = int(encoder_matrix(of.cells).sum(axis=0).max())
        if budget.mu is None:
            assert levels / of.sigma <= of.share * plan.epsilon
        else:
            assert (levels**0.5 / of.sigma) ** 2 <= of.share * budget.mu**2


def test_half_of_a_columns_share_pays_for_its_bounds() -> None:
    plan = query(AUTO, SUM, selects=False)
    design = designed(plan)
    assert design.reserved["a"] == pytest.approx(0.25)
    settlement = settled(plan, design, exact(design, [1, 5] * 10_000))
    shares = [n.share for n in allocate_query(settlement.plan, design.reserved).parts]
    assert sum(shares[:2]) == pytest.approx(0.25) and shares[2] == pytest.approx(0.5)


def test_bounds_hold_nearly_all_values() -> None:
    plan = query(AUTO)
    design = designed(plan)
    values = np.random.default_rng(1).normal(100, 10, 50_000).astype(int).tolist()
    column = settled(plan, design, exact(design, values)).plan.columns[0]
    assert column.low is not None and column.high is not None
    lo, hi = column.grid_bounds()
    inside = np.mean([lo <= v <= hi for v in values])
    assert inside >= 0.98 and hi - lo < 200
    assert not column.automatic and msgspec.structs.replace(column, low=None, high=None) == AUTO


@pytest.mark.parametrize("units", [2_000, 4_000, 50_000])
def test_noise_is_not_taken_for_values_far_away(units: int) -> None:
    """Of few units 1% is less than noise: bounds of millions would pass for those of 0 to 200."""
    plan, draw = query(AUTO, epsilon=0.5, delta=1e-8), np.random.default_rng(units)
    design = designed(plan)
    [of] = design.histograms
    assert 5 * of.rank_error < 2_000
    for _ in range(30):
        [nodes] = exact(design, draw.normal(100, 20, units).astype(int).tolist())
        noise = np.rint(draw.normal(0, of.sigma, len(nodes))).astype(int)
        settlement = settled(plan, design, [nodes + noise])
        assert not settlement.nulls
        lo, hi = settlement.plan.columns[0].grid_bounds()
        assert -50 < lo < 100 < hi < 300


DRAW = np.random.default_rng(23)
POPULATIONS = {
    "constant": np.full(20_000, 3),
    "Poisson": DRAW.poisson(5, 20_000) + 1,
    "log-normal": np.ceil(DRAW.lognormal(2, 1, 20_000)).astype(int),
    "heavy log-normal": np.ceil(DRAW.lognormal(2, 1.8, 20_000)).astype(int),
    "Zipf": DRAW.zipf(2.5, 200_000),
}


@pytest.mark.parametrize("mechanism", ["gaussian", "geometric"])
@pytest.mark.parametrize("name", POPULATIONS)
def test_bounds_of_one_count_are_near_the_best_in_hindsight(name: str, mechanism: str) -> None:
    """Whole error: what the bound cuts, and the noise that it needs.  Where noise hides the rest of
    a tail, a bound that ends there has twice to three times the least error."""
    values, draw = POPULATIONS[name], np.random.default_rng(5)
    delta = 1e-9 if mechanism == "gaussian" else 0.0
    plan = query(COUNTED, groups=1, selects=False, mechanism=mechanism, epsilon=1.0, delta=delta)
    design = designed(plan)
    [of] = design.histograms
    unit = noise_by_bound(plan, design.reserved)["c"]
    [nodes] = exact(design, values.tolist())

    def error(bound: float) -> float:
        return float(np.hypot(np.maximum(values - bound, 0).sum(), bound * unit))

    best, errors = min(error(bound) for bound in of.candidates), []
    law = draw.normal if mechanism == "gaussian" else draw.laplace
    for _ in range(20):
        noise = np.rint(law(0, of.sigma, len(nodes))).astype(int)
        high = settled(plan, design, [nodes + noise]).plan.columns[0].high
        errors.append(error(high or 0))
    assert np.sqrt(np.mean(np.square(errors))) < (1.8 if mechanism == "gaussian" else 4) * best


def test_noise_is_proportional_to_the_bound() -> None:
    for kind, mechanism in (("count", "gaussian"), ("sum", "gaussian"), ("sum", "geometric")):
        grid = 1.0 if kind == "count" else 0.5
        column = QueryColumn("c", kind, per="group", grid=grid)  # type: ignore[arg-type]
        plan = query(column, COUNT, groups=1, selects=False, mechanism=mechanism)
        design = designed(plan)
        by_bound = noise_by_bound(plan, design.reserved)["c"]
        settled_plan = settled(plan, design, exact(design, [40] * 50_000)).plan
        [noise, _] = allocate_query(settled_plan, design.reserved).parts
        assert noise.sd / noise.part.most == pytest.approx(by_bound, rel=1e-3)


@pytest.mark.parametrize("kind", get_args(ColumnKind))
@pytest.mark.parametrize("per", ["group", "row"])
def test_bounds_are_chosen_beside_any_column(
    kind: ColumnKind, per: Literal["group", "row"]
) -> None:
    at = (0.5,) if kind == "quantiles" else ()
    beside = QueryColumn("b", kind, per="row" if at else per, at=at)
    plan = query(QueryColumn("c", "sum", per="group"), beside, groups=1, selects=False)
    design = designed(plan)
    values = [[40] * 50_000 for _ in design.histograms]
    columns = settled(plan, design, exact(design, *values)).plan.columns
    assert all(not column.automatic for column in columns)


def test_the_lower_bound_of_a_sum_costs_no_noise_and_is_as_wide() -> None:
    plan = query(QueryColumn("c", "sum", per="group", grid=0.5), groups=1, selects=False)
    design = designed(plan)
    for sign in (1, -1):
        settlement = settled(plan, design, exact(design, [sign * 100, sign * 112] * 50_000))
        [column] = settlement.plan.columns
        assert (column.low, column.high) == (-56, 56)
        assert settlement.cuts["c"].below + settlement.cuts["c"].above < 1e-9


def test_no_bin_that_passes_is_null() -> None:
    plan = query(AUTO, SUM)
    design = designed(plan)
    settlement = settled(plan, design, exact(design, [7] * 5))
    assert settlement.nulls == {"a"}
    allocate_query(settlement.plan, design.reserved)


def test_a_count_that_few_units_have_has_its_default_bound() -> None:
    """It says about how many there are; a mean has no bounds that are public."""
    plan = query(AUTO, COUNTED)
    design = designed(plan)
    settlement = settled(plan, design, exact(design, [7] * 5, [3] * 5))
    assert settlement.nulls == {"a"}
    count = settlement.plan.columns[1]
    assert (count.low, count.high) == (0, COUNTED.rows)
    allocate_query(settlement.plan, design.reserved)


def test_one_value_still_makes_a_range() -> None:
    for value in (0, 64, -64, 1 << 40):
        plan = query(AUTO, COUNTED)
        design = designed(plan)
        settlement = settled(plan, design, exact(design, [value] * 50_000, [1] * 50_000))
        assert not settlement.nulls
        allocate_query(settlement.plan, design.reserved)
        lo, hi = settlement.plan.columns[1].grid_bounds()
        assert lo == 0 and hi == 1


def test_every_range_of_candidates_can_be_a_plan() -> None:
    for column in (
        AUTO,
        COUNTED,
        QueryColumn("v", "var", grid=0.1),
        QueryColumn("q", "quantiles", at=(0.5,)),
    ):
        plan, edges = query(column), candidates(column)
        design = designed(plan)
        settled_plan = settled(plan, design, exact(design, [edges[0], edges[-1]] * 50_000)).plan
        settled_plan.check()
        low, high = settled_plan.columns[0].low, settled_plan.columns[0].high
        least = 0 if column.kind == "count" else edges[0] * column.grid
        assert (low, high) == pytest.approx((least, edges[-1] * column.grid))


def test_a_refused_plan_has_no_design(refused: Refused) -> None:
    refused(lambda: design_bounds(query(AUTO, epsilon=0.0)))


def test_too_small_an_epsilon_names_no_option_of_tuning(refused: Refused) -> None:
    refused(lambda: design_bounds(query(AUTO, epsilon=1e-5)))


def test_accuracy_is_stated_alike_for_both_laws() -> None:
    """Rank error over the sd of a node; L1 of a unit is its levels, L2 their root."""
    [gaussian] = designed(query(AUTO)).histograms
    [laplace] = designed(query(AUTO, mechanism="geometric")).histograms
    assert laplace.sensitivity == laplace.col2 == pytest.approx(gaussian.sensitivity**2)
    assert laplace.rank_error / (2**0.5 * laplace.sigma) == pytest.approx(
        gaussian.rank_error / (gaussian.sigma**2 + 1 / 12) ** 0.5
    )


def test_every_edge_has_its_cell_and_what_lies_beyond_the_last() -> None:
    [of] = designed(query(AUTO)).histograms
    edges = np.array(of.candidates)
    assert cells_of_values(of, edges).tolist() == list(range(of.cells))
    beyond = np.array([edges[0] - 1, edges[-1] + 1])
    assert cells_of_values(of, beyond).tolist() == [0, of.cells - 1]
    # Between two edges: the one away from 0.
    assert of.candidates[cells_of_values(of, np.array([9]))[0]] == 10
    assert of.candidates[cells_of_values(of, np.array([-9]))[0]] == -10
