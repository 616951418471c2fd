"""Strategies to compare with: their published figures, and that none is better than the plan's."""

import math

import numpy as np
import pytest

from dpstream.accounting.strategies.cells.auto import auto
from dpstream.accounting.strategies.cells.eigen import spectrum
from dpstream.accounting.strategies.cells.strategy import identity
from dpstream.accounting.workloads.attributes import explicit, interval, of_size
from dpstream.accounting.workloads.workload import marginals, of_matrix, over, workload_of
from tests.accounting.strategies.cells.shapes import EXAMPLE4, attributes, rows, small
from tests.bench.paper import cell_baselines as baselines


def test_example_4() -> None:
    workload = of_matrix(EXAMPLE4)
    bound = spectrum(workload).bound
    errors = [baselines.gaussian_error(workload), identity(workload).error(workload),
              baselines.haar(workload).error(workload)]  # fmt: skip
    assert errors == pytest.approx([40, 36, 21])
    ratios = [math.sqrt(error / bound) for error in errors]
    assert ratios == pytest.approx([1.6366, 1.5527, 1.1859], abs=6e-5)


@pytest.mark.parametrize("name", small())
def test_the_workload_itself(name: str) -> None:
    workload = small()[name]
    queries = rows(workload)
    gram = queries.T @ queries
    rank = np.linalg.matrix_rank(gram)
    assert baselines.itself(workload).error(workload) == pytest.approx(np.diag(gram).max() * rank)
    assert baselines.gaussian_error(workload) == pytest.approx(np.diag(gram).max() * len(queries))


@pytest.mark.parametrize("name", small())
def test_a_plan_is_the_best_of_all(name: str) -> None:
    workload = small()[name]
    plan, errors = auto(workload), baselines.errors(workload)
    assert len(errors) >= 5 and plan.error <= min(errors.values()) * (1 + 1e-3)
    assert min(errors.values()) >= plan.floor * (1 - 1e-9)


def test_the_largest_column_of_factors_that_peak_at_different_cells() -> None:
    """Prefixes are largest at the first cell, suffixes at the last: neither is where the sum is."""
    rng = np.random.default_rng(5)
    for sizes in ([5, 4], [6, 3, 2], [9]):
        domain = [of_size(str(axis), size) for axis, size in enumerate(sizes)]
        products = [
            (1.0, {axis: interval("prefix", size) for axis, size in enumerate(sizes)}),
            (1.0, {axis: explicit(np.tri(size)[::-1].T + 0.0, size)
                   for axis, size in enumerate(sizes)}),
            (1.0, {0: explicit(rng.integers(0, 3, (4, sizes[0])) + np.eye(4, sizes[0]), sizes[0])}),
        ]  # fmt: skip
        workload = workload_of(domain, products)
        dense = (rows(workload) ** 2).sum(0).max()
        assert baselines.column_norm2(workload) == pytest.approx(dense)


def test_fourier_and_data_cube() -> None:
    workload = marginals(attributes(8, 16, 16), [2])
    bound = spectrum(workload).bound
    # All three tables, as they are; and the characters that they need.
    assert baselines.datacube(workload).sensitivity2 == pytest.approx(3)
    assert baselines.datacube(workload).error(workload) == pytest.approx(
        1.0217**2 * bound, rel=2e-3
    )
    assert math.isfinite(baselines.fourier(workload).error(workload))
    # One table of few cells answers both of its margins.
    small_tables = marginals(attributes(2, 2), [1])
    assert baselines.datacube(small_tables).gram.trace(over([2, 2], ["identity"] * 2)) == math.inf
    assert baselines.datacube(marginals(attributes(2, 2), [1, 2])).sensitivity2 == pytest.approx(1)
