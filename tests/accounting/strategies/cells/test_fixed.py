"""Strategies to compare with: their matrices and published figures."""

import math

import numpy as np
import pytest

from dpstream.accounting.strategies.cells import fixed
from dpstream.accounting.strategies.cells.eigen import spectrum
from dpstream.accounting.workloads.workload import marginals, of_matrix, over
from tests.accounting.strategies.cells.shapes import EXAMPLE4, attributes, rows, small


def test_example_4() -> None:
    workload = of_matrix(EXAMPLE4)
    bound = spectrum(workload).bound
    errors = [fixed.gaussian_error(workload), fixed.identity(workload).error(workload),
              fixed.haar(workload).error(workload)]  # fmt: skip
    assert errors == pytest.approx([40, 36, 21])
    ratios = [math.sqrt(error / bound) for error in errors]
    assert ratios == pytest.approx([1.6366, 1.5527, 1.1859], abs=6e-5)


def test_haar_of_eight_cells_is_the_papers() -> None:
    assert fixed.wavelet(8).tolist() == [
        [1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, -1, -1, -1, -1], [1, 1, -1, -1, 0, 0, 0, 0],
        [0, 0, 0, 0, 1, 1, -1, -1], [1, -1, 0, 0, 0, 0, 0, 0], [0, 0, 1, -1, 0, 0, 0, 0],
        [0, 0, 0, 0, 1, -1, 0, 0], [0, 0, 0, 0, 0, 0, 1, -1],
    ]  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 5, 8, 13])
def test_trees_of_any_size(size) -> None:
    assert np.linalg.matrix_rank(fixed.wavelet(size)) == size
    sums = fixed.tree(size)
    assert sums[0].all() and (sums.sum(1) == 1).sum() == size
    assert sums.sum(0).max() <= math.ceil(math.log2(max(size, 1))) + 1


@pytest.mark.parametrize("name", small())
def test_identity_and_the_workload_itself(name) -> None:
    workload = small()[name]
    queries = rows(workload)
    assert fixed.identity(workload).error(workload) == pytest.approx((queries**2).sum())
    variances = np.concatenate(fixed.identity(workload).variances(workload))
    np.testing.assert_allclose(variances, (queries**2).sum(1))
    gram = queries.T @ queries
    rank = np.linalg.matrix_rank(gram)
    assert fixed.itself(workload).error(workload) == pytest.approx(np.diag(gram).max() * rank)
    assert fixed.gaussian_error(workload) == pytest.approx(np.diag(gram).max() * len(queries))


def test_fourier_and_data_cube() -> None:
    workload = marginals(attributes(8, 16, 16), [2])
    bound = spectrum(workload).bound
    # All three tables, as they are; and the characters that they need.
    assert fixed.datacube(workload).sensitivity2 == pytest.approx(3)
    assert fixed.datacube(workload).error(workload) == pytest.approx(1.0217**2 * bound, rel=2e-3)
    assert math.isfinite(fixed.fourier(workload).error(workload))
    # One table of few cells answers both of its margins.
    small_tables = marginals(attributes(2, 2), [1])
    assert fixed.datacube(small_tables).gram.trace(over([2, 2], ["identity"] * 2)) == math.inf
    assert fixed.datacube(marginals(attributes(2, 2), [1, 2])).sensitivity2 == pytest.approx(1)
