"""Products of optima, and unions that take turns."""

import math
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import scipy.linalg

from dpstream.accounting.arrays import kron
from dpstream.accounting.errors import UsageError
from dpstream.accounting.strategies.cells.eigen import spectrum
from dpstream.accounting.strategies.cells.optimum import optimum
from dpstream.accounting.strategies.cells.products import (
    SUMMED,
    alternating,
    floor_of,
    product_optimum,
    tridiagonal_floor,
    tridiagonal_optimum,
)
from dpstream.accounting.strategies.cells.residual import residual
from dpstream.accounting.strategies.cells.strategy import Blocks
from dpstream.accounting.workloads.attributes import explicit, interval, of_size
from dpstream.accounting.workloads.workload import marginals, of_matrix, over, workload_of
from tests.accounting.strategies.cells.shapes import attributes, floor, rows, small


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
    factor = np.linalg.cholesky(interval(kind, size).gram())
    queries = np.asarray(factor.T, np.float64)  # the same Gram matrix
    assert solution.floor <= floor(queries, solution.certificate[0]) * (1 + 1e-9)


@pytest.mark.parametrize("kind", ["range", "prefix"])
def test_spreads_are_those_of_the_matrix(kind: str) -> None:
    """Of running sums of eigenvectors, as of the inverse; other factors are left out."""
    size = 61
    each = [interval(other, size, 7 if other == "width" else 0) for other in SUMMED]
    left_out = [interval("prefix", size, relative=True), explicit(np.eye(size), size)]
    gram = tridiagonal_optimum(interval(kind, size), others=[*each, *left_out]).strategy.gram
    assert isinstance(gram, Blocks)
    assert set(gram.spread_of) == {factor.canonical() for factor in each}
    inverted = replace(gram, spread_of={})
    for factor in each:
        workload = workload_of([of_size("a", size)], [(1.0, {0: factor})])
        [spread], [exact] = gram.spreads(workload), inverted.spreads(workload)
        assert spread.mean == pytest.approx(exact.mean, rel=1e-9)
        assert gram.trace(workload) == pytest.approx(inverted.trace(workload), rel=1e-9)
        if factor.kind != "range":  # too many to be listed
            assert spread[1:] == pytest.approx(exact[1:], rel=1e-9)
    # Whatever else is asked is inverted.
    queries = of_matrix(np.eye(size)[:3])
    assert gram.trace(queries) == pytest.approx(inverted.trace(queries))


@pytest.mark.parametrize("kind", ["range", "prefix"])
@pytest.mark.parametrize("size", [5, 37, 300, 1300])
def test_the_floor_alone(kind: str, size: int) -> None:
    factor = interval(kind, size)
    best = optimum(over([size], [kind]), 1e-4)
    assert best.floor * (1 - 2e-3) <= tridiagonal_floor(factor) <= best.error


def test_the_last_decomposition_is_used_again() -> None:
    factor = interval("range", 40)
    made = scipy.linalg.eigh_tridiagonal
    with mock.patch.object(scipy.linalg, "eigh_tridiagonal", side_effect=made) as solved:
        solution = tridiagonal_optimum(factor)
    assert solved.call_count == solution.steps
    # A point before the last one may be the best: then its own is made again.
    worse = tridiagonal_optimum(factor, tolerance=0.0, most=6)
    assert worse.error <= solution.error
    assert worse.strategy.error(over([40], ["range"])) == pytest.approx(worse.error, rel=1e-9)


@pytest.mark.parametrize("name", ["a product", "with a total"])
def test_the_product_of_optima_is_the_optimum(name: str) -> None:
    workload = small()[name]
    solved, reference = product_optimum(workload, 1e-4), optimum(workload, 1e-4)
    assert solved.error == pytest.approx(reference.error, rel=2e-4)
    assert solved.strategy.error(workload) == pytest.approx(solved.error, rel=1e-6)
    certificate = kron(list(solved.certificate))
    assert solved.floor <= floor(rows(workload), certificate) * (1 + 1e-9)


def test_a_weight_multiplies_the_error() -> None:
    factors = {0: interval("range", 4), 1: interval("range", 3)}
    one, five = (product_optimum(workload_of(attributes(4, 3), [(w, factors)])) for w in (1, 5))
    assert (five.error, five.floor) == pytest.approx((5 * one.error, 5 * one.floor))


@pytest.mark.parametrize(("sizes", "most"), [([100] * 3, 1.0314), ([64] * 4, 1.0446)])
def test_figures_of_large_products(sizes: list[int], most: float) -> None:
    workload = over(sizes, ["range"] * len(sizes))
    solved = product_optimum(workload, 2e-4)
    bound = math.prod(spectrum(part).bound for part in workload.axes(workload.products[0]))
    assert solved.gap <= 2e-4
    assert 1 <= math.sqrt(solved.error / bound) <= most


def test_unions_take_turns() -> None:
    workload = marginals(attributes(3, 4, 5), [1, 2], "range")
    strategy, reference = alternating(workload), optimum(workload)
    assert reference.floor <= strategy.error(workload) <= 1.5 * reference.error
    assert strategy.error(workload) <= residual(workload)[1] * 1.2
    assert floor_of(workload) <= reference.error
    assert floor_of(small()["a product"]) == pytest.approx(
        product_optimum(small()["a product"], 1e-5).floor, rel=2e-2
    )
    # A single product is solved as well as by itself.
    one = small()["a product"]
    assert alternating(one).error(one) == pytest.approx(product_optimum(one).error, rel=2e-3)


def test_an_axis_beyond_the_limit() -> None:
    with pytest.raises(UsageError, match="coarser"):
        product_optimum(over([8193], ["range"]))
    with pytest.raises(UsageError, match="coarser"):
        floor_of(marginals(attributes(8193, 2), [1], "range"))
