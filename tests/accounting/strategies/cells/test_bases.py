"""Bases of attributes against fractions and dense matrices."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from dpstream.accounting.arrays import Float64, kron
from dpstream.accounting.errors import InvariantError
from dpstream.accounting.strategies.cells.bases import (
    Basis,
    Even,
    Fitted,
    bits_of,
    cost2,
    difference_matrix,
    difference_norm2,
    difference_root,
    fitted,
    reduced,
    restored,
    table_bits,
)
from dpstream.accounting.workloads.attributes import explicit, interval


@pytest.mark.parametrize("sizes", [(), (5,), (2, 3), (4, 1), (3, 4, 5)])
def test_differences_are_those_of_the_matrix_and_come_back(sizes: tuple[int, ...]) -> None:
    table = np.random.default_rng(1).integers(0, 10**9, sizes)
    bases = [Even(n) for n in sizes]
    measured = reduced(table, bases)
    sub = kron([difference_matrix(n) for n in sizes]) if sizes else np.ones((1, 1))
    assert measured.dtype == np.int64 and np.array_equal(measured.ravel(), sub @ table.ravel())
    centred = kron([np.eye(n) - 1 / n for n in sizes]) if sizes else np.ones((1, 1))
    back = restored(measured.astype(np.float64), bases)
    assert back.shape == table.shape and np.allclose(back.ravel(), centred @ table.ravel())


def exact_difference_norm2(size: int) -> Fraction:
    """max_c |L^-1 Sub e_c|^2 of the very floats of L."""
    lower = [[Fraction(x) for x in row] for row in difference_root(size).tolist()]
    longest = Fraction(0)
    for column in difference_matrix(size).T.tolist():
        solved: list[Fraction] = []
        for i, row in enumerate(lower):
            rest = Fraction(column[i]) - sum((row[j] * solved[j] for j in range(i)), Fraction(0))
            solved.append(rest / row[i])
        longest = max(longest, sum((x * x for x in solved), Fraction(0)))
    return longest


@pytest.mark.parametrize("size", [2, 3, 7, 16])
def test_sensitivity_of_differences_is_bounded_from_above_and_closely(size: int) -> None:
    exact = exact_difference_norm2(size)
    assert exact <= Fraction(difference_norm2(size)) <= exact * (1 + Fraction(1, 10**11))
    assert difference_norm2(size) == pytest.approx(1 - 1 / size, rel=1e-11)
    assert np.allclose(
        difference_root(size) @ difference_root(size).T,
        difference_matrix(size) @ difference_matrix(size).T,
    )


def test_costs_multiply() -> None:
    assert cost2([]) == 1
    assert (
        cost2([Even(3), Even(4)]) == pytest.approx(2 / 3 * 3 / 4)
        and cost2([Even(3), Even(4)]) >= 0.5
    )
    assert difference_norm2(500) == pytest.approx(1 - 1 / 500, rel=1e-8)


def strategy(size: int, seed: int = 0) -> Float64:
    """A positive definite matrix of unit diagonal."""
    rows = np.random.default_rng(seed).normal(size=(2 * size, size)) + 1.0
    measured = rows.T @ rows
    return np.asarray(measured / np.sqrt(np.outer(np.diag(measured), np.diag(measured))))


def moves(basis: Basis) -> list[list[Fraction]]:
    """Rows of M."""
    columns = [basis.reduced(cell, 0).tolist() for cell in np.eye(basis.size, dtype=np.int64)]
    return [[Fraction(c[k], 1 << basis.bits) for c in columns] for k in range(basis.size - 1)]


def exact_norm2(basis: Basis) -> Fraction:
    """max_c |L^-1 M e_c|^2 of the very floats of L."""
    lower = [[Fraction(x) for x in row] for row in basis.root.tolist()]
    longest = Fraction(0)
    for column in zip(*moves(basis), strict=True):
        solved: list[Fraction] = []
        for i, row in enumerate(lower):
            rest = column[i] - sum((row[j] * solved[j] for j in range(i)), Fraction(0))
            solved.append(rest / row[i])
        longest = max(longest, sum((x * x for x in solved), Fraction(0)))
    return longest


BASES = [
    Even(4), Even(2), fitted(strategy(2), 12), fitted(strategy(5), 12), fitted(strategy(7, 1), 3),
]  # fmt: skip


@pytest.mark.parametrize("basis", BASES)
def test_a_table_is_its_total_spread_and_what_is_measured(basis: Basis) -> None:
    table = np.random.default_rng(2).integers(0, 10**6, (3, basis.size))
    measured = basis.reduced(table, 1)
    assert measured.dtype == np.int64 and measured.shape == (3, basis.size - 1)
    back = basis.restored(measured.astype(np.float64) * 2.0**-basis.bits, 1)
    assert np.allclose(back + table.sum(1)[:, None] * basis.spread, table)
    assert basis.spread.sum() == pytest.approx(1, abs=1e-15)


@pytest.mark.parametrize("basis", BASES)
def test_queries_are_unbiased_and_have_their_variance(basis: Basis) -> None:
    """Of w x = (w g) total + u M x, u found by solving for it."""
    n, rng = basis.size, np.random.default_rng(3)
    matrix = np.array([[float(x) for x in row] for row in moves(basis)])
    for factor in (
        interval("range", n),
        interval("prefix", n),
        explicit(rng.normal(size=(4, n)), n),
    ):
        queries = factor.dense()
        along = queries @ basis.spread
        u, *_ = np.linalg.lstsq(matrix.T, (queries - along[:, None]).T, rcond=None)
        assert np.allclose(u.T @ matrix + along[:, None], queries)
        variances = ((u.T @ basis.root) ** 2).sum(1)
        assert np.allclose(basis.rest(factor), variances)
        assert np.allclose(basis.along(factor), along**2)
        assert basis.masses(factor) == pytest.approx(((along**2).sum(), variances.sum()))


def test_a_fitted_basis_is_what_a_strategy_measures_beside_the_total() -> None:
    matrix = strategy(6)
    basis = fitted(matrix, 14)
    inverse = np.linalg.inv(matrix)
    total = 1 / inverse.sum()
    assert np.allclose(basis.spread, total * inverse.sum(0), atol=2**-13)
    factor = interval("range", 6)
    both = np.array([w @ inverse @ w for w in factor.dense()])
    assert np.allclose(basis.rest(factor) + basis.along(factor) / total, both, rtol=1e-3)
    assert basis.norm2 == pytest.approx(1 - total, rel=1e-3)


@pytest.mark.parametrize("basis", BASES)
def test_sensitivity_is_bounded_from_above_and_closely(basis: Basis) -> None:
    exact = exact_norm2(basis)
    assert exact <= Fraction(basis.norm2) <= exact * (1 + Fraction(1, 10**9))


def test_less_noise_than_was_measured_is_seen() -> None:
    """A basis that is fitted well but for a hair of its noise."""
    basis = fitted(strategy(5), 12)
    less = Fitted(basis.shares, basis.bits, basis.lower * (1 - 2.0**-30))
    assert exact_norm2(less) > Fraction(basis.norm2)
    # The sensitivity of X less its total is not that of what is measured with g in whole units.
    coarse = fitted(strategy(5), 2)
    total = 1 / np.linalg.inv(strategy(5)).sum()
    assert abs(float(exact_norm2(coarse)) - (1 - total)) > 1e-3


@pytest.mark.parametrize("seed", range(6))
def test_sensitivity_is_bounded_where_its_floats_cancel(seed: int) -> None:
    """(a c / 3 - b) / d in the longest column of L^-1, a c / 3 and b far larger than their rest."""
    a, c = np.random.default_rng(seed).uniform(1, 2, 2) * (1e5, 1)
    lower = np.array([[1.0, 0.0, 0.0], [a, 3.0, 0.0], [a * c / 3 - 20.0, c, 1e-5]])
    basis = Fitted(np.array([3, 1, 2, 2]), 3, lower)
    assert exact_norm2(basis) <= Fraction(basis.norm2) <= exact_norm2(basis) * 2


NEARLY_SINGULAR = np.array([[1.0, 0.0], [1e9, 1e-9]])


@pytest.mark.parametrize(
    "lower", [np.diag([1.0, 0.0]), np.diag([1.0, np.nan]), NEARLY_SINGULAR], ids=str
)
def test_noise_that_misses_a_direction_is_refused(lower: Float64) -> None:
    """Also where floats do not show that it has all of them."""
    with pytest.raises(InvariantError):
        Fitted(np.array([1, 1, 2]), 2, lower).norm2  # noqa: B018


def test_the_cost_of_a_table_is_rounded_up() -> None:
    for bases in itertools.product(BASES, repeat=3):
        exact = math.prod(Fraction(basis.norm2) for basis in bases)
        assert exact <= Fraction(cost2(bases)) <= exact * (1 + Fraction(1, 10**12))


def test_each_number_of_a_basis_names_its_noise() -> None:
    """Another split of a total, or another covariance, is other noise."""
    lower = np.array([[1.0, 0.0], [0.25, 2.0]])
    bases = [
        Fitted(np.array([1, 1, 2]), 2, lower),
        Fitted(np.array([1, 2, 1]), 2, lower),
        Fitted(np.array([2, 2, 4]), 3, lower),
        Fitted(np.array([1, 1, 2]), 2, lower * (1 + 2.0**-52)),
    ]
    assert len({basis.canonical() for basis in bases}) == len(bases)


def test_products() -> None:
    bases = [Even(3), fitted(strategy(4), 5)]
    table = np.random.default_rng(5).integers(0, 99, (3, 4))
    measured = reduced(table, bases)
    matrix = np.kron(*(np.array(moves(b), np.float64) for b in bases))
    assert np.array_equal(measured.ravel() / 2.0 ** table_bits(bases), matrix @ table.ravel())
    back = restored(measured / 2.0 ** table_bits(bases), bases)
    centred = [np.eye(b.size) - np.outer(b.spread, np.ones(b.size)) for b in bases]
    assert np.allclose(back.ravel(), np.kron(*centred) @ table.ravel())
    assert cost2(bases) == pytest.approx(bases[0].norm2 * bases[1].norm2) and cost2([]) == 1
    assert [bits_of(way) for way in (0, 1, 2, 3, 24)] == [14, 14, 12, 8, 1]
    assert len({basis.canonical() for basis in BASES}) == len(BASES)
