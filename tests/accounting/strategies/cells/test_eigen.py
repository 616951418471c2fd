"""The eigen-design, its completion and its cheaper variants."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from dpstream.accounting.arrays import Float64
from dpstream.accounting.strategies.cells.eigen import (
    completed,
    designed,
    eigen,
    root,
    spectrum,
)
from dpstream.accounting.strategies.cells.strategy import Blocks, dense_gram
from dpstream.accounting.strategies.cells.weighting import Vectors, Weights, weigh
from dpstream.accounting.workloads.workload import of_matrix, over
from tests.accounting.strategies.cells.shapes import EXAMPLE4, rows, singular_bound, small
from tests.bench.paper.fewer_weights import principal, separation


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
