"""The bases that are chosen, against published figures and the exact optimum."""

import math

import numpy as np
import pytest

from dpstream.accounting.strategies.cells.bases import Even, Fitted, fitted
from dpstream.accounting.strategies.cells.fitted import FittedTables, weighed
from dpstream.accounting.strategies.cells.fitting import fit
from dpstream.accounting.strategies.cells.optimum import optimum
from dpstream.accounting.strategies.cells.residual import residual
from dpstream.accounting.workloads.workload import marginals
from tests.accounting.strategies.cells.shapes import attributes
from tests.accounting.strategies.cells.test_fitted import WORKLOADS


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
