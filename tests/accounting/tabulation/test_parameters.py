"""Resolved parameters: which levels run, and budgets as they were written; and their noise.

The float that noise is drawn with costs no more than the budget, and hardly less.
"""

import itertools
import math
from fractions import Fraction
from typing import Any

import pytest

from dpstream.accounting.errors import UsageError
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
    written,
)
from tests.accounting.tabulation.examples import COUNTY, USA, households, persons


def test_levels_in_public_order() -> None:
    assert [level.name for level in US_LEVELS] == [
        f"level_{n}_{region}"
        for region in ("usa", "state", "county", "tract", "place", "aiannh")
        for n in (1, 2)
    ]
    assert [level.label for level in PR_LEVELS] == [
        f"({region}, {n})"
        for region in ("PR-STATE", "PR-COUNTY", "PR-TRACT", "PR-PLACE")
        for n in (1, 2)
    ]
    assert Level(2, "PR-STATE").name == "level_2_pr_state"


def test_nation_and_states_are_detailed() -> None:
    detailed = {level.region_type for level in US_LEVELS + PR_LEVELS if level.detailed}
    assert detailed == {"USA", "STATE", "PR-STATE"}


def test_a_level_is_of_puerto_rico_or_not() -> None:
    assert all(level.puerto_rico for level in PR_LEVELS)
    assert not any(level.puerto_rico for level in US_LEVELS)


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


def test_levels_that_run() -> None:
    assert persons().levels == US_LEVELS
    assert persons(run_pr=True).levels == US_LEVELS + PR_LEVELS
    assert persons(run_us=False, run_pr=True).levels == PR_LEVELS


def test_budgets_are_exact_decimals() -> None:
    parameters = persons(budgets={"t1t2": {USA: 0.1}})
    assert parameters.budget("t1t2", USA) == Fraction(1, 10) != Fraction(0.1)
    assert parameters.budget("t1t2", Level(2, "TRACT")) == 0
    assert parameters.gamma == Fraction(1, 10)
    assert households().gamma == 0
    assert written(math.inf) == math.inf


def test_tables_of_a_program() -> None:
    assert [table.name for table in persons().tables] == ["t1t2"]
    assert [table.name for table in households().tables] == ["t3", "t4"]


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


def test_a_small_scale_is_raised_and_a_large_one_refused() -> None:
    assert scale_of("discrete gauss", Fraction(10**6)) == 2.0**-3
    assert scale_of("rounded gauss", Fraction(10**6)) == 2.0**-3
    assert scale_of("discrete laplace", Fraction(10**6)) == 2.0**-6
    for law in ("discrete gauss", "rounded gauss", "discrete laplace"):
        with pytest.raises(UsageError, match="scale above"):
            scale_of(law, Fraction(1, 10**11))  # type: ignore[arg-type]


@pytest.mark.parametrize("law", ["discrete gauss", "rounded gauss", "discrete laplace"])
def test_a_budget_whose_scale_has_no_float_is_refused_like_any_that_is_too_small(law: Any) -> None:
    with pytest.raises(UsageError, match=r"\(USA, 1\).*scale above"):
        scale_of(law, Fraction("1e-320") / 9, "(USA, 1)")


@pytest.mark.parametrize("law", ["discrete gauss", "rounded gauss", "discrete laplace"])
def test_the_largest_scale_is_given_and_none_is_cut_down_to_it(law: Any) -> None:
    """A scale beyond the range that became its end would cost more than the budget."""
    laplace = law == "discrete laplace"
    most = Fraction(MAX_TABLE_SCALE if laplace else MAX_SIGMA)
    budget = 1 / most if laplace else 1 / (2 * most**2)
    assert scale_of(law, budget) == most
    for less in (Fraction(1, 10**9), Fraction(1, 10), Fraction(1, 2)):
        with pytest.raises(UsageError, match="scale above"):
            scale_of(law, budget * (1 - less))


def test_a_level_that_does_not_run_is_off_whatever_its_budget() -> None:
    off = Level(1, "PR-STATE")
    parameters = persons(budgets={"t1t2": {USA: 0.5, off: 0.5}})
    assert parameters.budget("t1t2", off) and draws(parameters, PERSONS, off, 9) is None
