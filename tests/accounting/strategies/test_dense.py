"""The optimum as a strategy: its certificate, exact rounding, its committed numbers.

BLT: exact rounding, its coefficients, and those of a run begun before.
"""

import itertools
from fractions import Fraction
from typing import Any
from unittest import mock

import flint
import numpy as np
import pytest

from dpstream.accounting import balls as balls_module
from dpstream.accounting.arrays import Int64
from dpstream.accounting.balls import ROUND_UP
from dpstream.accounting.limits import DECODE_BITS, MAX_DENSE_TRIGGERS, MAX_TRIGGERS
from dpstream.accounting.strategies import BltStrategy, dense, kernels, make_strategy
from dpstream.accounting.strategies import blt as module
from dpstream.accounting.strategies.base import ExactNoise, Ranges
from dpstream.accounting.strategies.blt import EXPONENTIALS
from dpstream.accounting.strategies.dense import DenseStrategy, prefix_optimum, prefix_weights
from tests.accounting.strategies.dense import SCALE, balls, fold, noise_of


def root(matrix: np.ndarray) -> np.ndarray:
    values, vectors = np.linalg.eigh(matrix)
    return np.asarray((vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T)


def rising(triggers: int, last: float) -> np.ndarray:
    """What each prefix counts."""
    return np.geomspace(1, last, triggers) if triggers > 1 else np.ones(1)


def gram_of_prefixes(importance: np.ndarray) -> np.ndarray:
    prefixes = np.tril(np.ones((len(importance), len(importance))))
    return np.asarray(prefixes.T @ np.diag(importance) @ prefixes)


@pytest.mark.parametrize("triggers", [1, 2, 3, 16, 100])
@pytest.mark.parametrize("last", [1.0, 4.0, 0.1])
def test_the_floor_is_the_dual_by_dense_eigenvectors(triggers: int, last: float) -> None:
    """(tr (D^1/2 V D^1/2)^1/2)^2 at the weights that are handed out, whose sum is 1."""
    importance = rising(triggers, last)
    weights, floor = prefix_weights(importance)
    half = np.sqrt(weights)
    dual = np.trace(root(half[:, None] * gram_of_prefixes(importance) * half)) ** 2
    assert weights.min() > 0 and weights.sum() == pytest.approx(1, rel=1e-12)
    assert floor == pytest.approx(dual, rel=1e-8)


@pytest.mark.parametrize("triggers", [2, 5, 40])
@pytest.mark.parametrize("last", [1.0, 4.0])
def test_no_factorisation_is_below_the_floor(triggers: int, last: float) -> None:
    """Weak duality, tried on random X of diagonal 1."""
    importance = rising(triggers, last)
    _, floor = prefix_weights(importance)
    rng = np.random.default_rng(triggers)
    for _ in range(20):
        factor = rng.normal(size=(triggers, 2 * triggers)) + rng.random()
        x = factor @ factor.T
        x /= np.sqrt(np.outer(x.diagonal(), x.diagonal()))
        assert np.trace(np.linalg.solve(x, gram_of_prefixes(importance))) >= floor


@pytest.mark.parametrize(
    ("triggers", "last", "buffers", "most"),
    [(1, 1, 1, 1 + 1e-9), (2, 1, 1, 1.002), (2, 1, 2, 1.00001), (16, 1, 3, 1.0001),
     (100, 1, 4, 1.0002), (100, 1, 6, 1.00001), (500, 1, 5, 1.0002), (2, 4, 2, 1.00001),
     (16, 4, 3, 1.0001), (16, 16, 3, 1.0002), (100, 4, 4, 1.0002), (16, 4, 6, 1.00001)],
)  # fmt: skip
def test_few_buffers_come_near_the_floor(
    triggers: int, last: float, buffers: int, most: float
) -> None:
    importance = rising(triggers, last)
    _, floor = prefix_weights(importance)
    matrix = prefix_optimum(importance, buffers).matrix()
    columns = (matrix**2).sum(axis=0)
    decoder = np.tril(np.ones((triggers, triggers))) @ np.linalg.inv(matrix)
    error = float(importance @ (decoder**2).sum(axis=1) * columns.max())
    assert columns == pytest.approx(np.ones(triggers), abs=1e-9)
    assert floor * (1 - 1e-9) <= error <= floor * most


def test_two_triggers_by_hand() -> None:
    """With X = ((1, r), (r, 1)) the error is (3 - 2 r) / (1 - r^2), smallest at the golden ratio's
    r = (3 - 5^1/2) / 2, where it is phi^2."""
    golden = (1 + np.sqrt(5)) / 2
    assert prefix_weights(np.ones(2))[1] == pytest.approx(golden**2, rel=1e-6)
    matrix = prefix_optimum(np.ones(2), 2).matrix()
    assert (matrix.T @ matrix)[0, 1] == pytest.approx((3 - np.sqrt(5)) / 2, abs=1e-4)


def error_of(name: str, triggers: int) -> float:
    """Root mean squared error of the prefixes at mu = 1 over the floor of every factorisation."""
    strategy = make_strategy(name, triggers)
    squared = float((strategy.sd_factors**2).sum() * strategy.col2)
    return float(np.sqrt(squared / prefix_weights(np.ones(triggers))[1]))


@pytest.mark.parametrize("triggers", [1, 2, 4, 5, 16, 20, 100, 150, 365])
def test_within_a_thousandth_of_the_certified_floor(triggers: int) -> None:
    assert 1 <= error_of("dense", triggers) <= 1.0002


@pytest.mark.parametrize(("triggers", "blt"), [(16, 1.0440), (100, 1.0482), (500, 1.0395)])
def test_blt_is_4_to_5_percent_above_it(triggers: int, blt: float) -> None:
    assert error_of("blt", triggers) == pytest.approx(blt, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("triggers", [1000, MAX_DENSE_TRIGGERS])
def test_long_windows_come_as_near(triggers: int) -> None:
    assert 1 <= error_of("dense", triggers) <= 1.0002


@pytest.mark.parametrize("triggers", [1, 2, 7, 40])
def test_rounding_is_that_of_the_exact_number(triggers: int) -> None:
    """Against rationals: solve A w = z with the matrix of the committed numbers, add up, round."""
    strategy = DenseStrategy(triggers)
    theta, out, into, gain = strategy.generators
    noise = noise_of(strategy, 2, 900.0, triggers)
    prefixes = fold(strategy, noise)
    up = Fraction(1, 2) + Fraction(1, 3 << 12)
    for row in range(2):
        solved: list[Fraction] = []
        for t in range(triggers):
            rest = Fraction(noise[row, t].item())
            for k, j in itertools.product(range(theta.shape[1]), range(t)):
                weight = Fraction(out[t, k].item()) * Fraction(into[j, k].item())
                for m in range(j + 1, t):
                    weight *= Fraction(theta[m, k].item())
                rest -= weight * solved[j]
            solved.append(rest * Fraction(gain[t].item()))
            assert prefixes[row, t] == (sum(solved) * SCALE + up).__floor__()


def test_a_run_keeps_the_numbers_that_it_was_begun_with() -> None:
    parameters = np.array([0.0, 0.5, 1.0, 1.0, 0.25, 0.5, 1.0, 2.0])
    strategy = DenseStrategy(2, parameters)
    assert strategy.parameters.tolist() == parameters.tolist()
    assert strategy.matrix().tolist() == [[1.0, 0.0], [0.5, 0.5]]
    assert strategy.col2 == pytest.approx(1.25, rel=1e-9) and strategy.state_columns == 3
    again = DenseStrategy(9, DenseStrategy(9).parameters)
    assert np.array_equal(again.matrix(), DenseStrategy(9).matrix())
    for size in (0, 2, 6, 9):
        with pytest.raises(ValueError, match="3 d \\+ 1 parameters"):
            DenseStrategy(2, np.full(size, 0.5))
    for wrong in (
        np.where(np.arange(8) == 3, 0.0, parameters),
        np.where(np.arange(8) == 1, np.nan, parameters),
    ):
        with pytest.raises(ValueError, match="gains positive"):
            DenseStrategy(2, wrong)


def test_what_is_drawn_for_other_numbers_is_caught() -> None:
    """A column of norm 1.25 where the largest is declared 1: col2 is looked at, not assumed."""
    numbers = DenseStrategy(6).parameters.reshape(6, -1)
    numbers[3, -1] /= 1.25  # a larger entry on the diagonal of A
    strategy = DenseStrategy(6, numbers.reshape(-1))
    largest = float((strategy.matrix() ** 2).sum(axis=0).max())
    assert largest > 1.2 and strategy.col2 >= largest


@pytest.mark.parametrize(
    ("triggers", "buffers"),
    [(1, 1), (2, 2), (4, 2), (5, 3), (20, 3), (21, 4), (150, 4), (151, 5), (600, 5), (601, 6),
     (MAX_DENSE_TRIGGERS, 6)],
)  # fmt: skip
def test_how_many_numbers_a_trigger_takes(triggers: int, buffers: int) -> None:
    calls = []

    def optimum(importance: np.ndarray, count: int) -> mock.Mock:
        calls.append((importance.tolist(), count))
        return mock.Mock(table=np.full((len(importance), 3 * count + 1), 0.5))

    with mock.patch.object(dense, "prefix_optimum", optimum):
        parameters = dense.rising_parameters.__wrapped__(triggers)
    assert calls == [([1.0] * triggers, buffers)] and len(parameters) == triggers * (
        3 * buffers + 1
    )
    assert not parameters.flags.writeable


@pytest.mark.parametrize("triggers", [1, 2, 9, 33])
def test_figures_bound_those_of_the_matrices_closely(triggers: int) -> None:
    strategy = DenseStrategy(triggers)
    assert not strategy.rounds_nodes
    rows = np.abs(strategy.decoder)
    lengths = np.sqrt((rows**2).sum(1))
    assert (strategy.sd_factors > lengths).all()
    assert strategy.sd_factors == pytest.approx(lengths, rel=1e-9)
    assert rows.sum(1).max() < strategy.reach <= rows.sum(1).max() * (1 + 1e-9)
    assert strategy.rounding.shape == (triggers,)
    most = float(ROUND_UP) / SCALE
    assert (most < strategy.rounding).all() and strategy.rounding.max() <= most * (1 + 1e-9)


@pytest.mark.parametrize("width", [1, 2, 13])
def test_open_roundings_are_settled_in_their_own_place(width: int) -> None:
    """All are open, of paths that begin anywhere: each goes to its column, or to the only one."""
    strategy = DenseStrategy(40)
    noise = noise_of(strategy, 3, 500.0)
    prefixes, begin = fold(strategy, noise), np.array([0, 11, 25])
    end = begin + (width if width > 1 else 5)
    stack, requests = np.zeros((3, strategy.state_columns)), []
    zero, skipped = np.zeros(3, np.int64), np.zeros((3, 40), np.int64)

    def exact(row: int, nodes: int) -> ExactNoise:
        requests.append((row, nodes))
        return balls(noise[row, :nodes])

    flat, starts = noise.reshape(-1), np.arange(3) * 40
    strategy.fold(Ranges(flat, starts, zero, begin, stack, skipped, exact))
    requests.clear()
    out = np.zeros((3, width), np.int64)
    strategy.fold(Ranges(flat, starts + begin, begin, end, stack, out, exact, 1.0))
    for row in range(3):
        steps = prefixes[row, begin[row] : end[row]]
        assert out[row].tolist() == (steps if width > 1 else steps[-1:]).tolist()
        settled = [nodes for which, nodes in requests if which == row]
        assert settled == (list(range(begin[row] + 1, end[row] + 1)) if width > 1 else [end[row]])


def test_what_the_kernel_is_told_of_float_errors() -> None:
    """Noise errors reach a prefix by the largest row, and each buffer moves by its own response."""
    strategy, arguments = DenseStrategy(30), list[Any]()

    def kernel(*args: Any) -> tuple[Int64, Int64]:
        arguments.append(args[-2:])
        return np.zeros(0, np.int64), np.zeros(0, np.int64)

    path = (np.zeros(30), np.zeros(1, np.int64), np.zeros(1, np.int64), np.full(1, 30))
    stack, out = np.zeros((1, strategy.state_columns)), np.zeros((1, 30), np.int64)
    with mock.patch.object(kernels, "fold_generators", kernel):
        strategy.fold(Ranges(*path, stack, out, lambda row, nodes: balls(path[0]), 0.25))
    [(moves, given)] = arguments
    assert given == 0.25 * strategy.reach + 2.0**-40
    responses = strategy._responses
    assert moves.tolist() == [m * (1 + 1e-6) for m in [*responses.buffers, responses.step]]
    assert len(set(moves.tolist())) == len(moves) == strategy.state_columns - 1


def test_no_more_triggers_than_the_limit() -> None:
    numbers = np.tile([0.0, 0.5, 1.0, 1.0], MAX_DENSE_TRIGGERS)
    assert DenseStrategy(MAX_DENSE_TRIGGERS, numbers).triggers == MAX_DENSE_TRIGGERS
    with pytest.raises(ValueError, match="fewer"):
        DenseStrategy(MAX_DENSE_TRIGGERS + 1)


@pytest.mark.parametrize("triggers", [2, 7, 40])
def test_blt_rounding_is_that_of_the_exact_number(triggers: int) -> None:
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
