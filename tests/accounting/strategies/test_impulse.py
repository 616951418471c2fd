"""The decoder of buffers: the series that defines it, and the bits of the compiled source."""

from fractions import Fraction

import numpy as np
import pytest

from dpstream.accounting.strategies.blt import BltStrategy
from dpstream.accounting.strategies.impulse import impulse
from dpstream.accounting.strategies.kernels import fill_impulse

TRIGGERS = [1, 2, 3, 7, 96, 100, 255, 1000, 4096, 5000]


@pytest.mark.parametrize("triggers", TRIGGERS)
def test_the_compiled_impulse_is_the_interpreted_one(triggers: int) -> None:
    strategy = BltStrategy(triggers)
    plain, compiled = np.empty(triggers), np.empty(triggers)
    impulse(strategy.theta, strategy.omega, plain)
    fill_impulse(strategy.theta, strategy.omega, compiled)
    assert plain.tobytes() == compiled.tobytes() == strategy.decoder.tobytes()


@pytest.mark.parametrize("triggers", [1, 2, 9])
def test_it_is_the_series_that_defines_the_decoder(triggers: int) -> None:
    """Coefficients of 1 / ((1 - x) c(x)) by long division in rationals."""
    theta, omega = np.array([0.25, 0.75]), np.array([0.5, 0.125])
    column = [Fraction(1)] + [
        sum(
            (Fraction(o) * Fraction(t) ** k for t, o in zip(theta, omega, strict=True)), Fraction(0)
        )
        for k in range(triggers - 1)
    ]
    inverse: list[Fraction] = []
    for t in range(triggers):
        rest = sum((column[t - k] * inverse[k] for k in range(t)), Fraction(0))
        inverse.append((t == 0) - rest)
    series = np.full(triggers, np.nan)
    impulse(theta, omega, series)
    expected = [float(sum(inverse[: t + 1], Fraction(0))) for t in range(triggers)]
    assert series == pytest.approx(expected, rel=1e-15)
