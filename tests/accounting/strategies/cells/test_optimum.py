"""The optimum against a general solver; certificates by other code."""

import math

import numpy as np
import pytest
from scipy.optimize import minimize

from dpstream.accounting.arrays import Float64, kron
from dpstream.accounting.errors import UsageError
from dpstream.accounting.strategies.cells.eigen import eigen, root, spectrum
from dpstream.accounting.strategies.cells.optimum import optimum, refined_weights, rows_of, worst
from dpstream.accounting.strategies.cells.residual import worst_table
from dpstream.accounting.strategies.cells.strategy import Blocks
from dpstream.accounting.workloads.workload import marginals, of_matrix, over
from tests.accounting.strategies.cells.shapes import attributes, floor, rows, small


def dense_oracle(queries: Float64, seed: int = 0) -> float:
    """Least tr(V (A^T A)^-1) over square A of unit columns, by a general solver on A itself."""
    v, n = queries.T @ queries, queries.shape[1]

    def value(flat: Float64) -> tuple[float, Float64]:
        raw = flat.reshape(n, n)
        norms = np.linalg.norm(raw, axis=0)
        a = raw / norms
        inverse = np.linalg.inv(a.T @ a + 1e-9 * np.eye(n))
        slope = -2 * a @ inverse @ v @ inverse
        slope = (slope - a * (a * slope).sum(0)) / norms
        return float(np.trace(v @ inverse)), slope.ravel()

    start = np.random.default_rng(seed).normal(size=n * n) * 0.1 + np.eye(n).ravel()
    options = {"maxiter": 20_000}
    return float(minimize(value, start, jac=True, method="L-BFGS-B", options=options).fun)


@pytest.mark.parametrize("name", ["example", "ranges", "odd ranges", "prefixes", "predicates"])
def test_against_a_general_solver(name: str) -> None:
    workload = small()[name]
    solved, other = optimum(workload, 1e-5), dense_oracle(rows(workload))
    assert solved.floor * (1 - 1e-4) <= other
    assert solved.error <= other * (1 + 1e-4)


@pytest.mark.parametrize("name", small())
def test_certificates_hold_by_other_code(name: str) -> None:
    workload = small()[name]
    solved = optimum(workload)
    [certificate] = solved.certificate
    assert solved.gap <= 1e-3
    assert solved.floor <= floor(rows(workload), certificate) * (1 + 1e-9)
    gram, queries = solved.strategy.gram, rows(workload)
    assert isinstance(gram, Blocks)
    matrix = gram.dense()
    error = np.diag(matrix).max() * np.trace(
        queries @ np.linalg.pinv(matrix, rcond=1e-12) @ queries.T
    )
    assert error == pytest.approx(solved.error, rel=1e-4)
    assert solved.strategy.error(workload) == pytest.approx(solved.error, rel=1e-6)
    assert (np.linalg.eigvalsh(matrix) > -1e-9).all()


@pytest.mark.parametrize("name", small())
def test_never_worse_than_the_eigen_design(name: str) -> None:
    workload, eigensystem = small()[name], spectrum(small()[name])
    error = optimum(workload, 1e-4).error
    assert error <= min(eigen(eigensystem).error(workload), root(eigensystem).error(workload)) * (
        1 + 1e-4
    )


def test_the_order_of_cells_does_not_matter() -> None:
    matrix = rows(over([10], ["prefix"]))
    order = np.random.default_rng(1).permutation(10)
    one, other = optimum(of_matrix(matrix), 1e-7), optimum(of_matrix(matrix[:, order]), 1e-7)
    assert one.error == pytest.approx(other.error, rel=2e-7)


@pytest.mark.parametrize("ways", [1, 2])
def test_rank_deficient_unions(ways: int) -> None:
    solved = optimum(marginals(attributes(4, 3, 5), [ways], "range"), 1e-3)
    assert solved.gap <= 1e-3 and solved.steps <= 60


def test_a_finer_grid_begins_near_its_optimum() -> None:
    for kind in ("range", "prefix"):
        solved = optimum(over([1024], [kind]))
        assert solved.gap <= 1e-3 and solved.steps <= 3
    weights = np.array([4.0, 2.0, 1.0, 1.0]) / 8
    assert refined_weights(weights, 4) == pytest.approx(weights)
    assert (
        refined_weights(weights, 64).sum() == pytest.approx(1)
        and (np.diff(refined_weights(weights, 64)) <= 0).all()
    )


def test_the_worst_prefix_of_256() -> None:
    solution = worst(over([256], ["prefix"]))
    assert math.sqrt(solution.error) <= 2.536 and solution.gap <= 1e-3


@pytest.mark.parametrize("name", ["example", "ranges", "prefixes", "range marginals", "a product"])
def test_certificates_of_worst_hold_by_other_code(name: str) -> None:
    workload = small()[name]
    solution = worst(workload, 2e-2)
    m, p = (kron(list(solution.certificate[k::2])) for k in (0, 1))
    assert p.min() >= 0 and p.sum() <= 1 + 1e-12 and solution.gap <= 2e-2
    assert solution.floor <= floor(rows(workload) * np.sqrt(p)[:, None], m) * (1 + 1e-9)
    variances = np.concatenate(solution.strategy.variances(workload))
    assert variances.max() == pytest.approx(solution.error, rel=1e-6)


def test_tables_agree_with_their_closed_form() -> None:
    workload = small()["tables"]
    assert worst(workload, 1e-3).error == pytest.approx(worst_table(workload).error, rel=2e-3)


@pytest.mark.parametrize("name", small())
def test_rows_are_written_out(name: str) -> None:
    np.testing.assert_allclose(rows_of(small()[name]), rows(small()[name]), atol=1e-12)


def test_too_many_queries() -> None:
    with pytest.raises(UsageError, match="query matrix"):
        worst(over([512], ["range"]))
