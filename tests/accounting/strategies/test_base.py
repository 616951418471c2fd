"""What every strategy inherits: a trigger at least, no parameters unless it has some, no state."""

from fractions import Fraction

import flint
import numpy as np
import pytest

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.balls import precision
from dpstream.accounting.strategies.base import Generators, Ranges, Strategy
from dpstream.accounting.strategies.blt import BltStrategy


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


@pytest.mark.parametrize("triggers", [0, -1])
def test_a_strategy_has_a_trigger(triggers: int) -> None:
    with pytest.raises(ValueError, match="at least one trigger"):
        Doubling(triggers)


def test_parameters_are_for_those_that_have_some() -> None:
    assert Doubling(2).parameters.size == 0 and Doubling(2, np.zeros(0)).triggers == 2
    with pytest.raises(ValueError, match="no parameters"):
        Doubling(2, np.array([0.5]))


def test_a_strategy_that_leaves_something_out_is_none() -> None:
    class Silent(Strategy):
        name = "silent"

    with pytest.raises(TypeError, match="abstract"):
        Silent(1)  # type: ignore[abstract]


def test_kernels_get_the_arrays_of_ranges_in_their_order() -> None:
    flat, starts, begin, end, stack, out = (np.full(2, i) for i in range(6))
    ranges = Ranges(flat, starts, begin, end, stack, out, exact=lambda row, nodes: lambda bits: [])
    assert [a[0] for a in ranges.arrays] == [0, 1, 2, 3, 4, 5] and ranges.noise_error == 0.0
