"""Residual tables in whole numbers, against fractions and dense matrices."""

from fractions import Fraction

import numpy as np
import pytest

from dpstream.accounting.arrays import kron
from dpstream.accounting.strategies.cells.bases import Even, cost2, reduced, restored
from dpstream.accounting.strategies.cells.differences import column_norm2, matrix, root


@pytest.mark.parametrize("sizes", [(), (5,), (2, 3), (4, 1), (3, 4, 5)])
def test_differences_are_those_of_the_matrix_and_come_back(sizes: tuple[int, ...]) -> None:
    table = np.random.default_rng(1).integers(0, 10**9, sizes)
    bases = [Even(n) for n in sizes]
    measured = reduced(table, bases)
    sub = kron([matrix(n) for n in sizes]) if sizes else np.ones((1, 1))
    assert measured.dtype == np.int64 and np.array_equal(measured.ravel(), sub @ table.ravel())
    centred = kron([np.eye(n) - 1 / n for n in sizes]) if sizes else np.ones((1, 1))
    back = restored(measured.astype(np.float64), bases)
    assert back.shape == table.shape and np.allclose(back.ravel(), centred @ table.ravel())


def exact_norm2(size: int) -> Fraction:
    """max_c |L^-1 Sub e_c|^2 of the very floats of L."""
    lower = [[Fraction(x) for x in row] for row in root(size).tolist()]
    longest = Fraction(0)
    for column in matrix(size).T.tolist():
        solved: list[Fraction] = []
        for i, row in enumerate(lower):
            rest = Fraction(column[i]) - sum((row[j] * solved[j] for j in range(i)), Fraction(0))
            solved.append(rest / row[i])
        longest = max(longest, sum((x * x for x in solved), Fraction(0)))
    return longest


@pytest.mark.parametrize("size", [2, 3, 7, 16])
def test_sensitivity_is_bounded_from_above_and_closely(size: int) -> None:
    exact = exact_norm2(size)
    assert exact <= Fraction(column_norm2(size)) <= exact * (1 + Fraction(1, 10**11))
    assert column_norm2(size) == pytest.approx(1 - 1 / size, rel=1e-11)
    assert np.allclose(root(size) @ root(size).T, matrix(size) @ matrix(size).T)


def test_costs_multiply() -> None:
    assert cost2([]) == 1
    assert (
        cost2([Even(3), Even(4)]) == pytest.approx(2 / 3 * 3 / 4)
        and cost2([Even(3), Even(4)]) >= 0.5
    )
    assert column_norm2(500) == pytest.approx(1 - 1 / 500, rel=1e-8)
