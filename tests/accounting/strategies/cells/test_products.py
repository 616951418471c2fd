"""Products of optima, and unions that take turns."""

import math

import pytest

from dpstream.accounting.arrays import kron
from dpstream.accounting.errors import PolicyError
from dpstream.accounting.strategies.cells.eigen import spectrum
from dpstream.accounting.strategies.cells.optimum import optimum
from dpstream.accounting.strategies.cells.products import alternating, floor_of, product_optimum
from dpstream.accounting.strategies.cells.residual import residual
from dpstream.accounting.workloads.factors import interval
from dpstream.accounting.workloads.workload import marginals, over, workload_of
from tests.accounting.strategies.cells.shapes import attributes, floor, rows, small


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
    with pytest.raises(PolicyError, match="coarser"):
        product_optimum(over([8193], ["range"]))
    with pytest.raises(PolicyError, match="coarser"):
        floor_of(marginals(attributes(8193, 2), [1], "range"))
