"""Published and promised figures at full size: errors over the singular value bound, RMSE."""

import math

import numpy as np
import pytest

from dpstream.accounting.strategies.cells.eigen import (
    Vectors,
    eigen,
    root,
    spectrum,
    weigh,
)
from dpstream.accounting.strategies.cells.optimum import optimum
from dpstream.accounting.workloads.workload import Workload, marginals, of_matrix, over
from tests.accounting.strategies.cells.shapes import attributes, predicates
from tests.bench.paper.fewer_weights import Sines, principal, separation

CENSUS = (8, 16, 16)


def range_marginals(ways: int) -> Workload:
    return marginals(attributes(*CENSUS), [ways], "range")


def permuted() -> Workload:
    """All ranges of permuted cells, as a root of their Gram matrix: errors depend on that alone."""
    gram = over([2048], ["range"]).gram()
    order = np.random.default_rng(0).permutation(2048)
    return of_matrix(np.linalg.cholesky(gram[np.ix_(order, order)]).T)


#: Table 2 of the paper: eigen-design, bound over error.
TABLE2 = {
    "1D range, permuted": (permuted, 0.99),
    "1-way range marginal": (lambda: range_marginals(1), 0.98),
    "2-way range marginal": (lambda: range_marginals(2), 0.95),
    "1D CDF": (lambda: over([2048], ["prefix"]), 0.80),
    "predicate": (lambda: predicates(2048), 1.00),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLE2)
def test_table_2(name: str) -> None:
    make, printed = TABLE2[name]
    workload = make()
    eigensystem = spectrum(workload)
    ratio = math.sqrt(eigensystem.bound / eigen(eigensystem).error(workload))
    assert ratio == pytest.approx(printed, abs=0.01)
    assert ratio <= 1 + 1e-9


def check(workload: Workload, most: float, designed: float) -> None:
    eigensystem, solved = spectrum(workload), optimum(workload)
    errors = [solved.error, eigen(eigensystem).error(workload)]
    best, design = (math.sqrt(error / eigensystem.bound) for error in errors)
    assert solved.gap <= 1e-3
    assert 1 <= best <= most and best <= design
    assert design == pytest.approx(designed, abs=3e-4)
    assert errors[0] <= root(eigensystem).error(workload)


@pytest.mark.parametrize(
    ("workload", "most", "designed"),
    [
        (over(CENSUS, ["range"] * 3), 1.0299, 1.0761),
        (range_marginals(2), 1.0130, 1.0504),
    ],
    ids=["3D range", "2-way range marginals"],
)
def test_optimum_of_2048_cells_in_blocks(workload: Workload, most: float, designed: float) -> None:
    check(workload, most, designed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "most", "designed"), [("range", 1.0058, 1.0134), ("prefix", 1.0142, 1.2402)]
)
def test_optimum_of_2048_cells(kind: str, most: float, designed: float) -> None:
    check(over([2048], [kind]), most, designed)


@pytest.mark.slow
def test_optimum_of_8192_cells() -> None:
    solved = optimum(over([8192], ["range"]))
    bound = np.sqrt(Sines(8192).eigenvalues()).sum() ** 2 / 8192
    assert solved.gap <= 1e-3
    assert 1 <= math.sqrt(solved.error / bound) <= 1.0045


@pytest.mark.slow
def test_separation_and_principal_vectors_of_8192_cells() -> None:
    """The paper's Figure 4: 5% and 10% more than the full solution for ranges, 11% and 0% for
    marginals."""
    ranges = Sines(8192)
    tables = spectrum(marginals(attributes(16, 16, 32), [2]))
    both = Vectors(tables.folding, tables.vectors)
    for basis, c, most in (
        (ranges, ranges.eigenvalues(), (1.05, 1.10)),
        (both, tables.values, (1.11, 1.001)),
    ):
        full = weigh(basis, c, 1e-3).error
        fewer = separation(basis, c, 16).error, principal(basis, c, 8192 * 6 // 100).error
        assert math.sqrt(fewer[0] / full) <= most[0]
        assert math.sqrt(fewer[1] / full) <= most[1]
