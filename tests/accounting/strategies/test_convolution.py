"""Convolutions in floats and in balls: the rounding of a prefix is that of the exact number."""

import itertools
from fractions import Fraction

import flint
import numpy as np
import pytest
from scipy.signal import fftconvolve

from dpstream.accounting.balls import precision
from dpstream.accounting.limits import DECODE_BITS
from dpstream.accounting.strategies import Strategy, convolution, make_strategy
from dpstream.accounting.strategies.base import ExactNoise, Ranges
from dpstream.accounting.strategies.toeplitz import BltStrategy, ToeplitzStrategy
from tests.accounting.strategies.dense import (
    CONVOLUTIONS,
    SCALE,
    balls,
    convolving,
    fold,
    noise_of,
)


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("triggers", [2, 7, 40])
def test_rounding_is_that_of_the_exact_number(name: str, triggers: int) -> None:
    """Against rationals: solve A w = z, add up, round at the announced offset."""
    strategy = make_strategy(name, triggers)
    column = [_coefficient(strategy, lag) for lag in range(triggers)]
    noise = noise_of(strategy, 4, 900.0, triggers)
    prefixes = fold(strategy, noise)
    up = Fraction(1, 2) + Fraction(1, 3 << 12)
    for row in range(4):
        solved: list[Fraction] = []
        for t in range(triggers):
            rest = Fraction(noise[row, t].item())
            rest -= sum((column[t - k] * solved[k] for k in range(t)), Fraction(0))
            solved.append(rest / column[0])
            expected = (sum(solved) * SCALE + up).__floor__()
            assert prefixes[row, t] == expected


def _coefficient(strategy: Strategy, lag: int) -> Fraction:
    """First column of the encoder, exactly."""
    if strategy.rounds_nodes:
        return Fraction(int(strategy.matrix()[lag, 0]))
    if lag == 0:
        return Fraction(1)
    pairs = zip(strategy.theta, strategy.omega, strict=True)  # type: ignore[attr-defined]
    return sum((Fraction(o) * Fraction(t) ** (lag - 1) for t, o in pairs), Fraction(0))


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_float_error_is_within_what_fold_assumes(name: str) -> None:
    """Every prefix settled exactly equals the one the floats gave, also far along a path."""
    triggers = 700
    strategy = convolving(name, triggers)
    noise = noise_of(strategy, 3, 5000.0)
    prefixes = fold(strategy, noise)
    for row, t in itertools.product(range(3), (1, 2, 333, 699, 700)):
        assert strategy.exact(balls(noise[row]), t) == prefixes[row, t - 1]


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_no_dyadic_number_lies_on_the_rounding_boundary(name: str) -> None:
    """Prefixes of small integer noise are dyadic; at 1/2 a quarter of them would be ties."""
    strategy = make_strategy(name, 3)
    noise = np.arange(-600, 600, dtype=np.int32).repeat(3).reshape(-1, 3)
    kind = np.int32 if strategy.rounds_nodes else np.float64
    stack = np.zeros((1200, strategy.state_columns), strategy.state_dtype)
    out = np.zeros((1200, 3), np.int64)
    ends = np.zeros(1200, np.int64), np.full(1200, 3)

    def exact(row: int, nodes: int) -> ExactNoise:
        raise AssertionError("floats left a rounding open")

    path = (noise.reshape(-1).astype(kind), np.arange(1200) * 3, *ends, stack, out)
    strategy.fold(Ranges(*path, exact))


def test_more_precision_settles_what_little_leaves_open(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = convolving("toeplitz", 60)
    noise = noise_of(strategy, 1, 900.0)[0]
    expected = strategy.exact(balls(noise), 60)
    monkeypatch.setattr(convolution, "_FIRST_PRECISION", 2)
    assert convolving("toeplitz", 60).exact(balls(noise), 60) == expected
    monkeypatch.setattr(convolution, "_LAST_PRECISION", 2)
    with pytest.raises(ArithmeticError):
        convolving("toeplitz", 60).exact(balls(noise), 60)


@pytest.mark.parametrize("integer", [-7, 0, 3])
@pytest.mark.parametrize("beside", [Fraction(-1, 1 << 40), Fraction(1, 1 << 40)])
def test_a_prefix_is_rounded_at_the_boundary_that_no_dyadic_number_has(
    integer: int, beside: Fraction
) -> None:
    """floor(x + 1/2 + 2^-12 / 3), as the floats round it."""
    boundary = integer - Fraction(1, 2) - Fraction(1, 3 << 12)
    scaled = boundary + beside
    with precision(256):
        node = flint.arb(scaled.numerator) / scaled.denominator / (1 << DECODE_BITS)
        prefix = convolution._rounded([flint.arb(1)], [node], 1)
    assert prefix == (integer if beside > 0 else integer - 1)


TRIGGERS = [1, 2, 3, 7, 96, 100, 255, 1000, 4096, 5000]


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
