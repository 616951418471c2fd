"""Gaussian-DP and zCDP conversions against 60-digit arithmetic, with the direction checked."""

import math
from statistics import NormalDist

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting import gaussian_mechanism, pld
from scipy.optimize import brentq as reference

from dpstream.accounting import gaussian
from dpstream.accounting.gaussian import (
    brentq,
    cdp_delta,
    cdp_eps,
    delta_of,
    epsilon_near,
    epsilon_of,
    mu_of,
    sigma_near,
)
from tests.bench.paper.paper import cdp_rho


def test_the_bits_of_scipy_for_budgets() -> None:
    draw = np.random.default_rng(5)
    for _ in range(400):
        epsilon, delta = float(np.exp(draw.uniform(-5, 4))), float(np.exp(draw.uniform(-60, -1)))
        sigma = gaussian.sigma_near(epsilon, delta)

        def off(sigma: float, epsilon: float = epsilon, delta: float = delta) -> float:
            return gaussian.log_delta(sigma, epsilon) - float(np.log(delta))

        low, high = sigma / draw.uniform(1.01, 9), sigma * draw.uniform(1.01, 9)
        assert brentq(off, low, high, xtol=1e-12) == reference(off, low, high, xtol=1e-12)


@pytest.mark.parametrize("xtol", [1e-15, 2e-12, 1e-3])
def test_the_bits_of_scipy_for_other_functions(xtol: float) -> None:
    draw = np.random.default_rng(6)
    for _ in range(300):
        a, b, c = draw.normal(size=3).tolist()

        def wave(x: float, a: float = a, b: float = b, c: float = c) -> float:
            return math.sin(3 * x + a) + b * x**3 + c * math.exp(-x) - 0.1

        low, high = -abs(float(draw.normal())) * 3, abs(float(draw.normal())) * 3
        if wave(low) * wave(high) > 0:
            with pytest.raises(ValueError, match="signs"):
                brentq(wave, low, high, xtol=xtol)
            continue
        assert brentq(wave, low, high, xtol=xtol) == reference(wave, low, high, xtol=xtol)


def test_ends_steps_and_corners() -> None:
    assert brentq(lambda x: x, 0.0, 1.0, xtol=1e-9) == 0.0
    assert brentq(lambda x: x - 1, 0.0, 1.0, xtol=1e-9) == 1.0
    jump = brentq(lambda x: -1.0 if x < 0.3 else 1.0, 0.0, 1.0, xtol=1e-12)
    assert jump == reference(lambda x: -1.0 if x < 0.3 else 1.0, 0.0, 1.0, xtol=1e-12)
    with pytest.raises(RuntimeError):
        brentq(lambda x: math.copysign(1.0, x - 1e-300), -1e300, 1e301, xtol=1e-300)


PAIRS = [
    (6.0, 1e-9),
    (1.0, 1e-5),
    (0.1, 1e-2),
    (1e-3, 1e-12),
    (1e-6, 1e-9),
    (20.0, 1e-30),
    (100.0, 1e-300),
    (1000.0, 1e-9),
    (1e-3, 0.5),
]


def mp_delta(epsilon: float, mu: float) -> mpmath.mpf:
    with mpmath.workdps(60 + int(epsilon)):
        e, m = mpmath.mpf(epsilon), mpmath.mpf(mu)
        return +(mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m))


@pytest.mark.parametrize("epsilon", [0.0, 1e-6, 0.01, 0.5, 2.0, 6.0, 30.0, -0.3, -5.0])
@pytest.mark.parametrize("mu", [1e-4, 0.01, 0.3, 0.9744339, 3.0, 20.0])
def test_delta_is_rounded_up_and_close(epsilon: float, mu: float) -> None:
    exact = mp_delta(epsilon, mu)
    delta = delta_of(epsilon, mu)
    assert delta >= exact or delta == 1.0 == float(exact)
    if exact > 1e-300:
        assert delta <= exact * (1 + 1e-6) + 1e-14


def test_delta_edges() -> None:
    assert delta_of(1.0, 0.0) == 0.0
    assert delta_of(-1.0, 0.0) == pytest.approx(1 - math.exp(-1))
    assert delta_of(0.0, 1e3) == 1.0
    assert delta_of(1e300, 1e-300) == 0.0
    for bad in (-1.0, math.nan):
        with pytest.raises(ValueError, match="mu"):
            delta_of(1.0, bad)


@pytest.mark.parametrize(("epsilon", "delta"), PAIRS)
def test_mu_is_the_largest_that_holds(epsilon: float, delta: float) -> None:
    mu = mu_of(epsilon, delta)
    assert mp_delta(epsilon, mu) <= delta
    assert mp_delta(epsilon, mu * (1 + 1e-6)) > delta
    assert mu == pytest.approx(1 / gaussian_mechanism.get_sigma_gaussian(epsilon, delta), rel=1e-6)


@pytest.mark.parametrize(("epsilon", "delta"), PAIRS)
def test_epsilon_inverts_mu(epsilon: float, delta: float) -> None:
    mu = mu_of(epsilon, delta)
    back = epsilon_of(mu, delta)
    assert mp_delta(back, mu) <= delta
    assert back == pytest.approx(epsilon, rel=1e-6)


def test_figures_of_the_design() -> None:
    assert 1 / mu_of(6, 1e-9) == pytest.approx(1.0262369, abs=1e-6)
    assert mu_of(6, 1e-9) == pytest.approx(0.9744339, abs=1e-6)
    # Redrawing the noise of open windows after a restore: epsilon 6 becomes 8.83.
    assert epsilon_of(math.sqrt(2) * mu_of(6, 1e-9), 1e-9) == pytest.approx(8.83, abs=0.01)
    assert epsilon_of(1e-12, 0.5) == 0.0


def test_composition_agrees_with_pld() -> None:
    """Gaussian events whose squared mus add to mu^2 cost what mu_of says; 1% more does not."""
    mu = mu_of(2.0, 1e-6)
    parts = [mu * math.sqrt(share) for share in (0.5, 0.3, 0.2)]
    accountant = pld.PLDAccountant()
    for part in parts:
        accountant.compose(dp_accounting.GaussianDpEvent(1 / part))
    assert accountant.get_epsilon(1e-6) == pytest.approx(2.0, rel=2e-3)
    assert delta_of(2.0, 1.01 * mu) > 1e-6 * 1.05


def test_arguments_are_checked() -> None:
    for epsilon, delta in ((0, 0.1), (-1, 0.1), (math.inf, 0.1), (1, 0), (1, 1), (1, math.nan)):
        with pytest.raises(ValueError, match="must be"):
            mu_of(epsilon, delta)
    for mu, delta in ((-1, 0.1), (math.inf, 0.1), (1, 0), (1, 1)):
        with pytest.raises(ValueError, match="must be"):
            epsilon_of(mu, delta)


def mp_cdp_delta(rho: float, epsilon: float) -> float:
    """Minimum over a fine grid of alpha of the same bound, in high precision."""

    def bound(alpha: mpmath.mpf) -> mpmath.mpf:
        inner = (alpha - 1) * (alpha * rho - epsilon) + alpha * mpmath.log1p(-1 / alpha)
        return mpmath.exp(inner) / (alpha - 1)

    high = (epsilon + 1) / (2 * rho) + 2
    grid = [mpmath.mpf(1.01) + (high - 1.01) * i / 4000 for i in range(1, 4001)]
    return float(min(bound(alpha) for alpha in grid))


@pytest.mark.parametrize(("rho", "epsilon"), [(0.1, 1.0), (0.23, 3.0), (1.0, 6.0), (1e-4, 0.05)])
def test_zcdp(rho: float, epsilon: float) -> None:
    delta = cdp_delta(rho, epsilon)
    assert delta <= mp_cdp_delta(rho, epsilon) * (1 + 1e-9)
    assert delta == pytest.approx(mp_cdp_delta(rho, epsilon), rel=1e-3)
    # A Gaussian of mu = sqrt(2 rho) is rho-zCDP, so the bound is above its exact curve.
    assert delta >= delta_of(epsilon, math.sqrt(2 * rho))
    assert cdp_eps(rho, delta) == pytest.approx(epsilon, rel=1e-9)
    assert cdp_delta(rho, cdp_eps(rho, delta)) <= delta
    assert cdp_rho(epsilon, delta) == pytest.approx(rho, rel=1e-9)
    assert cdp_delta(cdp_rho(epsilon, delta), epsilon) <= delta


def test_zcdp_edges() -> None:
    assert cdp_delta(0, 1) == 0
    assert cdp_delta(1e3, 0) == 1
    assert cdp_eps(0, 0.1) < 1e-12
    assert cdp_rho(0, 0.1) < 0.1 and cdp_rho(0.5, 0.1) > 0
    for rho, epsilon in ((-1, 1), (1, -1)):
        with pytest.raises(ValueError, match=r"^rho and epsilon must be"):
            cdp_delta(rho, epsilon)
    for first, delta in ((-1, 0.1), (1, 0), (1, 1), (1, 1.5), (0, 1)):
        with pytest.raises(ValueError, match=r"^rho must be >= 0 and delta"):
            cdp_eps(first, delta)
        with pytest.raises(ValueError, match=r"^epsilon must be >= 0 and delta"):
            cdp_rho(first, delta)


@pytest.mark.parametrize(("rho", "epsilon"), [(0.1, 1.0), (0.23, 3.0), (1.0, 6.0), (1e-4, 0.05)])
def test_zcdp_is_never_below_the_best_bound(rho: float, epsilon: float) -> None:
    """Its own alpha is the best there is, and what the floats lose there is added."""
    with mpmath.workdps(40):
        low, high = mpmath.mpf("1.0000001"), mpmath.mpf(epsilon + 1) / (2 * rho) + 5
        for _ in range(150):
            alpha = (low + high) / 2
            falls = (2 * alpha - 1) * rho - epsilon + mpmath.log1p(-1 / alpha) < 0
            low, high = (alpha, high) if falls else (low, alpha)
        inner = (low - 1) * (low * rho - epsilon) + low * mpmath.log1p(-1 / low)
        least = mpmath.exp(inner) / (low - 1)
        assert least <= cdp_delta(rho, epsilon) <= least * (1 + mpmath.mpf(10) ** -11)


def test_the_searches_begin_where_the_reference_implementation_ends() -> None:
    # Bit for bit: sigma is part of noise names, and stores were begun with the reference's.
    draw = np.random.default_rng(7)
    with np.errstate(all="ignore"):
        for _ in range(200):
            epsilon, sigma, delta = 10.0 ** draw.uniform([-6, -3, -15], [3, 5, -0.01])
            assert sigma_near(epsilon, delta) == gaussian_mechanism.get_sigma_gaussian(
                epsilon, delta
            )
            reference = max(0.0, gaussian_mechanism.get_epsilon_gaussian(sigma, delta))
            assert epsilon_near(sigma, delta) == reference


@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.3])
def test_epsilon_of_a_huge_mu(delta: float) -> None:
    """Above any use, but whoever asks for it gets a figure: at least the smallest, and close."""
    mus = [2.0**k for k in (10, 19.99, 20, 20.01, 30, 100, 500)]
    values = [epsilon_of(mu, delta) for mu in mus]
    assert values == sorted(values)
    z = NormalDist().inv_cdf(1 - delta)
    for mu, epsilon in zip(mus, values, strict=True):
        smallest = mu**2 / 2 + z * mu  # up to (epsilon-term) e^epsilon Q(..), which lowers it
        assert epsilon >= smallest * (1 - 5 / mu) and epsilon <= smallest * (1 + 10 / mu + 2e-12)
    assert epsilon_of(1e300, delta) == math.inf
