"""The hash covers all that is public; a record pays the larger side; charges are never less."""

import math
from fractions import Fraction
from typing import Any

import msgspec
import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.accounting.gaussian import cdp_eps, epsilon_of
from dpstream.accounting.tabulation.levels import PR_LEVELS, US_LEVELS, Level
from dpstream.accounting.tabulation.plan import TablePlan
from tests.accounting.tabulation.examples import COUNTY, NINE, USA, households, persons, planned


def test_the_hash_is_pinned() -> None:
    """It names noise and charges: it may change with VERSION alone."""
    assert planned(persons()).hash == "6b67a0975f7bdc97fa060bcd4487e0e5"
    assert planned(households()).hash == "d08f6a75bdd8be3707c3cbb3dc225316"


CHANGES: list[dict[str, Any]] = [
    {"noise": "rounded"},
    {"definition": "puredp"},
    {"fraction": 0.2},
    {"budgets": {"t1t2": {**dict.fromkeys(US_LEVELS, 0.5), USA: 0.6}}},
    {"budgets": {"t1t2": {**dict.fromkeys(US_LEVELS, 0.5), USA: 0.0}}},
    {"thresholds": {"t1t2": {**dict.fromkeys(US_LEVELS, (50.0, 200.0, 1000.0)), USA: (0, 1, 2)}}},
    {"zero_suppression": 0.5},
    {"allow_negative": False},
    {"max_race_codes": 7},
    {"state_filter": ("01",)},
    {"estimates": "combined"},
]


def test_every_parameter_is_in_the_hash() -> None:
    plans = [planned(persons()), *(planned(persons(**change)) for change in CHANGES)]
    plans.append(msgspec.structs.replace(plans[0], files="other"))
    seven = {**plans[0].stability, COUNTY: NINE._replace(groups=7)}
    plans.append(msgspec.structs.replace(plans[0], stability=seven))
    assert len({plan.hash for plan in plans}) == len(plans)


def test_what_is_not_measured_is_not_in_the_hash() -> None:
    """Order of the filter, and budgets of levels that do not run."""
    plan = planned(persons())
    assert planned(persons(state_filter=("02", "01"))).hash == plan.hash
    more = {"t1t2": {**dict.fromkeys(US_LEVELS, 0.5), Level(1, "PR-STATE"): 3.0}}
    assert planned(persons(budgets=more)).hash == plan.hash


def test_a_record_pays_the_larger_side() -> None:
    budgets = {"t1t2": {**dict.fromkeys(US_LEVELS, 0.1), **dict.fromkeys(PR_LEVELS, 0.3)}}
    thresholds = {"t1t2": dict.fromkeys(US_LEVELS + PR_LEVELS, (50.0, 200.0, 1000.0))}
    plan = planned(persons(budgets=budgets, thresholds=thresholds, run_pr=True))
    assert plan.budget == Fraction("2.4")
    assert sum((s.budget for s in plan.spent(puerto_rico=False)), Fraction()) == Fraction("1.2")
    assert plan.cost().rho == 2.4


def test_charges() -> None:
    rho = planned(persons()).cost()
    assert rho.rho == 6.0 and rho.mu is None and rho.delta == 1e-10
    assert rho.epsilon == pytest.approx(cdp_eps(6.0, 1e-10), rel=1e-9)
    mu = planned(persons(noise="rounded")).cost()
    assert mu.rho is None and mu.mu is not None and mu.mu >= math.sqrt(12)
    assert mu.epsilon == pytest.approx(epsilon_of(math.sqrt(12), 1e-10), rel=1e-9)
    assert mu.epsilon < rho.epsilon - 1
    assert planned(persons(definition="puredp")).cost() == (6.0, 0.0, None, None)
    assert planned(households()).cost().rho == 6.0


def test_budgets_add_up_as_they_were_written() -> None:
    """Thirty tenths are three, though the floats' sum is not."""
    budgets = {"t1t2": dict.fromkeys(US_LEVELS[:10], 0.3)}
    assert sum([0.3] * 10) != 3.0
    assert planned(persons(budgets=budgets)).cost().rho == 3.0


def test_infinite_budgets_promise_nothing() -> None:
    plan = planned(persons(budgets={"t1t2": {USA: math.inf}}))
    assert plan.exact and not planned(persons()).exact
    with pytest.raises(PolicyError, match="infinite"):
        plan.cost()


def test_levels_without_groups_are_not_measured() -> None:
    plan = TablePlan(persons(), {USA: NINE}, "")
    assert [(table.name, level) for table, level, _ in plan.measured()] == [("t1t2", USA)]
    assert plan.budget == Fraction(1, 2)


def test_one_infinite_budget_among_others_promises_nothing_either() -> None:
    budgets = {"t1t2": {**dict.fromkeys(US_LEVELS, 0.5), COUNTY: math.inf}}
    plan = planned(persons(budgets=budgets))
    assert plan.exact
    with pytest.raises(PolicyError, match="infinite"):
        plan.cost()


def test_the_unit_is_what_a_row_is() -> None:
    assert (planned(persons()).unit, planned(households()).unit) == ("person", "household")
