"""Resolved parameters: which levels run, and budgets as they were written."""

import itertools
import math
from fractions import Fraction

import pytest

from dpstream.accounting.tabulation.parameters import (
    AGE_BINS,
    PERSONS,
    PR_LEVELS,
    T3,
    T4,
    US_LEVELS,
    Level,
    Table,
    written,
)
from tests.accounting.tabulation.examples import USA, households, persons


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
