"""Losses against every combination enumerated, and against another implementation."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy import optimize, stats

from dpstream.accounting.gaussian import epsilon_of
from dpstream.accounting.tabulation.guarantee import (
    DELTA,
    Spent,
    gaussian_epsilon,
    renyi_epsilon,
    total,
    zcdp_epsilon,
)
from dpstream.accounting.tabulation.losses import gaussian_losses, geometric_losses
from tests.oracle.published_margins import level_budget, published_epsilon, published_rho

MARGINS = (6, 6, 11, 11, 50, 50, 50)
TENTH = Fraction(1, 10)
PURE = [Spent(9, level_budget(published_epsilon(m), 9, 0.1), TENTH) for m in MARGINS]
ZCDP = [Spent(9, level_budget(published_rho(m), 9, 0.1), TENTH) for m in MARGINS]
ONCE = [each._replace(gamma=Fraction()) for each in PURE]
TWICE = [each._replace(undivided=False) for each in PURE]


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
    assert geometric_losses([], DELTA) == gaussian_losses([], DELTA) == 0.0


def test_only_kinds_of_groups_that_exist_count() -> None:
    assert geometric_losses(TWICE, DELTA) < geometric_losses(PURE, DELTA)


def test_the_published_noise_costs_less_than_was_published() -> None:
    """zCDP says 12.163 of the discrete Gaussian; a Gaussian of the same scale costs 11.666."""
    twice = gaussian_losses([each._replace(undivided=False) for each in ZCDP], DELTA)
    assert twice == pytest.approx(11.667, abs=2e-3)
    assert gaussian_epsilon(total(ZCDP), DELTA) < twice < zcdp_epsilon(total(ZCDP), DELTA) - 0.49


@pytest.mark.parametrize(("sigma", "times"), [(0.5, 1), (0.7, 6), (3.0, 9), (20.0, 40)])
@pytest.mark.parametrize("delta", [1e-3, 1e-10])
def test_discrete_gaussians_by_another_implementation(
    sigma: float, times: int, delta: float
) -> None:
    each = Spent(times, Fraction(times) / (2 * Fraction(sigma) ** 2))
    loss = gaussian_losses([each], delta)
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
    loss = gaussian_losses([Spent(1, 1 / (2 * Fraction(sigma) ** 2))], delta)
    assert exact <= loss <= exact + 2e-4


def test_every_mix_of_kinds_is_tried() -> None:
    """No record costs more: with j of s groups measured once, for each j."""
    half = Fraction(1, 2)
    mixed = Spent(3, Fraction(12), half)
    worst = gaussian_losses([mixed], 1e-6)
    share = Fraction(4)
    for once in range(4):
        parts = [Spent(once, once * share)] if once else []
        if once < 3:
            parts.append(Spent(3 - once, (3 - once) * share, half, False))
        assert gaussian_losses(parts, 1e-6) <= worst * (1 + 1e-3)
    # Levels of one kind have equally many of each; of two kinds any number.
    two = [mixed, mixed._replace(alike=1)]
    assert gaussian_losses([mixed, mixed], 1e-6) <= gaussian_losses(two, 1e-6) * (1 + 1e-3)


def test_small_epsilons_are_found_too() -> None:
    """Far below one, where neither the sum of budgets nor Renyi's bound is near."""
    loss = geometric_losses([Spent(100, Fraction(1))], 1e-3)
    exact = exact_epsilon([(0.01, 100)], 1e-3)
    assert exact < 0.5 and exact <= loss <= exact + 1e-3
