"""Brent's method against SciPy's: the same bits, for the functions that are searched and others."""

import math

import numpy as np
import pytest
from scipy.optimize import brentq as reference

from dpstream.accounting import gaussian
from dpstream.accounting.roots import brentq


def test_the_bits_of_scipy_for_budgets() -> None:
    draw = np.random.default_rng(5)
    for _ in range(400):
        epsilon, delta = float(np.exp(draw.uniform(-5, 4))), float(np.exp(draw.uniform(-60, -1)))
        sigma = gaussian._sigma_of(epsilon, delta)

        def off(sigma: float, epsilon: float = epsilon, delta: float = delta) -> float:
            return gaussian._log_delta(sigma, epsilon) - float(np.log(delta))

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
