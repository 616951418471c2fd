"""Margins against sums over integers, 60 digits and draws; and against the normal's."""

import math
from typing import Any

import mpmath
import numpy as np
import pytest

from dpstream.accounting.mechanisms.laws import DiscreteGaussianLaw
from dpstream.accounting.tabulation.margins import (
    Chances,
    chances,
    margin,
    plus,
    quantile,
    summed,
    tail,
)
from dpstream.accounting.tabulation.scales import LawName, Noise
from tests.oracle.published_margins import published_rho

LAWS: list[LawName] = ["discrete gauss", "rounded gauss", "discrete laplace"]


def exact_tail(noise: Noise, m: int) -> float:
    """P(|Z| > m) in 40 digits, from the definition."""
    with mpmath.workdps(40):
        s = mpmath.mpf(noise.scale)
        if noise.law == "rounded gauss":
            return float(2 * mpmath.ncdf(-(m + mpmath.mpf(0.5)) / s))
        if noise.law == "discrete laplace":
            q = mpmath.exp(-1 / s)
            return float(2 * q ** (m + 1) / (1 + q))
        mass = [mpmath.exp(-(mpmath.mpf(k) ** 2) / (2 * s**2)) for k in range(int(20 * s) + 20)]
        return float(2 * sum(mass[m + 1 :]) / (2 * sum(mass) - 1))


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("scale", [0.2, 1.0, 3.3, 25.0, 90.0])
def test_margins_of_one_count(law: LawName, scale: float) -> None:
    noise = Noise(law, scale)
    half_width = margin(noise)
    assert exact_tail(noise, half_width) <= 0.05
    assert half_width == 0 or exact_tail(noise, half_width - 1) > 0.05
    for m in (0, half_width, 2 * half_width + 1):
        assert tail(noise, m) == pytest.approx(exact_tail(noise, m), rel=1e-9, abs=1e-14)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("count", [2, 8, 18, 23, 46])
def test_sums_are_convolutions(law: LawName, count: int) -> None:
    for scale in (0.4, 3.3):
        one = chances(Noise(law, scale))
        direct = np.ones(1)
        for _ in range(count):
            direct = np.convolve(direct, one.mass)
        sum_law, lowest = summed(one, count), count * one.lowest
        inside = direct[sum_law.lowest - lowest :][: len(sum_law.mass)]
        assert np.abs(inside - sum_law.mass).max() < 1e-14
        assert direct.sum() - inside.sum() < 1e-13
        assert sum_law.variance == pytest.approx(count * one.variance)
        reached = [
            m
            for m in range(400)
            if direct[np.abs(lowest + np.arange(len(direct))) > m].sum() <= 0.05
        ]
        assert margin(Noise(law, scale), count) == reached[0]


def test_published_totals_are_sums_of_noisy_cells() -> None:
    """Margins of totals of 46, 18 and 8 cells, as multiples of the level's target."""
    for target in (11, 50):
        noise = Noise("discrete gauss", math.sqrt(1 / (2 * published_rho(target))))
        times = [margin(noise, n) / target for n in (46, 18, 8)]
        assert times == pytest.approx([6.8, 4.2, 2.8], abs=0.08)


def test_margins_hold_in_draws_and_one_less_does_not() -> None:
    rng = np.random.default_rng(0)
    noise = Noise("discrete laplace", 4.0)
    one = chances(noise)
    drawn = rng.choice(one.values, (100_000, 8), p=one.mass)
    held = margin(noise, 8)
    missed = [float((np.abs(drawn.sum(axis=1)) > m).mean()) for m in (held, held - 1)]
    assert missed[0] < 0.05 + 0.003 and missed[1] > 0.05 - 0.003


def test_sums_of_counts_that_are_never_negative() -> None:
    """Of cells that are truly 0 the plain margin is far too small; the other holds for all."""
    rng = np.random.default_rng(1)
    noise = Noise("discrete gauss", 3.0)
    one = chances(noise)
    plain, safe = margin(noise, 46), margin(noise, 46, clipped=True)
    for truth in (np.zeros(46), np.arange(46), np.full(46, 100)):
        drawn = rng.choice(one.values, (20_000, 46), p=one.mass)
        error = np.abs((np.maximum(drawn + truth, 0) - truth).sum(axis=1))
        assert (error > safe).mean() < 0.055
        if not truth.any():
            assert (error > plain).mean() > 0.8
    assert margin(noise, 1, clipped=True) == margin(noise)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("chance", [0.01, 0.5, 0.9, 0.999])
def test_quantiles(law: LawName, chance: float) -> None:
    noise = Noise(law, 3.7)
    one, cutoff = chances(noise), quantile(noise, chance)
    assert one.mass[one.values <= cutoff].sum() >= chance
    assert one.mass[one.values <= cutoff - 1].sum() < chance


def test_no_noise_has_no_margin() -> None:
    nothing = Noise("discrete gauss", 0.0)
    assert margin(nothing, 46) == 0 == quantile(nothing, 0.9)


def test_laws_agree_with_those_that_are_drawn() -> None:
    law, one = DiscreteGaussianLaw(3.3), chances(Noise("discrete gauss", 3.3))
    for k, ball in zip(range(1, 20), law.lower(), strict=False):
        assert one.at_most(np.array([-k]))[0] == pytest.approx(float(ball.mid()), rel=1e-10)


def test_two_laws_add_up() -> None:
    one, two = Chances(-1, np.array([0.25, 0.5, 0.25])), Chances(0, np.array([0.5, 0.5]))
    sum_law = plus(one, two)
    assert sum_law.lowest == -1 and sum_law.mass == pytest.approx([0.125, 0.375, 0.375, 0.125])
    assert sum_law.at_most(np.array([-5, 0, 99])) == pytest.approx([0, 0.5, 1])


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("count", [2, 3])
def test_margins_of_clipped_sums_are_the_least(law: LawName, count: int) -> None:
    """By convolution: counts that are truly 0 above, counts that are large below."""
    for scale in (0.6, 2.5, 7.0):
        one = chances(Noise(law, scale))
        clipped = np.append(one.mass[one.values <= 0].sum(), one.mass[one.values > 0])
        upper = full_mass = np.ones(1)
        for _ in range(count):
            upper, full_mass = np.convolve(upper, clipped), np.convolve(full_mass, one.mass)
        values = count * one.lowest + np.arange(len(full_mass))

        def missed(
            m: int, upper: Any = upper, full_mass: Any = full_mass, values: Any = values
        ) -> float:
            return float(upper[m + 1 :].sum() + full_mass[values < -m].sum())

        least = next(m for m in range(400) if missed(m) <= 0.05)
        assert margin(Noise(law, scale), count, clipped=True) == least


def test_a_sum_of_no_counts_is_zero() -> None:
    sum_law = summed(chances(Noise("discrete gauss", 3.0)), 0)
    assert sum_law.lowest == 0 and sum_law.mass.tolist() == [1.0]


@pytest.mark.parametrize("law", LAWS)
def test_sums_of_laws_that_are_not_symmetric_are_convolutions(law: LawName) -> None:
    """What is far out must not wrap around: its chances are published margins' last digits."""
    one = chances(Noise(law, 2.5))
    clipped = np.append(one.mass[one.values <= 0].sum(), one.mass[one.values > 0])
    sum_law = summed(Chances(0, clipped), 3)
    direct = np.convolve(np.convolve(clipped, clipped), clipped)
    inside = direct[sum_law.lowest :][: len(sum_law.mass)]
    assert np.abs(inside - sum_law.mass).max() < 1e-14 and direct.sum() - inside.sum() < 1e-13
    assert Chances(5, np.array([0.5, 0.5])).variance == 0.25


@pytest.mark.parametrize("law", LAWS)
def test_a_quantile_that_float_errors_leave_open_is_the_larger_one(law: LawName) -> None:
    noise = Noise(law, 3.7)
    one = chances(noise)
    reached = one.at_most(one.values)
    for k in (-4, 0, 6):
        chance = float(reached[k - one.lowest])
        assert quantile(noise, chance + 5e-12) == quantile(noise, chance) == k + 1
        assert quantile(noise, chance - 5e-11) == k
