"""The eigen-design, its completion and its cheaper variants."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy.optimize import minimize

from dpstream.accounting.arrays import Float64
from dpstream.accounting.strategies.cells.eigen import (
    Vectors,
    Weights,
    completed,
    designed,
    eigen,
    root,
    spectrum,
    weigh,
)
from dpstream.accounting.strategies.cells.strategy import Blocks, dense_gram
from dpstream.accounting.workloads.workload import of_matrix, over
from tests.accounting.strategies.cells.shapes import EXAMPLE4, rows, singular_bound, small
from tests.bench.paper.fewer_weights import Columns, Sines, principal, separation, squares


@pytest.mark.parametrize("size", [1, 2, 7, 16, 33])
def test_sines_are_the_eigenvectors_of_all_ranges(size: int) -> None:
    basis, gram = Sines(size), over([size], ["range"]).gram()
    j = np.arange(1, size + 1)
    q = np.sqrt(2 / (size + 1)) * np.sin(np.pi * np.outer(j, j) / (size + 1))
    np.testing.assert_allclose(q @ gram @ q, np.diag(basis.eigenvalues()), atol=1e-8)
    u = np.random.default_rng(0).random(size)
    np.testing.assert_allclose(basis.norms(u), q**2 @ u, atol=1e-12)
    np.testing.assert_allclose(basis.spread(u), (q**2).T @ u, atol=1e-12)
    np.testing.assert_allclose(squares(basis), q**2, atol=1e-12)


@pytest.mark.parametrize("name", ["example", "odd ranges", "range marginals", "prefixes"])
def test_vectors_of_blocks(name: str) -> None:
    eigensystem = spectrum(small()[name])
    basis = Vectors(eigensystem.folding, eigensystem.vectors)
    b = squares(basis)
    u = np.random.default_rng(0).random(basis.vectors)
    nu = np.random.default_rng(1).random(basis.cells)
    np.testing.assert_allclose(basis.norms(u), b @ u)
    np.testing.assert_allclose(basis.spread(nu), b.T @ nu)
    # Each vector has norm 1 over all cells.
    np.testing.assert_allclose(eigensystem.folding.counts @ b, 1.0)


@pytest.mark.parametrize("name", ["example", "ranges", "prefixes", "range marginals", "predicates"])
def test_program_1_against_a_general_solver(name: str) -> None:
    eigensystem = spectrum(small()[name])
    basis, c = Vectors(eigensystem.folding, eigensystem.vectors), eigensystem.values
    solved = weigh(basis, c, 1e-7)
    assert basis.norms(solved.u).max() == pytest.approx(1) and solved.gap <= 1e-7
    assert (c / solved.u).sum() == pytest.approx(solved.error)
    b = squares(basis)
    other = minimize(
        lambda u: (c / u).sum(),
        np.full(len(c), 0.3),
        jac=lambda u: -c / u**2,
        method="SLSQP",
        bounds=[(1e-4, 2)] * len(c),
        constraints={"type": "ineq", "fun": lambda u: 1 - b @ u, "jac": lambda u: -b},
        options={"maxiter": 500, "ftol": 1e-12},
    )
    assert solved.error <= other.fun * (1 + 1e-6) and other.fun >= solved.bound * (1 - 1e-4)


def test_queries_without_a_share_get_no_weight() -> None:
    solved = weigh(Columns(np.eye(3)), np.array([1.0, 0.0, 4.0]))
    assert solved.u[1] == 0 and solved.error == pytest.approx(5)
    # A bound that the dual does not prove would be caught here: each column alone can be 1.
    assert solved.bound <= 5 * (1 + 1e-12)


@pytest.mark.parametrize("name", small())
def test_the_bound_is_the_singular_values(name: str) -> None:
    workload = small()[name]
    assert spectrum(workload).bound == pytest.approx(singular_bound(rows(workload)))


@pytest.mark.parametrize("name", small())
def test_completion_raises_no_sensitivity_and_no_error(name: str) -> None:
    workload = small()[name]
    eigensystem = spectrum(workload)
    solved = weigh(Vectors(eigensystem.folding, eigensystem.vectors), eigensystem.values)
    done = designed(eigensystem, solved.u)
    assert done.sensitivity2 == pytest.approx(1)
    np.testing.assert_allclose(done.diagonal, done.diagonal[0])
    assert done.trace(workload) <= solved.error * (1 + 1e-9)


def test_completion_is_counted_in_the_sensitivity() -> None:
    bare = dense_gram(np.diag([1.0, 0.25]))
    done = completed(bare, ridge=0.5)
    assert done.sensitivity2 >= np.diag(done.dense()).max() == 1.5
    assert np.diag(completed(bare).dense()).tolist() == [1, 1]


def test_example_4() -> None:
    eigensystem = spectrum(of_matrix(EXAMPLE4))
    assert eigensystem.bound == pytest.approx(14.933, abs=5e-4)
    ratio = math.sqrt(eigen(eigensystem).error(of_matrix(EXAMPLE4)) / eigensystem.bound)
    assert 1.0 <= ratio <= 1.0180


def test_the_order_of_cells_does_not_matter() -> None:
    matrix = np.random.default_rng(0).integers(0, 2, (9, 7)) + 0.0
    order = np.random.default_rng(1).permutation(7)
    errors = [
        eigen(spectrum(w), 1e-6).error(w) for w in (of_matrix(matrix), of_matrix(matrix[:, order]))
    ]
    assert errors[0] == pytest.approx(errors[1], rel=1e-9)


@pytest.mark.parametrize(
    "make", [lambda b, c: separation(b, c, 4), lambda b, c: principal(b, c, 3)]
)
def test_fewer_weights_are_feasible_and_little_worse(
    make: Callable[[Vectors, Float64], Weights],
) -> None:
    eigensystem = spectrum(over([32], ["range"]))
    basis = Vectors(eigensystem.folding, eigensystem.vectors)
    best, fewer = weigh(basis, eigensystem.values, 1e-5), make(basis, eigensystem.values)
    assert basis.norms(fewer.u).max() <= 1 + 1e-12 and (fewer.u > 0).all()
    assert best.bound <= fewer.error <= 1.25 * best.error


def test_roots_of_the_eigenvalues() -> None:
    workload = over([16], ["prefix"])
    gram = root(spectrum(workload)).gram
    assert isinstance(gram, Blocks)
    values, vectors = np.linalg.eigh(workload.gram())
    plain = (vectors * np.sqrt(values)) @ vectors.T
    off = gram.dense() - plain
    np.testing.assert_allclose(off, np.diag(np.diag(off)), atol=1e-9)
