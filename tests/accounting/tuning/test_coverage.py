"""What a budget covers, in figures: against counting by hand, and against a simulation."""

import math

import numpy as np
import pytest

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.tuning.coverage import coverage, coverage_lines, warnings_of
from tests.accounting.plans import Make

SECOND = 1_000_000


def test_a_lifetime_of_many_windows_is_warned_of(make_plan: Make) -> None:
    plan = make_plan(4, windows=284, contributions=10, epsilon=4.0)
    figures = coverage(plan, allocate(plan), 5_000, 20_000, 1_000)
    assert (figures["covers"], figures["windows"], figures["windows_counted"]) == (
        "lifetime",
        284,
        3,
    )
    assert figures["share_cut"] == pytest.approx(1 - 10 / (4 * 284))
    assert figures["keys_first"] > 1 and figures["keys_middle"] == 0.0
    assert figures["epsilon_always"] == pytest.approx(4.0)
    assert warnings_of(figures) and len(coverage_lines(plan, figures)) == 4


@pytest.mark.parametrize(("period", "windows", "covers"), [(4, 1, "window"), (16, 4, "period")])
def test_periods(make_plan: Make, period: int, windows: int, covers: str) -> None:
    plan = make_plan(4, windows=12, contributions=16, epsilon=1.0, period=period * SECOND)
    figures = coverage(plan, allocate(plan), 5_000, 20_000, 1_000)
    assert (figures["covers"], figures["windows"], figures["share_cut"]) == (covers, windows, 0.0)
    assert figures["keys_first"] == figures["keys_middle"]
    assert figures["epsilon_always"] > 1.0  # of a unit in all periods
    assert not [w for w in warnings_of(figures) if "windows" in w]


def test_a_unit_of_all_periods_may_have_a_weak_guarantee(make_plan: Make) -> None:
    plan = make_plan(4, windows=100, contributions=4, epsilon=6.0, period=4 * SECOND)
    figures = coverage(plan, allocate(plan), None, None, 1_000)
    assert figures["epsilon_always"] > 10 and warnings_of(figures)
    assert figures["share_cut"] is None and figures["keys_first"] is None


def test_public_keys_and_one_window(make_plan: Make) -> None:
    plan = make_plan(4, public_keys="list", contributions=2)
    figures = coverage(plan, allocate(plan), 100, 1_000, 10)
    assert figures["units_needed"] is None and figures["windows"] == 1
    assert figures["share_cut"] == pytest.approx(0.8)


@pytest.mark.parametrize("shape", [0.4, 1.5, 8.0])
def test_no_distribution_is_cut_less_than_the_share(make_plan: Make, shape: float) -> None:
    """C is applied to units drawn at random, some of which have far more records than others."""
    draw = np.random.default_rng(3)
    weight = draw.gamma(shape, size=500)
    windows, bound = 6, 5
    of_unit = draw.multinomial(3_000 * windows, weight / weight.sum())
    cut = 1 - np.minimum(of_unit, bound).sum() / of_unit.sum()
    plan = make_plan(4, windows=windows, contributions=bound)
    figures = coverage(plan, allocate(plan), 500, 3_000, 10)
    assert math.isclose(figures["share_cut"], 1 - 5 * 500 / 18_000) and figures["share_cut"] <= cut


def test_a_unit_with_more_records_than_count_counts_in_one_window(make_plan: Make) -> None:
    for period, windows in ((4, 1), (None, 12)):
        of = {} if period is None else {"period": period * SECOND}
        plan = make_plan(4, windows=12, contributions=10, **of)
        figures = coverage(plan, allocate(plan), 5, 2_000, 10)
        assert (figures["windows"], figures["windows_counted"]) == (windows, 1)
