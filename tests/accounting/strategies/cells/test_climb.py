"""The climb reaches the optimum, and each gap on its way is true."""

import itertools
from collections.abc import Callable, Iterable

import numpy as np
import pytest

from dpstream.accounting.arrays import Float64
from dpstream.accounting.strategies.cells.climb import Point, Slopes, climb


def diagonal(v: Float64) -> Callable[[Float64], Slopes]:
    """F = sum of sqrt(v m), highest at m ~ v, where it is the root of the sum of v."""

    def dual(m: Float64) -> Slopes:
        roots = np.sqrt(v * m)
        return Slopes(float(roots.sum()), (roots / m,))

    return dual


def last(points: Iterable[Point]) -> Point:
    *_, point = points
    return point


@pytest.mark.parametrize("memory", [0, 20])
def test_a_diagonal_problem_takes_one_step(memory: int) -> None:
    v = np.array([1.0, 4.0, 9.0, 0.1])
    first, second, *_ = climb(diagonal(v), [np.ones(4)], memory=memory)
    assert first.slopes.gap > 0.1
    np.testing.assert_allclose(second.weights[0], v / v.sum(), rtol=1e-9)
    assert abs(second.slopes.gap) < 1e-9


@pytest.mark.parametrize("seed", range(3))
def test_values_rise_and_every_gap_is_true(seed: int) -> None:
    squares = np.random.default_rng(seed).normal(size=(30, 12)) ** 2

    def dual(m: Float64) -> Slopes:
        below = np.sqrt(squares.T @ m)
        return Slopes(float(below.sum()), (squares @ (1 / below),))

    points = list(climb(dual, [np.ones(30)], 300))
    values = [point.slopes.value for point in points]
    assert all(b > a for a, b in itertools.pairwise(values))
    assert points[-1].slopes.gap < 1e-6
    for point in points:
        assert point.weights[0].sum() == pytest.approx(1)
        assert float(point.weights[0] @ point.slopes.slopes[0]) == pytest.approx(point.slopes.value)
        # What the gap promises: no point has more than F sqrt(1 + gap).
        assert values[-1] ** 2 <= point.slopes.value**2 * (1 + point.slopes.gap) * (1 + 1e-12)


def test_two_simplices() -> None:
    table = np.random.default_rng(0).random((4, 5)) + 0.1

    def dual(m: Float64, p: Float64) -> Slopes:
        inner = m[:, None] * table * p
        roots = np.sqrt(inner.sum())
        return Slopes(float(roots), (table @ p / roots, m @ table / roots))

    point = last(climb(dual, [np.ones(4), np.ones(5)], 300))
    assert point.slopes.value**2 <= table.max()
    assert [w.sum() for w in point.weights] == pytest.approx([1, 1])
