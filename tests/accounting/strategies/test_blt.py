"""BLT: exact rounding, its coefficients, and those of a run begun before."""

from fractions import Fraction

import flint
import numpy as np
import pytest

from dpstream.accounting import balls as balls_module
from dpstream.accounting.limits import DECODE_BITS, MAX_TRIGGERS
from dpstream.accounting.strategies import BltStrategy
from dpstream.accounting.strategies import blt as module
from dpstream.accounting.strategies.base import ExactNoise, Ranges
from dpstream.accounting.strategies.blt import EXPONENTIALS
from tests.accounting.strategies.dense import SCALE, balls, fold, noise_of


@pytest.mark.parametrize("triggers", [2, 7, 40])
def test_rounding_is_that_of_the_exact_number(triggers: int) -> None:
    """Against rationals: solve A w = z, add up, round at the announced offset."""
    strategy = BltStrategy(triggers)
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


def _coefficient(strategy: BltStrategy, lag: int) -> Fraction:
    """First column of the encoder, exactly."""
    if lag == 0:
        return Fraction(1)
    pairs = zip(strategy.theta, strategy.omega, strict=True)
    return sum((Fraction(o) * Fraction(t) ** (lag - 1) for t, o in pairs), Fraction(0))


def test_no_dyadic_number_lies_on_the_rounding_boundary() -> None:
    """Prefixes of small integer noise are dyadic; at 1/2 a quarter of them would be ties."""
    strategy = BltStrategy(3)
    noise = np.arange(-600, 600, dtype=np.int32).repeat(3).reshape(-1, 3)
    stack = np.zeros((1200, strategy.state_columns), strategy.state_dtype)
    out = np.zeros((1200, 3), np.int64)
    ends = np.zeros(1200, np.int64), np.full(1200, 3)

    def exact(row: int, nodes: int) -> ExactNoise:
        raise AssertionError("floats left a rounding open")

    path = (noise.reshape(-1).astype(np.float64), np.arange(1200) * 3, *ends, stack, out)
    strategy.fold(Ranges(*path, exact))


def test_more_precision_settles_what_little_leaves_open(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = BltStrategy(60)
    noise = noise_of(strategy, 1, 900.0)[0]
    expected = strategy.exact(balls(noise), 60)
    monkeypatch.setattr(balls_module, "FIRST_PRECISION", 2)
    monkeypatch.setattr(module, "FIRST_PRECISION", 2)
    assert BltStrategy(60).exact(balls(noise), 60) == expected
    monkeypatch.setattr(balls_module, "_LAST_PRECISION", 2)
    with pytest.raises(ArithmeticError):
        BltStrategy(60).exact(balls(noise), 60)


@pytest.mark.parametrize("integer", [-7, 0, 3])
@pytest.mark.parametrize("beside", [Fraction(-1, 1 << 40), Fraction(1, 1 << 40)])
def test_a_prefix_is_rounded_at_the_boundary_that_no_dyadic_number_has(
    integer: int, beside: Fraction
) -> None:
    """floor(x + 1/2 + 2^-12 / 3), as the floats round it."""
    boundary = integer - Fraction(1, 2) - Fraction(1, 3 << 12)
    scaled = boundary + beside
    strategy = BltStrategy(1)  # of one coefficient, 1
    node = scaled / (1 << DECODE_BITS)
    prefix = strategy.exact(lambda _: [flint.arb(node.numerator) / node.denominator], 1)
    assert prefix == (integer if beside > 0 else integer - 1)


TRIGGERS = [1, 2, 3, 7, 96, 100, 255, 1000, 4096, 5000]


@pytest.mark.parametrize("triggers", [1 << 13, 1 << 17])
def test_sd_of_long_streams_is_that_of_the_exact_decoder(triggers: int) -> None:
    """Poles near 1 cost a direct-form filter 1e-5 here; sd_t must not be too small."""
    strategy = BltStrategy(triggers)
    exact = np.array([float(b) for b in strategy.decoder_balls(1024)])
    assert np.abs(strategy.decoder / exact - 1).max() < 1e-10
    assert np.all(strategy.sd_factors >= np.sqrt(np.cumsum(exact**2)))


def test_a_run_keeps_the_exponentials_that_it_was_begun_with() -> None:
    parameters = np.array([0.5, 0.9, 0.25, 0.125])
    strategy = BltStrategy(4, parameters)
    assert strategy.parameters.tolist() == parameters.tolist()
    column = [1.0] + [0.25 * 0.5**k + 0.125 * 0.9**k for k in range(3)]
    assert strategy.coefficients() == pytest.approx(column, rel=1e-15)
    assert BltStrategy(1).coefficients().tolist() == [1.0]
    for size in (0, 1, 3, 10):
        with pytest.raises(ValueError, match="one to four pairs"):
            BltStrategy(4, np.full(size, 0.5))


def test_the_row_of_a_stream_is_that_of_the_next_power_of_two() -> None:
    rows = {t: BltStrategy(t).parameters.tolist() for t in (1, 4, 5, 8, 9, 1 << 20)}
    assert rows[1] == rows[4] and rows[5] == rows[8] and rows[4] != rows[5] != rows[9]
    assert rows[1 << 20] == [*EXPONENTIALS[20][0], *EXPONENTIALS[20][1]]


@pytest.mark.parametrize("power", range(2, 17))
def test_blt_is_near_the_square_root_toeplitz_matrix(power: int) -> None:
    """Every row of the table, at its power of two and just above the one before."""
    for triggers in (1 << power, (1 << power - 1) + 1):
        strategy = BltStrategy(triggers)
        k = np.arange(1, triggers)
        root = np.cumprod(np.concatenate([[1.0], (2 * k - 1) / (2 * k)]))
        ideal = np.sqrt(np.cumsum(root**2) * (root**2).sum())
        ours = strategy.sd_factors * np.sqrt(strategy.col2)
        assert ours.mean() <= 1.005 * ideal.mean()
        assert ours[-1] <= 1.03 * ideal[-1]


def test_rows_are_encoders_of_every_length() -> None:
    """One row for each ceil(log2 T) up to the most triggers; exponentials that decay and add."""
    assert list(EXPONENTIALS) == [*range(2, MAX_TRIGGERS.bit_length())]
    for theta, omega in EXPONENTIALS.values():
        assert len(theta) == len(omega) <= 4
        assert all(0 < t < 1 for t in theta) and list(theta) == sorted(theta)
        assert all(o > 0 for o in omega)
        # Coefficients begin at 1 and never rise.
        assert sum(omega) <= 1


@pytest.mark.parametrize(("power", "largest", "mean"), [(10, 1.016, 1.003), (17, 1.016, 1.003)])
def test_the_error_is_what_is_said_of_it(power: int, largest: float, mean: float) -> None:
    """Against the square-root Toeplitz matrix: largest and mean error as `blt` states them."""
    triggers = 1 << power
    k = np.arange(1, triggers)
    root = np.cumprod(np.concatenate([[1.0], (2 * k - 1) / (2 * k)]))
    ideal = np.sqrt(np.cumsum(root**2) * (root**2).sum())
    strategy = BltStrategy(triggers)
    ours = strategy.sd_factors * np.sqrt(strategy.col2)
    assert ours.max() <= largest * ideal.max()
    assert 0.98 * ideal.mean() <= ours.mean() <= mean * ideal.mean()
