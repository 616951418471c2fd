"""What plans compute without a compiler has the bits of what kernels and scipy.signal compute."""

import numpy as np
import pytest
from scipy.signal import fftconvolve, lfilter

from dpstream.accounting.strategies.blt import BltStrategy
from dpstream.accounting.strategies.impulse import impulse
from dpstream.accounting.strategies.kernels import fill_impulse, largest_response
from dpstream.accounting.strategies.toeplitz import ToeplitzStrategy

TRIGGERS = [1, 2, 3, 7, 96, 100, 255, 1000, 4096, 5000]


@pytest.mark.parametrize("triggers", TRIGGERS)
def test_the_compiled_impulse_is_the_interpreted_one(triggers: int) -> None:
    strategy = BltStrategy(triggers)
    plain, compiled = np.empty(triggers), np.empty(triggers)
    impulse(strategy.theta, strategy.omega, plain)
    fill_impulse(strategy.theta, strategy.omega, compiled)
    assert plain.tobytes() == compiled.tobytes() == strategy.decoder.tobytes()


@pytest.mark.parametrize(
    ("kind", "triggers"),
    [(BltStrategy, t) for t in TRIGGERS] + [(ToeplitzStrategy, t) for t in TRIGGERS[:-1]],
)
def test_gram_entries_have_the_bits_of_scipys_convolution(
    kind: type[BltStrategy | ToeplitzStrategy], triggers: int
) -> None:
    strategy = kind(triggers)
    column = strategy.coefficients()
    lags = fftconvolve(column, column[::-1])[triggers - 1 :]
    assert np.asarray(lags + lags[0] * 1e-10).tobytes() == strategy._gram.tobytes()


def test_a_response_is_that_of_the_filter() -> None:
    decoder = BltStrategy(300).decoder
    for theta, omega in ((0.5, 0.25), (0.999, 0.01), (0.0, 1.0)):
        expected = np.abs(lfilter([0.0, -omega], [1.0, -theta], decoder)).max()
        assert largest_response(theta, omega, decoder) == pytest.approx(expected, rel=1e-12)
