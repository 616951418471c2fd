"""Fitted residual tables against dense matrices, a numeric optimiser and published figures."""

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy.optimize import minimize

from dpstream.accounting.strategies.cells.auto import Plan
from dpstream.accounting.strategies.cells.bases import Even, Fitted, fitted
from dpstream.accounting.strategies.cells.fitted import FittedTables, fit, weighed
from dpstream.accounting.strategies.cells.optimum import optimum
from dpstream.accounting.strategies.cells.residual import residual
from dpstream.accounting.strategies.cells.stored import from_arrays, to_arrays
from dpstream.accounting.workloads.attributes import interval
from dpstream.accounting.workloads.workload import Workload, marginals, workload_of
from tests.accounting.strategies.cells.shapes import attributes, rows


def mixed() -> Workload:
    """Factors of all kinds, two of one attribute, and one cell that says nothing."""
    domain = attributes(4, 5, 1, 3)
    return workload_of(
        domain,
        [(1.0, {0: interval("range", 4), 1: interval("prefix", 5)}),
         (2.0, {1: interval("range", 5), 3: interval("identity", 3)}),
         (0.5, {0: interval("range", 4), 2: interval("identity", 1)}), (1.0, {})],
    )  # fmt: skip


WORKLOADS = {
    "ranges": marginals(attributes(4, 4, 4), [2], "range"),
    "prefixes": marginals(attributes(5, 5, 5), [2], "prefix"),
    "three": marginals(attributes(3, 4, 3, 2), [3, 1], "prefix"),
    "mixed": mixed(),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_errors_and_sensitivity_are_those_of_the_matrix(name: str) -> None:
    workload = WORKLOADS[name]
    actual = fit(workload)
    gram = actual.strategy.gram
    assert isinstance(gram, FittedTables)
    matrix, queries = gram.dense(), rows(workload)
    inverse = np.linalg.pinv(matrix, rcond=1e-11, hermitian=True)
    assert np.allclose(queries @ inverse @ matrix, queries)  # all that is asked is measured
    variances = np.diag(queries @ inverse @ queries.T)
    weights = np.concatenate([np.full(p.rows, p.weight) for p in workload.products])
    flat = np.concatenate(gram.variances(workload))
    np.testing.assert_allclose(flat * weights, variances, rtol=1e-6)
    np.testing.assert_allclose(gram.means(workload), [v.mean() for v in gram.variances(workload)])
    assert np.diag(matrix).max() <= gram.sensitivity2 <= 1 + 1e-9
    assert actual.strategy.error(workload) == pytest.approx(actual.error, rel=1e-9)
    assert gram.sensitivity2 * variances.sum() == pytest.approx(actual.error, rel=1e-6)
    # Between the optimum and what even bases reach.
    assert optimum(workload).floor <= actual.error <= residual(workload)[1] * (1 + 1e-9)


@pytest.mark.parametrize("name", WORKLOADS)
def test_weights_are_the_best_of_these_bases(name: str) -> None:
    workload = WORKLOADS[name]
    gram = fit(workload).strategy.gram
    assert isinstance(gram, FittedTables)
    alone = [
        FittedTables(gram.sizes, gram.keys, np.where(np.arange(len(gram.keys)) == k, 1.0, 1e9),
                     gram.bases).trace(workload)
        for k in range(len(gram.keys))
    ]  # fmt: skip
    start = np.zeros(len(gram.keys))

    def error(logits: np.ndarray) -> float:
        y = np.exp(logits)
        return float((np.array(alone) / y).sum() * (y * gram.costs).sum())

    actual = minimize(error, start, method="BFGS")
    assert weighed(workload, gram.bases)[1] == pytest.approx(actual.fun, rel=1e-4)


def test_even_bases_are_the_plain_tables() -> None:
    workload = WORKLOADS["ranges"]
    strategy, error = weighed(workload, tuple(map(Even, workload.sizes)))
    assert error == pytest.approx(residual(workload)[1])
    for one, other in zip(
        strategy.variances(workload), residual(workload)[0].variances(workload), strict=True
    ):
        np.testing.assert_allclose(one, other)


def test_the_sensitivity_is_rounded_up() -> None:
    gram = fit(WORKLOADS["prefixes"]).strategy.gram
    assert isinstance(gram, FittedTables)
    exact = sum(
        Fraction(y) * math.prod([Fraction(gram.bases[axis].norm2) for axis in key])
        for y, key in zip(gram.y.tolist(), gram.keys, strict=True)
    )
    assert exact <= Fraction(gram.sensitivity2) <= exact * (1 + Fraction(1, 2**38))
    np.testing.assert_allclose(gram.noise2 * gram.y, gram.sensitivity2)


def test_stored() -> None:
    workload = WORKLOADS["mixed"]
    actual = fit(workload)
    plan = Plan(actual.strategy, "total", actual.error, actual.error, actual.weights)
    again = from_arrays(to_arrays(plan, workload.structure), workload.structure)
    assert isinstance(again.strategy.gram, FittedTables)
    assert again.strategy.error(workload) == actual.strategy.error(workload)
    assert [b.canonical() for b in again.strategy.gram.bases] == [
        b.canonical() for b in actual.strategy.gram.bases  # type: ignore[attr-defined]
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "kind", "most"),
    # ResidualPlanner+ has 21.79, 19.34, 10.28, 17.47.
    [([10] * 20, "range", 21.27), ([10] * 20, "prefix", 17.46), ([100] * 3, "range", 10.03),
     ([100] * 5, "range", 17.24)],
)  # fmt: skip
def test_figures(sizes: list[int], kind: str, most: float) -> None:
    workload = marginals(attributes(*sizes), [2], kind)
    result = fit(workload)
    assert most * 0.99 <= math.sqrt(result.error / workload.weight) <= most


def test_fewer_cells_say_how_often_the_total_is_asked() -> None:
    """Above 512 cells the basis starts from that of fewer."""
    workload = marginals(attributes(520, 520), [2, 1], "range")
    result = fit(workload)
    assert result.error < residual(workload)[1] / 20
    assert result.strategy.error(workload) == pytest.approx(result.error, rel=1e-9)


def test_cells_of_tables_of_counts_are_measured_evenly() -> None:
    gram = fit(WORKLOADS["mixed"]).strategy.gram
    assert isinstance(gram, FittedTables)
    assert [type(basis) for basis in gram.bases] == [Fitted, Fitted, Even, Even]


@pytest.mark.parametrize(("name", "loss"), [("ranges", 1.02), ("prefixes", 1.02)])
def test_close_to_the_optimum_of_all_cells(name: str, loss: float) -> None:
    workload = WORKLOADS[name]
    assert fit(workload).error <= optimum(workload).error * loss


def test_no_other_basis_tried_at_random_is_better() -> None:
    workload = WORKLOADS["prefixes"]
    result, rng = fit(workload), np.random.default_rng(6)
    gram = result.strategy.gram
    assert isinstance(gram, FittedTables)
    for _ in range(30):
        bases = []
        for basis in gram.bases:
            assert isinstance(basis, Fitted)
            moved = np.eye(5) + rng.normal(size=(5, 5)) * 0.02
            # A strategy near the one that the basis is of.
            matrix = np.linalg.inv(basis.covariance + np.outer(basis.spread, basis.spread))
            bases.append(fitted(moved.T @ matrix @ moved, 14))
        assert weighed(workload, tuple(bases))[1] >= result.error * (1 - 1e-3)
