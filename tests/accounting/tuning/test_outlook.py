"""What a plan says first: will anything appear, how exact is it, what would help."""

import json
import math

import pytest

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.fields import Aggregate
from dpstream.accounting.guarantee import describe
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.tuning import outlook as module
from dpstream.accounting.tuning.outlook import outlook
from dpstream.accounting.tuning.reference import expected_keys
from dpstream.accounting.weights import MILD
from tests.accounting.plans import COUNT, MEAN, SUM, Make


@pytest.fixture
def plan(make_plan: Make) -> Plan:
    return make_plan(
        12, aggregates=(COUNT, MEAN, SUM), contributions=10, weights=MILD, strategy="blt"
    )


def test_all_of_it_is_json(plan: Plan) -> None:
    forecast = outlook(plan, allocate(plan), 5_000, 50)
    assert json.loads(json.dumps(forecast)) == forecast
    assert sum(row["starred"] for row in forecast["changes"]) == 1


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


def test_what_helps_most_is_better_in_both(plan: Plan) -> None:
    forecast = outlook(plan, allocate(plan))
    best = forecast["helps_most"]
    assert best in forecast["changes"] and best["helps"] and best["noise"] <= 1.005
    assert all(best["gain"] >= row["gain"] for row in forecast["changes"] if row["helps"])


def test_where_nothing_helps_for_nothing(make_plan: Make) -> None:
    """One trigger, one column: what is left needs a list of keys, or counts other records."""
    plan = make_plan(1, contributions=10, weights=MILD, strategy="blt", windows=2)
    answers = outlook(plan, allocate(plan))
    best = answers["helps_most"]
    assert not best["helps"] and best["gain"] > 1.05
    assert any(
        change["another"] and "another figure: one record" in change["effect"]
        for change in answers["changes"]
    )


def test_figures_in_force_beside_changes_of_the_job(make_plan: Make) -> None:
    """A run goes on with what was committed; what would help is said of the job's file."""
    job, begun = make_plan(12), make_plan(12, refresh_every=3, select_every=3)
    forecast = outlook(begun, allocate(begun), job=job)
    assert forecast["changes"] == outlook(job, allocate(job))["changes"]
    assert forecast["appears"] == outlook(begun, allocate(begun))["appears"]


def test_a_clamp_of_one_value(make_plan: Make) -> None:
    """A mean that can have one value only has no width to compare with."""
    plan = make_plan(4, aggregates=(Aggregate("m", "mean", "v", (5.0, 5.0)),))
    assert outlook(plan, allocate(plan))["exact"][0]["sizes"][0]["relative"] > 0
