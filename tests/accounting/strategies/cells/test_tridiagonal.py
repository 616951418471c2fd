"""The optimum by tridiagonal matrices against the one by full matrices."""

import numpy as np
import pytest

from dpstream.accounting.strategies.cells.optimum import optimum
from dpstream.accounting.strategies.cells.strategy import Blocks
from dpstream.accounting.strategies.cells.tridiagonal import tridiagonal_optimum
from dpstream.accounting.workloads.factors import interval
from dpstream.accounting.workloads.workload import over
from tests.accounting.strategies.cells.shapes import floor


@pytest.mark.parametrize("kind", ["range", "prefix"])
@pytest.mark.parametrize("size", [5, 37, 1300])
def test_the_same_optimum(kind: str, size: int) -> None:
    workload = over([size], [kind])
    solution = tridiagonal_optimum(interval(kind, size))
    gram = solution.strategy.gram
    assert isinstance(gram, Blocks)
    matrix = gram.dense()
    assert np.array_equal(matrix, matrix.T)
    np.testing.assert_allclose(np.diag(matrix), 1, rtol=1e-9)
    assert solution.strategy.error(workload) == pytest.approx(solution.error, rel=1e-6)
    assert solution.floor <= solution.error <= solution.floor * (1 + 1e-3)
    assert solution.error == pytest.approx(optimum(workload, 1e-4).error, rel=1.1e-3)
    queries = np.linalg.cholesky(interval(kind, size).gram()).T  # the same Gram matrix
    assert solution.floor <= floor(queries, solution.certificate[0]) * (1 + 1e-9)
