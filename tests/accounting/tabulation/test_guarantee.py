"""Published and corrected figures, and each accounting against an exact one of another kind."""

import math
from fractions import Fraction

import numpy as np
import pytest

from dpstream.accounting.tabulation.describe import least_budget
from dpstream.accounting.tabulation.guarantee import (
    DELTA,
    Spent,
    gaussian_epsilon,
    mu_of_rho,
    renyi_epsilon,
    renyi_integral,
    renyi_sum,
    rounded_up,
    total,
    zcdp_epsilon,
    zcdp_epsilon_analytic,
)
from tests.oracle.published_margins import level_budget, published_epsilon, published_rho

MARGINS = (6, 6, 11, 11, 50, 50, 50)
TENTH = Fraction(1, 10)
PURE = [Spent(9, level_budget(published_epsilon(m), 9, 0.1), TENTH) for m in MARGINS]
ZCDP = [Spent(9, level_budget(published_rho(m), 9, 0.1), TENTH) for m in MARGINS]
TWICE = [each._replace(undivided=False) for each in PURE]


def near(figure: float) -> object:
    return pytest.approx(figure, abs=6e-4)


def test_table_2() -> None:
    assert float(total(PURE)) == near(15.314)
    assert zcdp_epsilon_analytic(total(ZCDP), DELTA) == near(12.791)
    assert zcdp_epsilon(total(ZCDP), DELTA) == near(12.163)
    assert renyi_epsilon(PURE, DELTA, integral=True) == near(13.574)
    assert renyi_epsilon(PURE, DELTA) == near(14.194)


def test_gaussian_dp_at_the_published_rho() -> None:
    assert mu_of_rho(total(ZCDP)) == pytest.approx(1.6775, abs=5e-5)
    assert gaussian_epsilon(total(ZCDP), DELTA) == near(11.666)


def test_gaussian_dp_at_the_least_rho() -> None:
    least = [level_budget(least_budget("rounded gauss", m), 9, 0.1) for m in MARGINS]
    assert gaussian_epsilon(sum(least, Fraction()), DELTA) == near(10.770)
    discrete = [level_budget(least_budget("discrete gauss", m), 9, 0.1) for m in MARGINS]
    assert zcdp_epsilon(sum(discrete, Fraction()), DELTA) == near(11.193)


@pytest.mark.parametrize(
    ("rho", "gaussian", "zcdp"), [("4.944", 24.402, 25.363), ("2.643", 16.790, 17.481)]
)
def test_production_rho(rho: str, gaussian: float, zcdp: float) -> None:
    assert gaussian_epsilon(Fraction(rho), DELTA) == near(gaussian)
    assert zcdp_epsilon(Fraction(rho), DELTA) == near(zcdp)


def geometric(epsilon: float, far: int) -> np.ndarray:
    """Chances of -far .. far."""
    values = np.arange(-far, far + 1)
    return np.asarray(np.tanh(epsilon / 2) * np.exp(-np.abs(values) * epsilon))


@pytest.mark.parametrize("epsilon", [0.05, 0.26, 1.0, 3.0])
def test_the_sum_is_the_divergence_and_the_integral_is_below_it(epsilon: float) -> None:
    mass = geometric(epsilon, math.ceil(60 / epsilon))
    orders = np.array([1.01, 1.5, 2.0, 4.0])
    p, q = mass[1:], mass[:-1]
    exact = [float(np.log(np.sum(p**a * q ** (1 - a))) / (a - 1)) for a in orders]
    assert renyi_sum(orders, epsilon) == pytest.approx(exact, rel=1e-6, abs=1e-9)
    assert (renyi_integral(orders, epsilon) < np.array(exact)).all()


def test_large_budgets_do_not_overflow() -> None:
    large = [Spent(1, Fraction(3000), TENTH)]
    assert renyi_epsilon(large, DELTA) == pytest.approx(3000)


def test_only_kinds_of_groups_that_exist_count() -> None:
    assert renyi_epsilon(TWICE, DELTA) < renyi_epsilon(PURE, DELTA)
    assert Spent(3, Fraction(3), Fraction(0), False).releases == [(Fraction(1),)]


def test_nothing_spent() -> None:
    assert renyi_epsilon([], DELTA) == 0.0
    assert gaussian_epsilon(Fraction(), DELTA) == 0.0


def test_sums_are_rounded_up_and_decimals_stay() -> None:
    assert rounded_up(Fraction("4.944")) == 4.944
    assert Fraction(repr(rounded_up(Fraction(1, 3)))) >= Fraction(1, 3)
    for n in range(1, 50):
        rho = Fraction(n, 7)
        assert 2 * rho <= Fraction(mu_of_rho(rho)) ** 2 <= 2 * rho * (1 + Fraction(1, 2**48))
