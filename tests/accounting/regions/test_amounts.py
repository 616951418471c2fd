"""Amounts: charges up, initial budgets down, by exact decimals."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from dpstream.accounting.errors import UsageError
from dpstream.accounting.regions.amounts import (
    MOST,
    charge_of,
    check_amount,
    exact,
    initial_of,
    initials_of,
)


def test_a_number_is_the_decimal_that_it_is_written_as() -> None:
    assert exact(0.1, "x") == exact("0.1", "x") == exact(Decimal("0.1"), "x") == Fraction(1, 10)
    assert charge_of(0.1) == charge_of("0.1") == initial_of(0.1) == 100_000
    assert charge_of(1) == charge_of(Fraction(1)) == charge_of(np.float64(1)) == 1_000_000


def test_a_float_on_a_grid_of_a_power_of_two_is_itself() -> None:
    step = 2.0**-24
    assert exact(step, "x", step) == Fraction(1, 1 << 24) != exact(step, "x")
    assert exact(5 * step, "x", step) == Fraction(5, 1 << 24) != exact(5 * step, "x")
    assert exact(-0.4, "x", 0.5) == Fraction(-2, 5) and exact("0.1", "x", step) == Fraction(1, 10)
    # Whole numbers of other steps are decimals, wherever their floats fall.
    assert exact(0.2, "x", 0.1) / exact(0.1, "x", 0.1) == 2
    for wrong in (math.nan, math.inf):
        with pytest.raises(UsageError):
            exact(wrong, "x", step)


def test_charges_go_up_and_initial_budgets_down() -> None:
    assert charge_of("0.0000001") == 1 and initial_of("0.0000009") == 0
    assert charge_of("1.0000001") == 1_000_001 and initial_of("1.9999999") == 1_999_999


@pytest.mark.parametrize(
    "wrong", [0, -1, 0.0, "-0.1", 1e9, math.inf, math.nan, "nan", "much", True]
)
def test_charges_that_are_none(wrong: float) -> None:
    with pytest.raises(UsageError):
        charge_of(wrong)


@pytest.mark.parametrize("wrong", [-1, "-0.0000001", 1001, math.nan, math.inf])
def test_initial_budgets_that_are_none(wrong: float) -> None:
    with pytest.raises(UsageError):
        initial_of(wrong)


@pytest.mark.parametrize("wrong", [0, -1, MOST + 1, 1 << 80, 0.5, True, "1"])
def test_amounts_that_are_none(wrong: int) -> None:
    with pytest.raises(UsageError):
        check_amount(wrong)
    check_amount(MOST)


def decimals(rng: np.random.Generator) -> list[float]:
    """Budgets with up to 15 digits, many of them at or beside a millionth."""
    micro = rng.integers(0, 1_000_000_000, 3_000)
    near = [float(Decimal(int(m)).scaleb(-6) + Decimal(int(d)).scaleb(-9))
            for m, d in zip(micro, rng.integers(-2, 3, len(micro)), strict=True)]  # fmt: skip
    return [abs(value) for value in near] + rng.uniform(0, 1000, 1_000).tolist()


def test_records_budgets_are_those_of_their_decimals() -> None:
    values = decimals(np.random.default_rng(1))
    initials, given = initials_of(np.array(values))
    assert given.all()
    # Not `==` of lists: where it fails on purpose, pytest would work out their differences.
    np.testing.assert_array_equal(initials, [initial_of(value) for value in values])


def test_rounding_to_the_nearest_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math, "floor", math.ceil)
    with pytest.raises(AssertionError):
        test_charges_go_up_and_initial_budgets_down()
    with pytest.raises(AssertionError):
        test_records_budgets_are_those_of_their_decimals()


def test_a_record_without_a_budget_has_none() -> None:
    initials, given = initials_of(np.array([np.nan, -1.0, -np.inf, 0.0, np.inf, 5_000.0]))
    assert initials.tolist() == [0, 0, 0, 0, MOST, MOST]
    assert given.tolist() == [False, False, False, True, True, True]
