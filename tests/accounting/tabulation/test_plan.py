"""The hash covers all that is public; a record pays the larger side; charges are never less."""

import itertools
import math
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.gaussian import cdp_eps, epsilon_of
from dpstream.accounting.tabulation.parameters import PR_LEVELS, US_LEVELS, Level
from dpstream.accounting.tabulation.plan import TablePlan, stability
from tests.accounting.tabulation.examples import COUNTY, NINE, USA, households, persons, planned

NONE = np.zeros((0, 2), np.int64)
#: Codes of the enumerated lists; "z" never belongs to an iteration.
CODES = "abcdefz"


def pairs(*iterations: str) -> Int64:
    """(m, 2) members of iterations, each a text of its codes' letters."""
    rows = [(i, ord(c)) for i, codes in enumerate(iterations) for c in codes]
    return np.array(rows, np.int64).reshape(-1, 2)


def most_groups(alone: Int64, combined: Int64, ethnicity: Int64, k: int) -> int:
    """Groups of the worst record: every choice of race codes in k fields, every ethnicity code.

    A field may be empty behind the first one and may repeat a code, as in a data file.
    """

    def sets(members: Int64) -> list[set[int]]:
        return [set(members[members[:, 0] == i, 1].tolist()) for i in np.unique(members[:, 0])]

    alones, combs, eths = sets(alone), sets(combined), sets(ethnicity)
    worst = 0
    for filled in range(1, k + 1):
        for fields in itertools.product(map(ord, CODES), repeat=filled):
            record = set(fields)
            race = sum(record <= a for a in alones) + sum(bool(record & c) for c in combs)
            for span in map(ord, CODES):
                worst = max(worst, race + sum(span in e for e in eths))
    return worst


def partial_map(rng: np.random.Generator, iterations: int) -> Int64:
    """Each code but the last in one iteration or none, some pairs twice: what validation allows."""
    of = rng.integers(-2, iterations, len(CODES) - 1)
    rows = [(i, ord(c)) for i, c in zip(of.tolist(), CODES, strict=False) if i >= 0]
    return np.array(rows + rows[::2], np.int64).reshape(-1, 2)


def test_nine_as_the_production_files_have_it() -> None:
    codes = "abcdefghijkl"
    sensitivity = stability(pairs(*codes), pairs(*codes), pairs("x", "y"), 8)
    assert sensitivity.groups == 9
    assert (sensitivity.combined, sensitivity.alone, sensitivity.ethnicity) == (8, 2, 1)
    assert "s = 9" in sensitivity.description


@pytest.mark.parametrize("k", [1, 2, 3, 8])
def test_many_iterations_of_shared_codes_give_max_2_k_plus_1(k: int) -> None:
    lists = pairs("ab", "cd", *"efghijk")
    assert stability(lists, lists, pairs("x"), k).groups == max(2, k) + 1


def test_few_iterations_bound_the_record() -> None:
    """Eight race codes cannot reach more groups than there are."""
    sensitivity = stability(pairs("ab", "cd"), pairs("ab", "cd"), pairs("x"), 8)
    assert sensitivity.groups == 3


def test_split_groups_cost_one_more() -> None:
    """One iteration alone over two in combination: a record of both is in three groups."""
    alone, combined = pairs("abc"), pairs("ab", "c")
    sensitivity = stability(alone, combined, NONE, 2)
    assert sensitivity.groups == 3 == most_groups(alone, combined, NONE, 2)
    assert (
        max(2, 2) < sensitivity.groups
    )  # the rule of the production programs, which is too low here


def test_s_is_the_maximum_over_every_record() -> None:
    rng = np.random.default_rng(4)
    seen, split, terms = set[int](), 0, set[bool]()
    for _ in range(400):
        lists = [partial_map(rng, int(rng.integers(0, 6))) for _ in range(3)]
        k = int(rng.choice([1, 2, 3, 4], p=[0.3, 0.4, 0.25, 0.05]))
        sensitivity = stability(lists[0], lists[1], lists[2], k)
        assert sensitivity.groups == max(1, most_groups(lists[0], lists[1], lists[2], k))
        production = max(2, k) + (len(lists[2]) > 0)
        split += sensitivity.groups > production
        terms.add(sensitivity.alone > sensitivity.combined)
        seen.add(sensitivity.groups)
    assert seen >= {1, 2, 3, 4} and split and terms == {True, False}


def test_repeated_pairs_count_once() -> None:
    twice = np.concatenate([pairs("ab"), pairs("ab")])
    assert stability(twice, twice, NONE, 1).groups == 2


def test_a_level_without_a_member_has_s_one() -> None:
    sensitivity = stability(NONE, NONE, NONE, 8)
    assert (sensitivity.groups, sensitivity.combined, sensitivity.alone, sensitivity.ethnicity) == (
        1,
        0,
        0,
        0,
    )


@pytest.mark.parametrize("kind", range(3))
def test_a_code_in_two_iterations_of_a_kind_is_refused(kind: int) -> None:
    """The closed form would be too small there; validation refuses such lists before."""
    lists = [pairs("ab"), pairs("ab"), pairs("ab")]
    lists[kind] = pairs("ab", "bc")
    with pytest.raises(UsageError):
        stability(lists[0], lists[1], lists[2], 2)


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
