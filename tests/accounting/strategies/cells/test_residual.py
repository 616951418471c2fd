"""Tables in closed form against matrices and published figures."""

import math
from fractions import Fraction

import numpy as np
import pytest

from dpstream.accounting.errors import UsageError
from dpstream.accounting.strategies.cells.residual import (
    Residual,
    residual,
    spaces_of,
    worst_table,
)
from dpstream.accounting.workloads.attributes import interval
from dpstream.accounting.workloads.workload import marginals, over, workload_of
from tests.accounting.strategies.cells.shapes import (
    ADULT,
    attributes,
    rows,
    singular_bound,
    small,
)
from tests.bench.paper.cell_baselines import tables

SMALL = marginals(attributes(3, 4, 1, 2), [1, 2, 3])


@pytest.mark.parametrize("name", ["range marginals", "tables", "a product", "with a total"])
def test_traces_and_variances_are_those_of_the_matrix(name: str) -> None:
    workload = small()[name]
    strategy, error = residual(workload)
    assert isinstance(strategy.gram, Residual)
    matrix, queries = strategy.gram.dense(), rows(workload)
    inverse = np.linalg.pinv(matrix, rcond=1e-12)
    assert strategy.error(workload) == pytest.approx(error)
    assert np.diag(matrix).max() * np.trace(queries @ inverse @ queries.T) == pytest.approx(error)
    np.testing.assert_allclose(np.diag(matrix), strategy.sensitivity2)
    variances = np.concatenate(strategy.variances(workload))
    np.testing.assert_allclose(variances, np.diag(queries @ inverse @ queries.T), rtol=1e-8)
    means = strategy.gram.means(workload)
    np.testing.assert_allclose(means, [v.mean() for v in strategy.gram.variances(workload)])


def test_tables_reach_the_singular_value_bound() -> None:
    _strategy, error = residual(SMALL)
    assert error == pytest.approx(singular_bound(rows(SMALL)))
    pairs = residual(small()["tables"])[0]
    assert pairs.gram.trace(over([3, 4, 2], ["identity"] * 3)) == math.inf


@pytest.mark.parametrize(
    ("ways", "rmse", "variance"), [(1, 3.0468, None), (2, 6.3587, 67.80), (3, 10.5153, 236.84)]
)
def test_figures_of_residual_planner(ways: int, rmse: float, variance: float | None) -> None:
    workload = marginals(attributes(*ADULT), [ways])
    strategy, error = residual(workload)
    assert math.sqrt(error / workload.queries) == pytest.approx(rmse, abs=5e-5)
    assert math.sqrt(strategy.error(workload) / workload.weight) == pytest.approx(rmse, abs=5e-5)
    if variance:
        solution = worst_table(workload, 1e-5)
        assert solution.error == pytest.approx(variance, abs=5e-3)
        assert solution.floor <= solution.error <= solution.floor * (1 + 1e-5)
        assert solution.strategy.sensitivity2 * solution.strategy.gram.means(
            workload
        ).max() == pytest.approx(solution.error)


def test_worst_tables_are_certified_by_other_code() -> None:
    solution = worst_table(SMALL, 1e-6)
    # The mean of the variances by the certificate's weights is never above the largest.
    weights = np.concatenate([
        np.full(product.rows, p / product.rows)
        for product, p in zip(SMALL.products, solution.certificate[0], strict=True)
    ])  # fmt: skip
    queries = rows(SMALL) * np.sqrt(weights)[:, None]
    assert weights.sum() == pytest.approx(1)
    assert solution.floor <= singular_bound(queries) * (1 + 1e-9)
    assert solution.error <= solution.floor * (1 + 1e-6)
    assert max(map(max, residual(SMALL)[0].variances(SMALL))) > solution.error


def test_noise_of_the_tables_costs_one_unit() -> None:
    strategy, _ = residual(SMALL)
    gram = strategy.gram
    assert isinstance(gram, Residual)
    cost = sum(
        math.prod(1 - 1 / SMALL.sizes[a] for a in key) / noise
        for key, noise in zip(gram.keys, gram.noise2, strict=True)
    )
    assert cost == pytest.approx(1)
    # One table alone: noise of sd 1 on each of its cells.
    alone = tables(SMALL, [(0, 1)], "one")
    assert isinstance(alone.gram, Residual)
    at = alone.gram.keys.index((0, 1))
    assert alone.gram.noise2[at] == pytest.approx(1)
    assert alone.variances(over([3, 4, 1, 2], ["identity", "identity", "total", "total"]))[
        0
    ] == pytest.approx(1)


@pytest.mark.slow
def test_a_hundred_attributes() -> None:
    workload = marginals(attributes(*[10] * 100), [1, 3])
    strategy, error = residual(workload)
    assert len(spaces_of(workload).keys) == 1 + 100 + 4950 + 161_700
    assert strategy.error(workload) == pytest.approx(error)
    one = workload_of(
        workload.attributes, [(1, {k: interval("identity", 10) for k in (3, 50, 99)})]
    )
    assert len(strategy.variances(one)[0]) == 1000
    assert strategy.variances(one)[0] == pytest.approx(
        strategy.sensitivity2 * strategy.gram.means(one)[0]
    )


def test_more_than_eight_attributes_at_once() -> None:
    workload = marginals(attributes(*[2] * 9), [1, 9])
    assert residual(workload)[1] == pytest.approx(singular_bound(rows(workload)))


def test_refusals() -> None:
    with pytest.raises(UsageError, match="subsets"):
        spaces_of(marginals(attributes(*[2] * 26), [25]))
    with pytest.raises(UsageError, match="worst"):
        worst_table(small()["range marginals"])


def test_attributes_of_one_cell_have_no_space_of_their_own() -> None:
    gram = residual(SMALL)[0].gram
    assert isinstance(gram, Residual) and not any(2 in key for key in gram.keys)


def test_the_worst_error_is_that_of_its_strategy() -> None:
    for tolerance in (0.3, 1e-2, 1e-4):
        solution = worst_table(SMALL, tolerance)
        means = solution.strategy.gram.means(SMALL)
        assert solution.error == pytest.approx(solution.strategy.sensitivity2 * means.max())


def test_a_table_of_an_attribute_of_two_cells_has_its_noise() -> None:
    alone = tables(SMALL, [(0, 3)], "one")
    workload = over([3, 4, 1, 2], ["identity", "total", "total", "identity"])
    assert alone.variances(workload)[0] == pytest.approx(1)


def test_the_sensitivity_is_rounded_up() -> None:
    gram = residual(SMALL)[0].gram
    assert isinstance(gram, Residual)
    pairs = zip(gram.y.tolist(), gram.dims.tolist(), strict=True)
    exact = sum(Fraction(y) * Fraction(dim) for y, dim in pairs)
    assert exact <= Fraction(gram.sensitivity2) <= exact * (1 + Fraction(1, 2**39))
