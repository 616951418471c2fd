"""The compiled loops against rationals and against scipy.signal."""

from fractions import Fraction

import numpy as np
import pytest
from scipy.signal import lfilter

from dpstream.accounting.limits import DECODE_BITS
from dpstream.accounting.strategies.blt import BltStrategy
from dpstream.accounting.strategies.kernels import (
    decode_block,
    fill_impulse,
    impulse,
    largest_response,
)

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


SCALE = 1 << DECODE_BITS


def test_a_response_is_that_of_the_filter() -> None:
    decoder = BltStrategy(300).decoder
    for theta, omega in ((0.5, 0.25), (0.999, 0.01), (0.0, 1.0)):
        expected = np.abs(lfilter([0.0, -omega], [1.0, -theta], decoder)).max()
        assert largest_response(theta, omega, decoder) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("level", [0, 1, 5, 20])
def test_decode_block_rounds_to_nearest(level: int) -> None:
    for total in (0, 1, -1, 12345, -12345, 10**9, -(10**9)):
        assert decode_block(total, level) == round(Fraction(total * SCALE, 2 ** (level + 1) - 1))
