"""The hash covers all that is public; a record pays the larger side; charges are never less.

Resolved parameters: which levels run, and budgets as they were written; and their noise.

The float that noise is drawn with costs no more than the budget, and hardly less.
"""

import itertools
import math
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest

from dpstream.accounting.arrays import Int64
from dpstream.accounting.composition import Cost
from dpstream.accounting.gaussian import cdp_eps, epsilon_of
from dpstream.accounting.limits import MAX_SIGMA
from dpstream.accounting.mechanisms.laws import MAX_TABLE_SCALE
from dpstream.accounting.tabulation.parameters import (
    AGE_BINS,
    PERSONS,
    PR_LEVELS,
    T3,
    T4,
    US_LEVELS,
    Level,
    Noise,
    Table,
    draws,
    scale_of,
)
from dpstream.accounting.tabulation.plan import TablePlan, stability
from tests.accounting.tabulation.examples import COUNTY, NINE, USA, households, persons, planned
from tests.golden.refusals import Refused

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
def test_a_code_in_two_iterations_of_a_kind_is_refused(kind: int, refused: Refused) -> None:
    """The closed form would be too small there; validation refuses such lists before."""
    lists = [pairs("ab"), pairs("ab"), pairs("ab")]
    lists[kind] = pairs("ab", "bc")
    refused(lambda: stability(lists[0], lists[1], lists[2], 2))


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
    assert planned(persons(definition="puredp")).cost() == Cost(6.0, 0.0)
    assert planned(households()).cost().rho == 6.0


def test_budgets_add_up_as_they_were_written() -> None:
    """Thirty tenths are three, though the floats' sum is not."""
    budgets = {"t1t2": dict.fromkeys(US_LEVELS[:10], 0.3)}
    assert sum([0.3] * 10) != 3.0
    assert planned(persons(budgets=budgets)).cost().rho == 3.0


def test_infinite_budgets_promise_nothing(refused: Refused) -> None:
    plan = planned(persons(budgets={"t1t2": {USA: math.inf}}))
    assert plan.exact and not planned(persons()).exact
    refused(plan.cost)


def test_levels_without_groups_are_not_measured() -> None:
    plan = TablePlan(persons(), {USA: NINE}, "")
    assert [(table.name, level) for table, level, _ in plan.measured()] == [("t1t2", USA)]
    assert plan.budget == Fraction(1, 2)


def test_one_infinite_budget_among_others_promises_nothing_either(refused: Refused) -> None:
    budgets = {"t1t2": {**dict.fromkeys(US_LEVELS, 0.5), COUNTY: math.inf}}
    plan = planned(persons(budgets=budgets))
    assert plan.exact
    refused(plan.cost)


SIZES = {"t1t2": [1, 8, 18, 46], "t3": [1, 2, 4, 5], "t4": [1, 3]}


@pytest.mark.parametrize("table", [PERSONS, T3, T4], ids=lambda t: t.name)
def test_details_are_partitions_that_become_finer(table: Table) -> None:
    assert [detail.size for detail in table.details] == SIZES[table.name]
    for detail in table.details:
        assert len(detail.cells) == table.leaves
        assert set(detail.cells) == set(range(detail.size))
    for coarse, fine in itertools.pairwise(table.details):
        assert len(set(zip(coarse.cells, fine.cells, strict=True))) == fine.size


def leaf(sex: int, age: int) -> int:
    return (sex - 1) * 23 + sum(edge <= age for edge in AGE_BINS[23])


def test_persons_by_age_one_by_one() -> None:
    """Each age, through its leaf, meets the bin that the edges of the detail give it."""
    for detail, bins in ((1, 4), (2, 9), (3, 23)):
        for sex, age in itertools.product((1, 2), range(116)):
            expected = (sex - 1) * bins + sum(edge <= age for edge in AGE_BINS[bins])
            assert PERSONS.details[detail].cells[leaf(sex, age)] == expected


def test_coarse_bins_are_unions_of_fine_ones() -> None:
    assert set(AGE_BINS[4]) | set(AGE_BINS[9]) <= set(AGE_BINS[23])
    assert all(len(edges) + 1 == bins for bins, edges in AGE_BINS.items())


def test_published_household_cells() -> None:
    """Data cells 0 to 8 of t3: which detail measures what, and what is a sum of what."""
    assert [sorted(dict(T3.published(d))) for d in range(4)] == [
        [0],
        [0, 1, 6],
        [0, 1, 2, 3, 6, 7, 8],
        [0, 1, 2, 3, 4, 5, 6, 7, 8],
    ]
    measured = [{number for number, cells in T3.published(d) if len(cells) == 1} for d in range(4)]
    assert measured == [{0}, {1, 6}, {2, 3, 7, 8}, {2, 4, 5, 7, 8}]
    assert dict(T3.published(3))[6] == (3, 4) and dict(T3.published(2))[0] == (0, 1, 2, 3)
    assert [sorted(dict(T4.published(d))) for d in range(2)] == [[0], [0, 1, 2, 3]]
    assert PERSONS.published(3) == ()


def test_budgets_are_exact_decimals() -> None:
    parameters = persons(budgets={"t1t2": {USA: 0.1}})
    assert parameters.budget("t1t2", USA) == Fraction(1, 10) != Fraction(0.1)
    assert parameters.budget("t1t2", Level(2, "TRACT")) == 0
    assert parameters.gamma == Fraction(1, 10)
    assert households().gamma == 0


def cost(noise: Noise) -> Fraction:
    """rho or epsilon of one release, of the float taken exactly."""
    scale = Fraction(noise.scale)
    return 1 / scale if noise.law == "discrete laplace" else 1 / (2 * scale**2)


@pytest.mark.parametrize("law", ["zcdp census", "zcdp rounded", "puredp census"])
def test_a_level_costs_no_more_than_its_budget(law: str) -> None:
    definition, noise = law.split()
    for n in range(1, 200):
        budget = n / 97
        parameters = persons(
            definition=definition, noise=noise, budgets={"t1t2": dict.fromkeys(US_LEVELS, budget)}
        )
        drawn = draws(parameters, PERSONS, USA, 9)
        assert drawn is not None and drawn.total and drawn.first and drawn.detail
        written = Fraction(repr(budget))
        for spent in (9 * cost(drawn.total), 9 * (cost(drawn.first) + cost(drawn.detail))):
            assert written * (1 - Fraction(1, 2**48)) < spent <= written


def test_a_float_one_step_smaller_costs_more() -> None:
    """Rounding to the nearest would be too weak about every other time."""
    import math

    weaker = 0
    for n in range(1, 200):
        budget = Fraction(n, 97)
        nearest = math.sqrt(float(1 / (2 * budget)))
        weaker += cost(Noise("discrete gauss", nearest)) > budget
        assert cost(Noise("discrete gauss", scale_of("discrete gauss", budget))) <= budget
    assert weaker > 20


def test_shares_of_the_two_steps() -> None:
    drawn = draws(persons(), PERSONS, COUNTY, 9)
    assert drawn is not None and drawn.total is None and drawn.first and drawn.detail
    assert drawn.detail.scale == pytest.approx((9 / (2 * 0.45)) ** 0.5, rel=1e-15)
    assert drawn.first.scale == pytest.approx((9 / (2 * 0.05)) ** 0.5, rel=1e-15)
    level_draws = draws(persons(), PERSONS, USA, 9)
    assert level_draws is not None and level_draws.total == Noise("discrete gauss", 3.0)


def test_households_have_one_step() -> None:
    drawn = draws(households(definition="puredp"), T3, COUNTY, 9)
    assert drawn is not None and drawn.total is None and drawn.first is None
    assert drawn.detail == Noise("discrete laplace", 36.0)


def test_levels_that_are_off() -> None:
    assert draws(persons(budgets={"t1t2": {USA: 0.0}}), PERSONS, USA, 9) is None
    assert draws(persons(), PERSONS, Level(1, "PR-STATE"), 9) is None


def test_an_infinite_budget_has_no_noise() -> None:
    drawn = draws(persons(budgets={"t1t2": {USA: float("inf")}}), PERSONS, USA, 9)
    assert drawn is not None and drawn.detail == Noise("discrete gauss", 0.0)


def test_a_small_scale_is_raised_and_a_large_one_refused(refused: Refused) -> None:
    assert scale_of("discrete gauss", Fraction(10**6)) == 2.0**-3
    assert scale_of("rounded gauss", Fraction(10**6)) == 2.0**-3
    assert scale_of("discrete laplace", Fraction(10**6)) == 2.0**-6
    for law in ("discrete gauss", "rounded gauss", "discrete laplace"):
        refused(scale_of, law, Fraction(1, 10**11))


@pytest.mark.parametrize("law", ["discrete gauss", "rounded gauss", "discrete laplace"])
def test_a_budget_whose_scale_has_no_float_is_refused_like_any_that_is_too_small(
    law: Any, refused: Refused
) -> None:
    refused(lambda: scale_of(law, Fraction("1e-320") / 9, "(USA, 1)"))


@pytest.mark.parametrize("law", ["discrete gauss", "rounded gauss", "discrete laplace"])
def test_the_largest_scale_is_given_and_none_is_cut_down_to_it(law: Any, refused: Refused) -> None:
    """A scale beyond the range that became its end would cost more than the budget."""
    laplace = law == "discrete laplace"
    most = Fraction(MAX_TABLE_SCALE if laplace else MAX_SIGMA)
    budget = 1 / most if laplace else 1 / (2 * most**2)
    assert scale_of(law, budget) == most
    for less in (Fraction(1, 10**9), Fraction(1, 10), Fraction(1, 2)):
        refused(scale_of, law, budget * (1 - less))


def test_a_level_that_does_not_run_is_off_whatever_its_budget() -> None:
    off = Level(1, "PR-STATE")
    parameters = persons(budgets={"t1t2": {USA: 0.5, off: 0.5}})
    assert parameters.budget("t1t2", off) and draws(parameters, PERSONS, off, 9) is None
