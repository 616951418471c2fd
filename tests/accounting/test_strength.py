"""What is warned of and what is refused: at the borders, in figures that are never too small."""

import math
import re

import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.accounting.strength import (
    MOST_DELTA,
    check_delta,
    weaknesses,
    weaknesses_of_budget,
    weaknesses_of_mu,
    weaknesses_of_rho,
)


def factor(text: str) -> float:
    """The factor of the odds that a warning names."""
    [number] = re.findall(r"by a factor of up to ([0-9,.e]+)", text)
    return float(number.replace(",", ""))


def test_borders() -> None:
    assert weaknesses(10.0, 1e-4) == []
    assert len(weaknesses(10.000001, 0.0)) == 1
    assert len(weaknesses(1.0, 1.0001e-4)) == 1
    assert len(weaknesses(11.0, 0.5)) == 2


@pytest.mark.parametrize("epsilon", [10.1, 12.0, 24.402, 50.0, 690.0])
def test_the_factor_is_e_to_the_epsilon_rounded_up(epsilon: float) -> None:
    [warning] = weaknesses(epsilon, 0.0)
    assert 1 <= factor(warning) / math.exp(epsilon) < 1.01


def test_what_is_beyond_floats_is_warned_of() -> None:
    [warning] = weaknesses(1000.0, 0.0)
    assert "1e435;" in warning  # e^1000 is 1.97e434
    [warning] = weaknesses(math.inf, 0.0)
    assert "infinity" in warning
    assert weaknesses_of_rho(math.inf)


@pytest.mark.parametrize(
    ("delta", "units"), [(0.01, "one unit in 100;"), (0.03, "one unit in 33;"),
                         (1.1e-4, "one unit in 9,090;"), (0.9, "every second unit or more;")],
)  # fmt: skip
def test_a_delta_in_units(delta: float, units: str) -> None:
    [warning] = weaknesses(1.0, delta)
    assert units in warning


def test_other_terms() -> None:
    assert weaknesses_of_mu(1.0) == weaknesses_of_rho(0.5) == []
    [of_mu] = weaknesses_of_mu(2.0)
    [of_rho] = weaknesses_of_rho(2.0)
    assert "mu 2," in of_mu and "rho 2," in of_rho
    # rho is mu^2 / 2: its epsilon follows from less, so that it is larger.
    assert factor(weaknesses_of_mu(2.0)[0]) <= factor(of_rho)
    assert weaknesses_of_budget("epsilon", 12.0) == weaknesses(12.0, 0.0)
    assert weaknesses_of_budget("rho", 2.0) == weaknesses_of_rho(2.0)


def test_a_large_delta_is_refused_unless_it_is_wanted() -> None:
    check_delta(MOST_DELTA, False)
    check_delta(0.5, True)
    with pytest.raises(PolicyError) as error:
        check_delta(0.0100001, False, "budget.delta", "mechanism.allow_large_delta = true")
    assert error.value.field == "budget.delta"
    assert "mechanism.allow_large_delta = true" in error.value.fix
