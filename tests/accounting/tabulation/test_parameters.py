"""Resolved parameters: which levels run, and budgets as they were written."""

import math
from fractions import Fraction

from dpstream.accounting.tabulation.levels import PR_LEVELS, US_LEVELS, Level
from dpstream.accounting.tabulation.parameters import written
from tests.accounting.tabulation.examples import USA, households, persons


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
