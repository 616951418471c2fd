"""The identity and the trees of an axis: their matrices."""

import math

import numpy as np
import pytest

from dpstream.accounting.strategies.cells import fixed
from tests.accounting.strategies.cells.shapes import rows, small


def test_haar_of_eight_cells_is_the_papers() -> None:
    assert fixed.wavelet(8).tolist() == [
        [1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, -1, -1, -1, -1], [1, 1, -1, -1, 0, 0, 0, 0],
        [0, 0, 0, 0, 1, 1, -1, -1], [1, -1, 0, 0, 0, 0, 0, 0], [0, 0, 1, -1, 0, 0, 0, 0],
        [0, 0, 0, 0, 1, -1, 0, 0], [0, 0, 0, 0, 0, 0, 1, -1],
    ]  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 5, 8, 13])
def test_trees_of_any_size(size: int) -> None:
    assert np.linalg.matrix_rank(fixed.wavelet(size)) == size
    sums = fixed.tree(size)
    assert sums[0].all() and (sums.sum(1) == 1).sum() == size
    assert sums.sum(0).max() <= math.ceil(math.log2(max(size, 1))) + 1


@pytest.mark.parametrize("name", small())
def test_identity(name: str) -> None:
    workload = small()[name]
    queries = rows(workload)
    assert fixed.identity(workload).error(workload) == pytest.approx((queries**2).sum())
    variances = np.concatenate(fixed.identity(workload).variances(workload))
    np.testing.assert_allclose(variances, (queries**2).sum(1))
