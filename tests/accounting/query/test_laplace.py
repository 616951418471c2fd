"""Thresholds of geometric noise: exact tails, and the continuous limit of Theorem 12."""

import math
from fractions import Fraction

import mpmath
import pytest

from dpstream.accounting.balls import precision
from dpstream.accounting.query.laplace import per_group, tail, theorem_12, threshold

GIVEN = [
    ((1.0, 1e-5, 1), 11.8198),
    ((1.0, 1e-5, 5), 63.1461),
    ((math.log(3), 1e-5, 3), 33.5458),
    ((1.0, 1e-15, 1), 34.8456),
]


@pytest.mark.parametrize(("setting", "tau"), GIVEN)
def test_theorem_12(setting: tuple[float, float, int], tau: float) -> None:
    assert round(theorem_12(*setting), 4) == tau


def test_the_other_branch() -> None:
    # P[1 + Laplace >= tau] = p > 1/2 on the other side of 1.
    tau = theorem_12(1.0, 0.9, 1)
    assert tau < 1 and math.isclose(1 - math.exp(tau - 1) / 2, 0.9)
    assert math.isclose(theorem_12(2.0, 0.5, 1), 1)


def released(scale: float, tau: int) -> mpmath.mpf:
    """P[1 + Z > tau], summed term by term from the law's definition."""
    with mpmath.workdps(60):
        ratio = mpmath.exp(-1 / mpmath.mpf(scale))
        mass = (1 - ratio) / (1 + ratio)
        if tau >= 1:
            return mass * ratio**tau / (1 - ratio)
        return 1 - mass * ratio ** (1 - tau) / (1 - ratio)


SETTINGS = [
    (epsilon, delta, kappa)
    for epsilon in (0.1, 1.0, math.log(3), 6.0)
    for delta in (1e-15, 1e-9, 1e-5, 0.3, 0.9)
    for kappa in (1, 2, 32)
]


@pytest.mark.parametrize(("epsilon", "delta", "kappa"), SETTINGS)
def test_threshold_is_the_least_that_holds(epsilon: float, delta: float, kappa: int) -> None:
    scale = kappa / epsilon
    tau = threshold(scale, delta, kappa)
    with mpmath.workdps(60):

        def any_of(chance: mpmath.mpf) -> mpmath.mpf:
            return 1 - (1 - chance) ** kappa

        assert any_of(released(scale, tau)) <= mpmath.mpf(delta)
        assert any_of(released(scale, tau - 1)) > mpmath.mpf(delta)


def test_the_continuous_threshold_releases_too_often() -> None:
    """11.8198 as a threshold of whole counts: 12 passes, at 1.22 delta."""
    found = float(released(1.0, math.floor(theorem_12(1.0, 1e-5, 1))))
    assert round(found / 1e-5, 2) == 1.22
    assert threshold(1.0, 1e-5, 1) == 12


def test_tail_sums_to_one() -> None:
    with precision(128):
        for at in (-3, 0, 1, 4):
            both = tail(2.5, at) + tail(2.5, 1 - at)
            assert abs(float(both) - 1) < 1e-30


def test_small_delta_keeps_its_digits() -> None:
    exact = 1 - (1 - Fraction(1, 10**15))
    assert math.isclose(per_group(1e-15, 1), float(exact), rel_tol=1e-12)


@pytest.mark.parametrize("delta", [1e-30, 1e-76, 1e-80, 1e-200, 1e-300, 5e-324])
@pytest.mark.parametrize(("scale", "groups"), [(1.0, 1), (3.0, 3), (4.096e5, 4_096)])
def test_a_tiny_delta_has_a_threshold_too(delta: float, scale: float, groups: int) -> None:
    tau = threshold(scale, delta, groups)
    with mpmath.workdps(700):
        chance = -mpmath.expm1(mpmath.log1p(-mpmath.mpf(delta)) / groups)
        ratio = mpmath.exp(-1 / mpmath.mpf(scale))
        tails = [ratio**at / (1 + ratio) for at in (tau, tau - 1)]
        assert tails[0] <= chance < tails[1]


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("delta", [0.2, 0.6, 0.9])
def test_both_branches_release_with_exactly_their_chance(delta: float, groups: int) -> None:
    """P[1 + Laplace >= tau] = per_group(delta, groups), on either side of 1."""
    at = (theorem_12(2.0, delta, groups) - 1) / (groups / 2.0)
    chance = math.exp(-at) / 2 if at >= 0 else 1 - math.exp(at) / 2
    assert math.isclose(chance, per_group(delta, groups), rel_tol=1e-12)
