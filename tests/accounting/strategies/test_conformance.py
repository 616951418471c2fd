"""One suite for every noise strategy: against its own dense matrix, and streaming.

What every strategy inherits: a trigger at least, no parameters unless it has some, no state.

The compiled loops against rationals and against scipy.signal.

The search for p-identities: its gradient, its formula, and that it beats trees.

Encoders of uneven columns, whose sensitivity is that of the largest.
"""

import itertools
from fractions import Fraction
from typing import Any

import flint
import numpy as np
import pytest
from scipy.signal import lfilter

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.balls import precision
from dpstream.accounting.limits import DECODE_BITS, MAX_DENSE_TRIGGERS
from dpstream.accounting.strategies import (
    STRATEGIES,
    BltStrategy,
    DenseStrategy,
    make_strategy,
)
from dpstream.accounting.strategies.base import ExactNoise, Generators, Ranges, Strategy
from dpstream.accounting.strategies.geometric import (
    IDENTITY,
    GeometricStrategy,
    prefix_identity,
    squared_error,
)
from dpstream.accounting.strategies.kernels import (
    decode_block,
    fill_impulse,
    impulse,
    largest_response,
)
from tests.accounting.strategies.dense import (
    SCALE,
    Floats,
    balls,
    decode_matrix,
    fold,
    noise_of,
)

SIZES = (1, 2, 3, 5, 8, 31, 64, 100)
EVERY: list[Any] = [pytest.param(name, t, id=f"{name}-{t}") for name in STRATEGIES for t in SIZES]


@pytest.mark.parametrize(("name", "triggers"), EVERY)
def test_decoder_inverts_its_own_matrix(name: str, triggers: int) -> None:
    """R A = prefix sums: the released prefix is unbiased, for the encoder that is used."""
    strategy = make_strategy(name, triggers)
    prefixes = np.tril(np.ones((triggers, triggers)))
    assert np.allclose(decode_matrix(strategy) @ strategy.matrix(), prefixes, atol=1e-6)


@pytest.mark.parametrize(("name", "triggers"), EVERY)
def test_figures_are_those_of_the_matrix(name: str, triggers: int) -> None:
    strategy, decoder = make_strategy(name, triggers), decode_matrix(make_strategy(name, triggers))
    dense = strategy.matrix().astype(np.float64)
    assert dense.shape == (int(strategy.nodes_through(triggers)), triggers)
    if strategy.rounds_nodes:
        assert np.array_equal(dense, np.rint(dense))
    column = float((dense**2).sum(axis=0).max())
    assert column <= strategy.col2 <= column * (1 + 1e-9)
    sd = np.sqrt((decoder**2).sum(axis=1))
    assert np.all(sd <= strategy.sd_factors + 1e-7) and np.allclose(sd, strategy.sd_factors)
    assert np.abs(decoder).sum(axis=1).max() <= strategy.reach * (1 + 1e-6)
    gaussian = strategy.rounds_nodes and strategy.law == "gaussian"
    rounded = np.abs(decoder).sum(axis=1) / 2 if gaussian else 0.0
    assert np.all(strategy.rounding >= rounded)
    assert np.all(strategy.rounding <= rounded + strategy.triggers.bit_length() / SCALE + 1e-5)


@pytest.mark.parametrize(
    ("name", "triggers"), [case for case in EVERY if case.values[0] != "geometric"]
)
def test_nodes_complete_in_order(name: str, triggers: int) -> None:
    """A prefix uses complete nodes only, and encoders are lower-triangular in time: without this
    nothing is Gaussian-DP.  Geometric noise does without, at plain epsilon."""
    strategy = make_strategy(name, triggers)
    dense, decoder = strategy.matrix(), decode_matrix(strategy)
    for t in range(1, triggers + 1):
        complete = int(strategy.nodes_through(t))
        assert not dense[:complete, t:].any()
        assert not decoder[t - 1, complete:].any()


@pytest.mark.parametrize(("name", "triggers"), EVERY)
def test_any_pieces_give_the_same_path(name: str, triggers: int) -> None:
    strategy = make_strategy(name, triggers)
    noise = noise_of(strategy, 7, 400.0, triggers)
    prefixes = fold(strategy, noise)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        ends = tuple(sorted(set(rng.integers(1, triggers + 1, 4).tolist()) - {triggers}))
        assert np.array_equal(fold(strategy, noise, ends), prefixes)
    every = fold(strategy, noise, tuple(range(1, triggers)), width=1)
    assert np.array_equal(every, prefixes)


@pytest.mark.parametrize(
    ("name", "triggers", "mean", "final"),
    [
        ("tree", 100, 3.66, 3.33),
        ("tree", 1000, 5.28, 5.52),
        ("blt", 100, 2.34, 2.54),
        ("blt", 1000, 3.05, 3.30),
        ("dense", 100, 2.23, 2.45),
        ("dense", 1000, 2.95, 3.19),
    ],
)
def test_error_figures(name: str, triggers: int, mean: float, final: float) -> None:
    """Mean and final sd of the prefix in units of C L / mu (mechanism.md section 3)."""
    strategy = make_strategy(name, triggers)
    unit = strategy.sd_factors * np.sqrt(strategy.col2)
    assert float(unit.mean()) == pytest.approx(mean, abs=0.006)
    assert float(unit[-1]) == pytest.approx(final, abs=0.006)


def test_names_and_refusals() -> None:
    for name, kind in STRATEGIES.items():
        assert isinstance(make_strategy(name, 3), kind) and kind.name == name
        with pytest.raises(ValueError, match="at least one"):
            kind(0)
    with pytest.raises(ValueError, match="unknown"):
        make_strategy("other", 3)
    with pytest.raises(ValueError, match="fewer"):
        make_strategy("dense", MAX_DENSE_TRIGGERS + 1)
    assert make_strategy("blt", 1 << 20).sd_factors[-1] < 6


#: Strategies with real nodes, whose floats are settled exactly.
REAL = pytest.mark.parametrize("kind", [BltStrategy, DenseStrategy], ids=["blt", "dense"])


@REAL
def test_float_error_is_within_what_fold_assumes(kind: type[BltStrategy | DenseStrategy]) -> None:
    """Every prefix settled exactly equals the one the floats gave, also far along a path."""
    strategy = kind(700)
    noise = noise_of(strategy, 3, 5000.0)
    prefixes = fold(strategy, noise)
    for row, t in itertools.product(range(3), (1, 2, 333, 699, 700)):
        assert strategy.exact(balls(noise[row]), t) == prefixes[row, t - 1]


@REAL
def test_prefixes_that_noise_error_leaves_open_are_reported(
    kind: type[BltStrategy | DenseStrategy],
) -> None:
    """With noise known only to 1e-3 of a lattice step about 2e-3 of all roundings are open."""
    strategy = kind(50)
    noise = noise_of(strategy, 200, 300.0)
    expected, open_rows = fold(strategy, noise), []
    zero, end, out = np.zeros(200, np.int64), np.full(200, 50), np.zeros((200, 50), np.int64)

    def exact(row: int, nodes: int) -> ExactNoise:
        open_rows.append(row)
        return balls(noise[row, :nodes])

    for error, least, most in ((0.0, 0, 0), (1e-3 / SCALE / strategy.reach, 5, 50)):
        stack = np.zeros((200, strategy.state_columns))
        open_rows.clear()
        path = (noise.reshape(-1), np.arange(200) * 50, zero, end, stack, out, exact)
        strategy.fold(Ranges(*path, error))
        assert least <= len(open_rows) <= most
        assert np.array_equal(out, expected)


def random_generators(triggers: int, buffers: int, seed: int = 3) -> Generators:
    rng = np.random.default_rng(seed)
    theta, out, into = (rng.random((triggers, buffers)) for _ in range(3))
    return Generators(theta, out, into, 0.5 + rng.random(triggers))


def by_definition(numbers: Generators) -> np.ndarray:
    size = len(numbers.gain)
    matrix = np.diag(1 / numbers.gain)
    for t in range(size):
        for j in range(t):
            between = np.prod(numbers.theta[j + 1 : t], axis=0)
            matrix[t, j] = numbers.out[t] @ (between * numbers.into[j])
    return matrix


@pytest.mark.parametrize(("triggers", "buffers"), [(1, 1), (2, 3), (9, 2), (30, 4)])
def test_matrix_and_decoder_are_those_of_the_definition(triggers: int, buffers: int) -> None:
    numbers = random_generators(triggers, buffers)
    matrix = by_definition(numbers)
    assert numbers.matrix() == pytest.approx(matrix, rel=1e-12)
    prefixes = np.tril(np.ones((triggers, triggers)))
    decoder = prefixes @ np.linalg.inv(matrix)
    assert numbers.responses().decoder == pytest.approx(decoder, rel=1e-9, abs=1e-9)


def passed(numbers: Generators, z: np.ndarray, at: int = -1, buffer: int = -1) -> np.ndarray:
    """(T, d + 2) w, n and the buffers after each step; 1 is added to w or a buffer after ``at``."""
    held, total, rows = np.zeros(numbers.theta.shape[1]), 0.0, []
    for t, node in enumerate(z):
        w = numbers.gain[t] * (node - numbers.out[t] @ held)
        w += t == at and buffer < 0
        held = numbers.theta[t] * held + numbers.into[t] * w
        held += (t == at) * (np.arange(len(held)) == buffer)
        total += w
        rows.append([w, total, *held])
    return np.array(rows)


def test_responses_bound_what_is_held_and_what_errors_move() -> None:
    numbers = random_generators(12, 3)
    responses, zero = numbers.responses(), np.zeros(12)
    moved = [np.abs(passed(numbers, zero, t)[:, 1]).max() for t in range(12)]
    assert responses.step == pytest.approx(max(moved))
    for k in range(3):
        moved = [np.abs(passed(numbers, zero, t, k)[:, 1]).max() for t in range(12)]
        assert responses.buffers[k] == pytest.approx(max(moved))
    columns = np.abs(np.array([passed(numbers, z) for z in np.eye(12)])).sum(axis=0)
    assert responses.steps == pytest.approx(columns[:, 0].max())
    assert responses.filled == pytest.approx(columns[:, 2:].max(axis=0))


def test_a_prefix_in_balls_is_that_of_rationals() -> None:
    numbers, rng = random_generators(8, 2), np.random.default_rng(5)
    z = rng.normal(0, 900.0, 8)
    held, total = [Fraction(0)] * 2, Fraction(0)
    for t in range(8):
        pairs = zip(numbers.out[t].tolist(), held, strict=True)
        rest = Fraction(z[t].item()) - sum(Fraction(o) * h for o, h in pairs)
        w = Fraction(numbers.gain[t].item()) * rest
        rows = zip(numbers.theta[t].tolist(), numbers.into[t].tolist(), held, strict=True)
        held = [Fraction(a) * h + Fraction(b) * w for a, b, h in rows]
        total += w
        with precision(300):
            ball = numbers.prefix([flint.arb(v) for v in z.tolist()], t + 1)
            exact = flint.arb(flint.fmpq(total.numerator, total.denominator))
            assert ball.overlaps(exact) and float(ball.rad()) < 1e-60


@pytest.mark.parametrize("triggers", [1, 5, 40])
def test_buffered_toeplitz_is_the_case_in_which_nothing_depends_on_the_step(triggers: int) -> None:
    strategy = BltStrategy(triggers)
    assert strategy.generators.matrix() == pytest.approx(strategy.matrix(), rel=1e-12)
    first = strategy.generators.responses().decoder[:, 0]
    assert first == pytest.approx(strategy.decoder, rel=1e-12)
    assert strategy.generators.table.shape == (triggers, 3 * len(strategy.theta) + 1)


class Doubling(Strategy):
    """Each step is a pair of nodes; as little as a strategy may say of itself."""

    name = "doubling"
    col2, sd_factors, rounding, reach = 2.0, np.ones(1), np.ones(1), 1.0
    state_columns = 1

    def matrix(self) -> Float64:
        return np.repeat(np.eye(self.triggers), 2, axis=0)

    def nodes_through(self, step_index: int | Int64) -> Int64:
        return np.asarray(step_index) * 2

    def fold(self, ranges: Ranges) -> None:
        raise AssertionError("no test folds these nodes")


def test_parameters_are_for_those_that_have_some() -> None:
    assert Doubling(2).parameters.size == 0 and Doubling(2, np.zeros(0)).triggers == 2
    with pytest.raises(ValueError, match="no parameters"):
        Doubling(2, np.array([0.5]))


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


LATTICE = 1 << DECODE_BITS


def test_a_response_is_that_of_the_filter() -> None:
    decoder = BltStrategy(300).decoder
    for theta, omega in ((0.5, 0.25), (0.999, 0.01), (0.0, 1.0)):
        expected = np.abs(lfilter([0.0, -omega], [1.0, -theta], decoder)).max()
        assert largest_response(theta, omega, decoder) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("level", [0, 1, 5, 20])
def test_decode_block_rounds_to_nearest(level: int) -> None:
    for total in (0, 1, -1, 12345, -12345, 10**9, -(10**9)):
        assert decode_block(total, level) == round(Fraction(total * LATTICE, 2 ** (level + 1) - 1))


def dense_error(rows: Floats) -> float:
    """tr(M (A^T A)^-1 M^T) times the squared column norm, from the matrix."""
    size = rows.shape[1]
    prefixes = np.tril(np.ones((size, size)))
    inverse = np.linalg.inv(rows.T @ rows)
    return float(np.trace(prefixes @ inverse @ prefixes.T) * np.abs(rows).sum(axis=0).max() ** 2)


def identity_over(extra: Floats) -> Floats:
    """(T + p, T) [I; P] with columns of norm 1."""
    rows = np.concatenate([np.eye(extra.shape[1]), extra])
    return np.asarray(rows / rows.sum(axis=0))


@pytest.mark.parametrize(("rows", "triggers"), [(1, 2), (3, 7), (5, 20)])
def test_formula_is_that_of_the_matrix(rows: int, triggers: int) -> None:
    extra = np.random.default_rng(rows).random((rows, triggers))
    assert squared_error(extra) == pytest.approx(dense_error(identity_over(extra)), rel=1e-9)


def tree(triggers: int, width: int) -> Floats:
    """All nodes of a tree of that arity, each of weight 1."""
    rows, size = [], 1
    while size <= triggers:
        starts = range(0, triggers, size)
        steps = np.arange(triggers)
        rows += [(steps >= s) & (steps < s + size) for s in starts]
        size *= width
    return np.array(rows, np.float64)


@pytest.mark.parametrize("triggers", [8, 16, 30, 100])
def test_no_tree_and_not_the_identity_is_better(triggers: int) -> None:
    error = squared_error(prefix_identity(triggers))
    assert error <= dense_error(np.eye(triggers)) * (1 + 1e-12)
    assert error <= min(dense_error(tree(triggers, width)) for width in range(2, 33))


def test_a_stream_of_more_than_a_thousand_steps_has_mixed_rows() -> None:
    error = squared_error(prefix_identity(1025))
    assert error <= dense_error(tree(1025, 32)) / 2
    assert error <= dense_error(np.eye(1025)) / 10


#: p = 1, T = 3: S, P and W.  Columns of norm 3, 7 and 4, squared norms 5, 25 and 10.
UNEVEN = np.array([1.0, 1, 4, 3, 2, 3, 1, 0.25, 0.5, 0.5])


def test_sensitivity_is_that_of_the_largest_column() -> None:
    strategy = GeometricStrategy(3, UNEVEN)
    columns = strategy.matrix()
    assert np.abs(columns).sum(axis=0).tolist() == [3, 7, 4]
    assert strategy.column1 == 7
    assert 25 <= strategy.col2 <= 25 * (1 + 1e-9)


@pytest.mark.parametrize(("at", "number"), [(1, 0.0), (1, 1.5), (4, -1.0), (4, 2.5)])
def test_rows_that_are_negative_or_not_whole_are_refused(at: int, number: float) -> None:
    broken = UNEVEN.copy()
    broken[at] = number
    with pytest.raises(ValueError, match="rows"):
        GeometricStrategy(3, broken)


def test_rounding_and_sd_of_noise_for_each_step_are_rounded_up() -> None:
    strategy = GeometricStrategy(100, IDENTITY)
    assert (strategy.rounding * (1 << DECODE_BITS) >= 0.5).all()
    exact = np.arange(1, 101)
    assert (strategy.sd_factors**2 >= exact * (1 + 1e-12)).all()


@pytest.mark.parametrize(("before", "up"), [(0, 1), (63, 1), (65, 0), (1 << 18, 0)])
def test_values_next_to_a_tie_move_by_what_the_input_moves(before: int, up: int) -> None:
    """n(z + A v) = n(z) + M v, which the proof of plain epsilon uses, also where floats decide the
    rounding of the left side and fractions that of the right side: 64 steps before a tie."""
    alone = 3 << 26  # 2^-D / 12288 is 64 / alone
    strategy = GeometricStrategy(2, np.array([1.0, alone, alone, 1, 2, 0, 0.5]))
    inputs = np.arange(40)
    noise = np.zeros((40, 3), np.int64)
    noise[:, 0] = (2 * inputs + 1) * (alone // (2 * SCALE)) - before
    small = fold(strategy, noise)
    assert small[:, 0].tolist() == (inputs + up).tolist()
    moved = np.array([1 << 24, 1 << 23])
    large = fold(strategy, noise + strategy.matrix() @ moved)
    assert (large - small == SCALE * np.cumsum(moved)).all()
    # Where the last step alone is read it is rounded by the same fractions.
    last = fold(strategy, noise + strategy.matrix() @ moved, (1,), width=1)
    assert np.array_equal(last, large)
