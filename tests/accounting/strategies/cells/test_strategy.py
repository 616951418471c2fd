"""Gram matrices in their forms against dense ones."""

import math
from fractions import Fraction

import numpy as np
import pytest

from dpstream.accounting.arrays import Float64, kron
from dpstream.accounting.strategies.cells.folding import folding_of
from dpstream.accounting.strategies.cells.strategy import (
    Blocks,
    CellStrategy,
    Kron,
    dense_gram,
    identity,
    pseudo_inverse,
    trace_of,
    tree,
    wavelet,
)
from dpstream.accounting.workloads.workload import over
from tests.accounting.strategies.cells.shapes import rows, small


def positive(n: int, seed: int = 0) -> Float64:
    root = np.random.default_rng(seed).normal(size=(n, n))
    return root @ root.T + 0.1 * np.eye(n)


def test_traces_of_regular_and_singular_blocks() -> None:
    v, x = positive(6, 1), positive(6, 2)
    assert trace_of(v, x, 1.0, 1.0) == pytest.approx(np.trace(v @ np.linalg.inv(x)))
    part = np.random.default_rng(3).normal(size=(6, 2))
    thin = part @ part.T
    assert trace_of(thin, thin, 1.0, 1.0) == pytest.approx(2)
    assert trace_of(v, thin, 1.0, 1.0) == math.inf
    assert trace_of(np.zeros((6, 6)), thin, 1.0, 1.0) == 0
    # Beside large blocks one of rounding errors is nothing.
    assert trace_of(np.zeros((2, 2)) + 1e-17, np.eye(2) * 1e-16, 1.0, 1.0) == 0
    assert not pseudo_inverse(np.eye(2) * 1e-16, 1.0).any()
    np.testing.assert_allclose(pseudo_inverse(thin, 1.0), np.linalg.pinv(thin), atol=1e-9)


@pytest.mark.parametrize("name", small())
def test_a_matrix_of_all_cells(name: str) -> None:
    workload = small()[name]
    matrix, queries = positive(workload.cells), rows(workload)
    gram = dense_gram(matrix, workload.sizes)
    inverse = np.linalg.inv(matrix)
    assert gram.trace(workload) == pytest.approx(np.trace(queries @ inverse @ queries.T))
    variances = np.concatenate(gram.variances(workload))
    np.testing.assert_allclose(variances, np.diag(queries @ inverse @ queries.T), rtol=1e-8)


def test_folded_blocks_answer_what_is_not_folded() -> None:
    ranges, prefixes = over([6], ["range"]), over([6], ["prefix"])
    folding = folding_of(ranges)
    folded = Blocks(folding, tuple(folding.grams(ranges)))
    dense = dense_gram(ranges.gram())
    assert folded.trace(prefixes) == pytest.approx(dense.trace(prefixes))
    np.testing.assert_allclose(folded.covariance, np.linalg.inv(ranges.gram()), atol=1e-9)
    np.testing.assert_allclose(folded.variances(prefixes)[0], dense.variances(prefixes)[0])


@pytest.mark.parametrize("name", ["a product", "with a total", "tables", "range marginals"])
def test_products_of_matrices(name: str) -> None:
    workload = small()[name]
    factors = tuple(dense_gram(positive(n, n)) for n in workload.sizes)
    matrix = kron([factor.dense() for factor in factors])
    product, dense = Kron(factors), dense_gram(matrix, workload.sizes)
    assert product.trace(workload) == pytest.approx(dense.trace(workload))
    for a, b in zip(product.variances(workload), dense.variances(workload), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-8)
    exact = Fraction(1)
    for factor in factors:
        exact *= max(map(Fraction, np.diag(factor.dense()).tolist()))
    assert exact <= Fraction(product.sensitivity2) <= exact * Fraction(1 + 1e-10)


def test_noise_grows_with_the_sensitivity() -> None:
    workload = over([4], ["range"])
    one, three = (CellStrategy("x", dense_gram(k * positive(4))) for k in (1, 3))
    assert one.error(workload) == pytest.approx(three.error(workload))
    assert three.sensitivity2 == pytest.approx(3 * one.sensitivity2)
    assert one.error(workload) / workload.weight * 10 == pytest.approx(
        sum(one.variances(workload)[0])
    )


def test_haar_of_eight_cells_is_the_papers() -> None:
    assert wavelet(8).tolist() == [
        [1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, -1, -1, -1, -1], [1, 1, -1, -1, 0, 0, 0, 0],
        [0, 0, 0, 0, 1, 1, -1, -1], [1, -1, 0, 0, 0, 0, 0, 0], [0, 0, 1, -1, 0, 0, 0, 0],
        [0, 0, 0, 0, 1, -1, 0, 0], [0, 0, 0, 0, 0, 0, 1, -1],
    ]  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 5, 8, 13])
def test_trees_of_any_size(size: int) -> None:
    assert np.linalg.matrix_rank(wavelet(size)) == size
    sums = tree(size)
    assert sums[0].all() and (sums.sum(1) == 1).sum() == size
    assert sums.sum(0).max() <= math.ceil(math.log2(max(size, 1))) + 1


@pytest.mark.parametrize("name", small())
def test_identity(name: str) -> None:
    workload = small()[name]
    queries = rows(workload)
    assert identity(workload).error(workload) == pytest.approx((queries**2).sum())
    variances = np.concatenate(identity(workload).variances(workload))
    np.testing.assert_allclose(variances, (queries**2).sum(1))
