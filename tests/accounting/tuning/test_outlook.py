"""What a plan says first: will anything appear, how exact is it, what would help."""

import json
import math
import re
import tomllib

import numpy as np
import pytest

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.fields import Aggregate
from dpstream.accounting.guarantee import describe
from dpstream.accounting.plan.plan import Plan, with_privacy
from dpstream.accounting.tuning import outlook as module
from dpstream.accounting.tuning.outlook import coverage, outlook, warnings_of
from dpstream.accounting.tuning.reference import expected_keys
from dpstream.accounting.tuning.starred import starred
from dpstream.accounting.weights import MILD
from dpstream.pipelines.render.job_plan import coverage_lines
from tests.accounting.plans import COUNT, MEAN, SUM, Make


@pytest.fixture
def plan(make_plan: Make) -> Plan:
    return make_plan(
        12, aggregates=(COUNT, MEAN, SUM), contributions=10, weights=MILD, strategy="blt"
    )


def test_all_of_it_is_json(plan: Plan) -> None:
    forecast = outlook(plan, allocate(plan), 5_000, 50)
    assert json.loads(json.dumps(forecast)) == forecast


def test_what_appears(plan: Plan) -> None:
    budget = allocate(plan)
    appearance, chosen = (
        outlook(plan, budget, 5_000, 50)["appears"],
        describe(plan, budget)["selection"],
    )
    last = chosen["units_for_half_chance_last"]
    assert appearance["units_for_half_chance_first"] == chosen["units_for_half_chance_first"]
    assert appearance["units_for_half_chance_last"] == last
    assert (
        last < appearance["units_if_last_records"] == math.ceil(last / chosen["last_pair_counts"])
    )
    assert appearance["share_of_units"] == last / 5_000
    assert appearance["expected_keys"] == expected_keys(plan, budget, 5_000, 50)
    nobody_says = outlook(plan, budget)["appears"]
    assert nobody_says["expected_keys"] is None is nobody_says["keys"]
    assert outlook(plan, budget, 5_000)["appears"]["keys"] == module.KEYS


def test_how_exact(plan: Plan) -> None:
    """Absolute in the column's units; relative to the count, the width or the bound."""
    budget = allocate(plan)
    columns = {c["name"]: c["sd_final"] for c in describe(plan, budget)["columns"]}
    count, mean, total = outlook(plan, budget)["exact"]
    for size, of in zip((100, 1_000), count["sizes"], strict=True):
        assert of == {"records": size, "sd": columns["n"], "relative": columns["n"] / size}
    for size, of in zip((100, 1_000), mean["sizes"], strict=True):
        assert of["sd"] == columns["level"] / size and of["relative"] == of["sd"] / 11
    for size, of in zip((100, 1_000), total["sizes"], strict=True):
        assert of["sd"] == columns["total"] and of["relative"] == of["sd"] / (7 * size)
    assert (count["of"], mean["of"], total["of"]) == (
        "", "of the bounds' width", "of records at the bound",
    )  # fmt: skip


def test_shares_beyond_one_are_explained(make_plan: Make, plan: Plan) -> None:
    shares = outlook(plan, allocate(plan))["shares"]
    assert shares["sum"] > 1.5 and "no unit" in shares["why"]
    assert shares["sum"] == sum(shares["of"].values())
    plain = make_plan(12, per_key_bound=1)
    assert outlook(plain, allocate(plain))["shares"]["why"] == ""


def test_what_helps_most_is_the_best_way_to_noise_the_job(plan: Plan, make_plan: Make) -> None:
    helping = outlook(plan, allocate(plan))["helps_most"]
    best = starred(plan)
    assert (helping["keys"], helping["noise"]) == (best.keys, best.noise)
    toml = tomllib.loads("\n".join(re.split(r", (?=mechanism)", helping["text"])))
    assert {f"mechanism.{name}": value for name, value in toml["mechanism"].items()} == (
        helping["settings"]
    )
    itself = with_privacy(plan, **best.settings)
    assert outlook(itself, allocate(itself))["helps_most"] is None
    # A run goes on with what was committed; what would help is said of the job's file.
    begun = make_plan(12, refresh_every=3, select_every=3)
    forecast = outlook(begun, allocate(begun), job=plan)
    assert forecast["helps_most"] == helping
    assert forecast["appears"] == outlook(begun, allocate(begun))["appears"]


def test_a_clamp_of_one_value(make_plan: Make) -> None:
    """A mean that can have one value only has no width to compare with."""
    plan = make_plan(4, aggregates=(Aggregate("m", "mean", "v", (5.0, 5.0)),))
    assert outlook(plan, allocate(plan))["exact"][0]["sizes"][0]["relative"] > 0


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
