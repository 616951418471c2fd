"""Published budgets of published margins, and the least budgets that keep them."""

import math
from fractions import Fraction

import pytest

from dpstream.accounting.tabulation.describe import least_budget, same_margins
from dpstream.accounting.tabulation.guarantee import DELTA, Spent, renyi_epsilon, total
from dpstream.accounting.tabulation.margins import margin, tail
from dpstream.accounting.tabulation.parameters import Draws, LawName, Noise
from tests.oracle.published_margins import level_budget, published_epsilon, published_rho

#: Margin, then epsilon of step 2 and of the level, then rho of both, as printed.
TABLE_4 = [
    (6, 3.84, 4.27, 0.481, 0.534),
    (11, 2.24, 2.49, 0.143, 0.159),
    (50, 0.531, 0.59, 0.007, 0.008),
]
#: How many of the seven levels have each margin.
TIMES = {6: 2, 11: 2, 50: 3}
LAWS: list[LawName] = ["discrete gauss", "rounded gauss", "discrete laplace"]


def noise_of(law: LawName, budget: float) -> Noise:
    return Noise(law, 1 / budget if law == "discrete laplace" else math.sqrt(1 / (2 * budget)))


@pytest.mark.parametrize(("target", "step", "level", "rho_step", "rho_level"), TABLE_4)
def test_table_4(target: int, step: float, level: float, rho_step: float, rho_level: float) -> None:
    epsilon = float(level_budget(published_epsilon(target), 9, 0.1))
    rho = float(level_budget(published_rho(target), 9, 0.1))
    assert epsilon == pytest.approx(level, abs=0.01) and 0.9 * epsilon == pytest.approx(
        step, abs=0.02
    )
    assert rho == pytest.approx(rho_level, abs=0.0007) and 0.9 * rho == pytest.approx(
        rho_step, abs=0.0011
    )


def test_exact_figures_of_table_4() -> None:
    epsilons = [float(level_budget(published_epsilon(m), 9, 0.1)) for m in TIMES]
    rhos = [float(level_budget(published_rho(m), 9, 0.1)) for m in TIMES]
    assert epsilons == pytest.approx([4.2796, 2.4964, 0.5874], abs=5e-5)
    assert rhos == pytest.approx([0.5333, 0.1587, 0.00768], abs=5e-5)


def test_the_published_inversion_misses_its_margins_by_one() -> None:
    missed = [margin(noise_of("discrete laplace", published_epsilon(m))) for m in TIMES]
    assert missed == [7, 12, 51]
    margins = [margin(noise_of("discrete gauss", published_rho(m))) for m in TIMES]
    assert margins == [6, 11, 50]


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("target", TIMES)
def test_least_budgets_keep_the_margin_and_no_less_does(law: LawName, target: int) -> None:
    least = least_budget(law, target)
    assert tail(noise_of(law, least), target) == pytest.approx(0.05, abs=1e-9)
    assert margin(noise_of(law, least * 1.0001)) == target
    assert margin(noise_of(law, least * 0.9999)) == target + 1


def spent(law: LawName) -> list[Spent]:
    return [
        Spent(9, level_budget(least_budget(law, m), 9, 0.1), Fraction(1, 10))
        for m, times in TIMES.items()
        for _ in range(times)
    ]


def test_least_totals() -> None:
    rounded = [float(each.budget) for each in spent("rounded gauss")]
    assert rounded[0] == pytest.approx(0.4546, abs=5e-5)
    assert rounded[2] == pytest.approx(0.1452, abs=5e-5)
    assert rounded[4] == pytest.approx(0.00753, abs=5e-6)
    assert float(total(spent("rounded gauss"))) == pytest.approx(1.2223, abs=5e-5)
    assert float(total(spent("discrete gauss"))) == pytest.approx(1.2147, abs=1e-4)


def test_corrected_geometric_totals() -> None:
    pure = spent("discrete laplace")
    assert [least_budget("discrete laplace", m) for m in TIMES] == pytest.approx(
        [0.45690, 0.25977, 0.05931], abs=5e-6
    )
    assert float(total(pure)) == pytest.approx(16.113, abs=5e-4)
    assert renyi_epsilon(pure, DELTA) == pytest.approx(15.020, abs=5e-4)


@pytest.mark.parametrize("law", LAWS)
def test_the_same_margins_for_less(law: LawName) -> None:
    """Of both kinds of counts; a hundredth less would lose one of them."""
    gamma = Fraction(1, 10)
    for budget in (Fraction("0.02"), Fraction("0.159"), Fraction("2.134")):

        def drawn(spent: Fraction) -> Draws:
            parts = (spent / 9, gamma * spent / 9, (1 - gamma) * spent / 9)
            return Draws(*(noise_of(law, float(part)) for part in parts))

        def margins(spent: Fraction) -> tuple[int, int]:
            level_draws = drawn(spent)
            assert level_draws.total and level_draws.detail
            return margin(level_draws.total), margin(level_draws.detail)

        least = same_margins(drawn(budget), budget, 9, gamma)
        assert least <= budget and margins(least) <= margins(budget)
        less = margins(least * Fraction(99, 100))
        assert any(a > b for a, b in zip(less, margins(budget), strict=True))
