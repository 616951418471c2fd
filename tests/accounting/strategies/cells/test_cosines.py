"""Cosines are eigenvectors of tables of counts, spread over all cells."""

import math

import numpy as np
import pytest

from dpstream.accounting.arrays import Float64
from dpstream.accounting.strategies.cells.eigen import Vectors, of_tables, spectrum, weigh
from dpstream.accounting.strategies.cells.folding import folding_of
from dpstream.accounting.workloads.workload import Workload, marginals, over
from tests.accounting.strategies.cells.shapes import attributes
from tests.bench.paper.fewer_weights import separation

TABLES = {
    "2-way": marginals(attributes(4, 3, 6), [2]),
    "1- and 3-way": marginals(attributes(5, 1, 2), [1, 3]),
    "one table": over([4, 5], ["identity", "total"]),
    "one axis": over([7], ["identity"]),
}


@pytest.mark.parametrize("name", TABLES)
def test_they_diagonalise_every_block(name: str) -> None:
    workload = TABLES[name]
    folding = folding_of(workload)
    grams = folding.grams(workload)
    for gram, values, vectors in zip(grams, *of_tables(workload, folding), strict=True):
        size = len(values)
        np.testing.assert_allclose(vectors.T @ vectors, np.eye(size), atol=1e-12)
        np.testing.assert_allclose((vectors * values) @ vectors.T, gram, atol=1e-9)
        assert (values > 0).all() and np.linalg.matrix_rank(gram) == size


def test_weights_of_tables_count() -> None:
    plain = marginals(attributes(4, 3), [1, 2])
    products = tuple(p._replace(weight=1.0 + len(p.axes)) for p in plain.products)
    weighted = Workload(plain.attributes, products)
    eigenvalues = np.sort(spectrum(weighted).values)
    np.testing.assert_allclose(eigenvalues, np.linalg.eigvalsh(weighted.gram()), atol=1e-9)


def test_mirrors_stand_side_by_side_and_are_flat_together() -> None:
    workload = over([16], ["identity"])
    _, blocks = of_tables(workload, folding_of(workload))
    for first, vectors in zip((1, 0), blocks, strict=True):  # the constant one has no mirror
        squares = vectors[:, first : first + 6] ** 2
        assert np.ptp(squares[:, ::2] + squares[:, 1::2]) < 1e-12 < np.ptp(squares)


def decomposed(workload: Workload) -> tuple[Vectors, Float64]:
    """The same eigenvalues with whatever vectors a decomposition gives."""
    folding = folding_of(workload)
    parts = [np.linalg.eigh(gram) for gram in folding.grams(workload)]
    nonzero = [values > 1e-9 for values, _ in parts]
    vectors = [v[:, k] for (_, v), k in zip(parts, nonzero, strict=True)]
    values = [c[k] for (c, _), k in zip(parts, nonzero, strict=True)]
    return Vectors(folding, vectors), np.concatenate(values)


def test_less_is_lost_by_groups() -> None:
    workload = marginals(attributes(8, 8, 16), [2])
    eigensystem = spectrum(workload)
    losses = [
        math.sqrt(separation(basis, c, 16).error / weigh(basis, c, 1e-4).error) - 1
        for basis, c in (
            (Vectors(eigensystem.folding, eigensystem.vectors), eigensystem.values),
            decomposed(workload),
        )
    ]
    assert losses[0] < 0.04 and losses[0] < 0.6 * losses[1]
