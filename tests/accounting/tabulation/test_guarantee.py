"""Published and corrected figures, and each accounting against an exact one of another kind."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy import optimize, stats

from dpstream.accounting.gaussian import epsilon_of
from dpstream.accounting.tabulation.describe import least_budget
from dpstream.accounting.tabulation.guarantee import (
    DELTA,
    Spent,
    gaussian_epsilon,
    gaussian_losses,
    geometric_losses,
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


ONCE = [each._replace(gamma=Fraction()) for each in PURE]


def exact_epsilon(parts: list[tuple[float, int]], delta: float) -> float:
    """Of some geometric releases, from every combination of their two-valued losses."""
    losses, chances = np.zeros(1), np.ones(1)
    for epsilon, times in parts:
        plus = np.arange(times + 1)
        chance = stats.binom.pmf(plus, times, 1 / (1 + math.exp(-epsilon)))
        losses = (losses[:, None] + epsilon * (2 * plus - times)).ravel()
        chances = (chances[:, None] * chance).ravel()

    def excess(at: float) -> float:
        over = losses > at
        return float((chances[over] * -np.expm1(at - losses[over])).sum()) - delta

    return float(optimize.brentq(excess, 0, losses.max(), xtol=1e-12))


def test_losses_themselves() -> None:
    """All groups measured once: every combination is enumerated; the grid is above, and near."""
    exact = exact_epsilon([(float(PURE[i].budget) / 9, n) for i, n in ((0, 18), (2, 18), (4, 27))],
                          DELTA)  # fmt: skip
    loss = geometric_losses(ONCE, DELTA)
    assert exact <= loss <= exact + 2e-4
    assert loss == pytest.approx(14.0455, abs=5e-4)
    assert geometric_losses(PURE, DELTA) == loss  # the worse kind of group


def test_losses_of_two_steps() -> None:
    loss = geometric_losses(TWICE, DELTA)
    assert loss == pytest.approx(12.7415, abs=1e-3)
    parts = [part for each, n in zip(PURE[::2], (2, 2, 3), strict=False) for part in
             ((float(each.budget) / 90, 9 * n), (float(each.budget) / 10, 9 * n))]  # fmt: skip
    composed = None
    for epsilon, times in parts:
        one = pld.from_discrete_laplace_mechanism(
            epsilon, 1, value_discretization_interval=1e-4
        ).self_compose(times)
        composed = one if composed is None else composed.compose(one)
    assert composed is not None
    assert loss - 1e-3 < composed.get_epsilon_for_delta(DELTA) < loss + 0.02


def test_every_bound_is_above_the_losses_themselves() -> None:
    rng = np.random.default_rng(1)
    for _ in range(10):
        spent = [
            Spent(int(rng.integers(1, 10)), Fraction(float(e)), TENTH)
            for e in rng.uniform(0.05, 3, 3)
        ]
        delta = 10.0 ** -rng.integers(3, 12)
        loss = geometric_losses(spent, delta)
        assert loss <= renyi_epsilon(spent, delta) <= float(total(spent)) * 1.001
        kinds = [[(float(x) / 1, e.groups) for x in e.releases[0]] for e in spent]
        exact = exact_epsilon(list(itertools.chain(*kinds)), delta)
        assert exact <= loss <= exact + 1e-3


def test_large_and_no_budgets() -> None:
    assert geometric_losses([Spent(1, Fraction(3000), TENTH)], DELTA) == pytest.approx(3000)
    assert geometric_losses([], DELTA) == gaussian_losses((), DELTA) == 0.0


def test_only_kinds_of_groups_that_exist_count_in_losses() -> None:
    assert geometric_losses(TWICE, DELTA) < geometric_losses(PURE, DELTA)


def test_the_published_noise_costs_less_than_was_published() -> None:
    """zCDP says 12.163 of the discrete Gaussian; a Gaussian of the same scale costs 11.666."""
    twice = gaussian_losses(tuple(each._replace(undivided=False) for each in ZCDP), DELTA)
    assert twice == pytest.approx(11.667, abs=2e-3)
    assert gaussian_epsilon(total(ZCDP), DELTA) < twice < zcdp_epsilon(total(ZCDP), DELTA) - 0.49


@pytest.mark.parametrize(("sigma", "times"), [(0.5, 1), (0.7, 6), (3.0, 9), (20.0, 40)])
@pytest.mark.parametrize("delta", [1e-3, 1e-10])
def test_discrete_gaussians_by_another_implementation(
    sigma: float, times: int, delta: float
) -> None:
    each = Spent(times, Fraction(times) / (2 * Fraction(sigma) ** 2))
    loss = gaussian_losses((each,), delta)
    other = pld.from_discrete_gaussian_mechanism(sigma, value_discretization_interval=1e-4)
    upper = other.self_compose(times).get_epsilon_for_delta(delta)
    # The other rounds each release up, so it is above by at most a step for each.
    assert upper - 1e-4 * times - 1e-3 <= loss <= upper + 1e-3
    if sigma > 2:
        assert loss == pytest.approx(epsilon_of(math.sqrt(times) / sigma, delta), abs=5e-3)


def test_a_small_discrete_gaussian_is_exact() -> None:
    """One release of few values: its largest losses are sums by hand."""
    sigma, delta = 0.5, 1e-4
    values = np.arange(-12, 13)
    mass = np.exp(-(values**2) / (2 * sigma**2))
    mass /= mass.sum()
    losses = (1 + 2 * values) / (2 * sigma**2)

    def excess(at: float) -> float:
        return float((mass * np.maximum(0, -np.expm1(at - losses))).sum()) - delta

    exact = optimize.brentq(excess, 0, losses.max())
    loss = gaussian_losses((Spent(1, 1 / (2 * Fraction(sigma) ** 2)),), delta)
    assert exact <= loss <= exact + 2e-4


def test_every_mix_of_kinds_is_tried() -> None:
    """No record costs more: with j of s groups measured once, for each j."""
    half = Fraction(1, 2)
    mixed = Spent(3, Fraction(12), half)
    worst = gaussian_losses((mixed,), 1e-6)
    share = Fraction(4)
    for once in range(4):
        parts = [Spent(once, once * share)] if once else []
        if once < 3:
            parts.append(Spent(3 - once, (3 - once) * share, half, False))
        assert gaussian_losses(tuple(parts), 1e-6) <= worst * (1 + 1e-3)
    # Levels of one kind have equally many of each; of two kinds any number.
    two = [mixed, mixed._replace(alike=1)]
    assert gaussian_losses((mixed, mixed), 1e-6) <= gaussian_losses(tuple(two), 1e-6) * (1 + 1e-3)


def test_small_epsilons_are_found_too() -> None:
    """Far below one, where neither the sum of budgets nor Renyi's bound is near."""
    loss = geometric_losses([Spent(100, Fraction(1))], 1e-3)
    exact = exact_epsilon([(0.01, 100)], 1e-3)
    assert exact < 0.5 and exact <= loss <= exact + 1e-3
