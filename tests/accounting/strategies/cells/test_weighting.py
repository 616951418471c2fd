"""Program 1 against a general solver."""

import numpy as np
import pytest
from scipy.optimize import minimize

from dpstream.accounting.strategies.cells.eigen import spectrum
from dpstream.accounting.strategies.cells.weighting import Columns, Vectors, weigh
from dpstream.accounting.workloads.workload import over
from tests.accounting.strategies.cells.shapes import small
from tests.bench.paper.fewer_weights import Sines


@pytest.mark.parametrize("size", [1, 2, 7, 16, 33])
def test_sines_are_the_eigenvectors_of_all_ranges(size: int) -> None:
    basis, gram = Sines(size), over([size], ["range"]).gram()
    j = np.arange(1, size + 1)
    q = np.sqrt(2 / (size + 1)) * np.sin(np.pi * np.outer(j, j) / (size + 1))
    np.testing.assert_allclose(q @ gram @ q, np.diag(basis.eigenvalues()), atol=1e-8)
    u = np.random.default_rng(0).random(size)
    np.testing.assert_allclose(basis.norms(u), q**2 @ u, atol=1e-12)
    np.testing.assert_allclose(basis.spread(u), (q**2).T @ u, atol=1e-12)
    np.testing.assert_allclose(basis.squares(slice(None)), q**2, atol=1e-12)


@pytest.mark.parametrize("name", ["example", "odd ranges", "range marginals", "prefixes"])
def test_vectors_of_blocks(name: str) -> None:
    eigensystem = spectrum(small()[name])
    basis = Vectors(eigensystem.folding, eigensystem.vectors)
    b = basis.squares(slice(None))
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
    b = basis.squares(slice(None))
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
