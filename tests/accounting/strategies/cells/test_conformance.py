"""What every strategy must do, whatever it is made of."""

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from dpstream.accounting.arrays import Float64, kron
from dpstream.accounting.strategies.cells.eigen import eigen, root, spectrum
from dpstream.accounting.strategies.cells.mixing import matrices
from dpstream.accounting.strategies.cells.optimum import optimum, worst
from dpstream.accounting.strategies.cells.products import alternating
from dpstream.accounting.strategies.cells.residual import residual
from dpstream.accounting.strategies.cells.strategy import CellStrategy
from dpstream.accounting.workloads.workload import Workload, of_matrix, over
from tests.accounting.strategies.cells.shapes import rows, small
from tests.bench.paper import cell_baselines as baselines

STRATEGIES: dict[str, Callable[[Workload], CellStrategy]] = {
    **baselines.BY_NAME,
    "eigen": lambda w: eigen(spectrum(w)),
    "root": lambda w: root(spectrum(w)),
    "optimum": lambda w: optimum(w).strategy,
    "product": alternating,
    "residual": lambda w: residual(w)[0],
    "worst": lambda w: worst(w, 2e-2).strategy,
}
CASES = [(name, kind) for name in small() for kind in STRATEGIES]


def matrix_of(strategy: CellStrategy, workload: Workload) -> Float64:
    """X over all cells."""
    return kron(matrices(strategy, workload.sizes))


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_errors_sensitivities_and_floors(name: str, kind: str) -> None:
    workload = small()[name]
    strategy, queries = STRATEGIES[kind](workload), rows(workload)
    matrix = matrix_of(strategy, workload)
    # Sensitivity: never below the largest column, in exact arithmetic, and at most a hair above.
    largest = max(map(Fraction, np.diag(matrix).tolist()))
    assert (
        largest * Fraction(1 - 1e-12)
        <= Fraction(strategy.sensitivity2)
        <= largest * Fraction(1 + 1e-9)
    )
    # Error: that of least squares on the nodes of a root of X, written out.
    values, vectors = np.linalg.eigh(matrix)
    nonzero = values > 1e-11 * values[-1]
    a = np.sqrt(values[nonzero])[:, None] * vectors[:, nonzero].T
    decoded = queries @ np.linalg.pinv(a)
    assert np.abs(decoded @ a - queries).max() <= 1e-6 * np.abs(queries).max()
    error = float(largest) * (decoded**2).sum()
    assert strategy.error(workload) == pytest.approx(error, rel=2e-4)
    variances = strategy.variances(workload)
    weights = [product.weight for product in workload.products]
    total = sum(w * v.sum() for w, v in zip(weights, variances, strict=True))
    assert total == pytest.approx(error, rel=2e-4)
    for spread, each in zip(strategy.spreads(workload), variances, strict=True):
        assert spread == pytest.approx((each.mean(), each.min(), each.max()), rel=1e-6)
    means = strategy.gram.means(workload) * strategy.sensitivity2
    assert means == pytest.approx([each.mean() for each in variances], rel=1e-6)
    assert error >= optimum(workload).floor * (1 - 1e-9)


@pytest.mark.parametrize("kind", ["identity", "workload", "eigen", "root", "optimum", "worst"])
def test_the_order_of_cells_does_not_matter(kind: str) -> None:
    matrix = np.random.default_rng(3).integers(0, 2, (12, 9)) + 0.0
    order = np.random.default_rng(4).permutation(9)
    one, other = of_matrix(matrix), of_matrix(matrix[:, order])
    errors = [STRATEGIES[kind](workload).error(workload) for workload in (one, other)]
    assert errors[0] == pytest.approx(errors[1], rel=2e-3 if kind in ("optimum", "worst") else 1e-9)


def test_trees_do_depend_on_the_order() -> None:
    """The check above can fail."""
    matrix = over([16], ["range"]).products[0].factors[0].dense()
    order = np.random.default_rng(4).permutation(16)
    errors = [baselines.haar(w).error(w) for w in (of_matrix(matrix), of_matrix(matrix[:, order]))]
    assert errors[1] > 1.2 * errors[0]


def monte_carlo(strategy: CellStrategy, workload: Workload, scale: float) -> float:
    """Mean of the squared errors of all answers over 500 runs, noise times ``scale``."""
    matrix, queries = matrix_of(strategy, workload), rows(workload)
    a = np.linalg.cholesky(matrix).T
    x = np.random.default_rng(6).integers(0, 100, workload.cells)
    sd = scale * np.sqrt(strategy.sensitivity2)
    noise = np.random.default_rng(7).normal(0, sd, (len(a), 500))
    estimates = np.linalg.solve(a.T @ a, a.T @ ((a @ x)[:, None] + noise))
    return float(((queries @ (estimates - x[:, None])) ** 2).sum(0).mean())


@pytest.mark.parametrize("kind", ["identity", "haar", "hierarchical", "eigen", "root", "optimum"])
def test_simulated_noise_has_the_error_of_the_formula(kind: str) -> None:
    workload = over([64], ["identity" if kind == "identity" else "prefix"])
    strategy = STRATEGIES[kind](workload)
    ratio = monte_carlo(strategy, workload, 1.0) / strategy.error(workload)
    assert np.sqrt(ratio) == pytest.approx(1, abs=0.02)
    wrong = monte_carlo(strategy, workload, 1 / 1.05) / strategy.error(workload)
    assert abs(np.sqrt(wrong) - 1) > 0.02
