"""Estimates without negative cells."""

import numpy as np
import pytest
from scipy.optimize import nnls

from dpstream.accounting.errors import RunError
from dpstream.accounting.strategies.cells.mixing import mixed
from dpstream.accounting.strategies.cells.optimum import optimum
from dpstream.accounting.workloads.workload import over
from dpstream.pipelines.workload import estimate as module
from dpstream.pipelines.workload.estimate import nonnegative


def test_least_squares_as_an_independent_solver_finds_it() -> None:
    """Lawson and Hanson's active sets on A x = A y, A = L^-1."""
    rng = np.random.default_rng(3)
    for sizes in ([32], [6, 5]):
        mix = mixed(optimum(over(sizes, ["range"] * len(sizes))).strategy, tuple(sizes)).factors
        mix_matrix = mix[0] if len(mix) == 1 else np.kron(*mix)
        cells = rng.poisson(0.7, len(mix_matrix)) + mix_matrix @ rng.normal(size=len(mix_matrix))
        assert (cells < 0).sum() > 3
        inverse = np.linalg.inv(mix_matrix)
        expected, _ = nnls(inverse, inverse @ cells)
        estimate = nonnegative(cells, mix)
        assert estimate.min() >= 0 and np.allclose(estimate, expected, atol=1e-4)
        clipped = np.maximum(cells, 0)
        assert np.linalg.norm(inverse @ (estimate - cells)) < np.linalg.norm(
            inverse @ (clipped - cells)
        )


def test_what_is_not_negative_stays() -> None:
    cells = np.array([0.0, 1.0, 2.5])
    assert nonnegative(cells, [np.eye(3) * 2]) is cells
    assert np.array_equal(nonnegative(-cells, [np.eye(3)]), np.zeros(3))


def test_totals_are_better_than_clipped_ones() -> None:
    """Of many empty cells clipping keeps the positive half of the noise."""
    rng = np.random.default_rng(5)
    mix = mixed(optimum(over([64], ["range"])).strategy, (64,)).factors
    clipped, nonnegative_errors = [], []
    for _ in range(40):
        cells = 30.0 * (np.arange(64) == 7) + mix[0] @ rng.normal(size=64)
        clipped.append(np.maximum(cells, 0).sum() - 30)
        nonnegative_errors.append(nonnegative(cells, mix).sum() - 30)
    assert np.mean(np.square(nonnegative_errors)) < 0.5 * np.mean(np.square(clipped))


def test_a_search_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "slope", lambda x, gradient: 1e300)
    with pytest.raises(RunError):
        nonnegative(np.array([-1.0, 1.0]), [np.eye(2)])
