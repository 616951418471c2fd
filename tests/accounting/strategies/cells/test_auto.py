"""The choice of a strategy is the best of all that are known."""

import math
from unittest import mock

import numpy as np
import pytest

from dpstream.accounting.arrays import Float64, kron
from dpstream.accounting.errors import UsageError
from dpstream.accounting.strategies.cells import auto as module
from dpstream.accounting.strategies.cells import products as products_module
from dpstream.accounting.strategies.cells.auto import (
    LARGE,
    LONG,
    STRATEGIES,
    auto,
    largest,
    named,
    union_floor,
)
from dpstream.accounting.strategies.cells.fitted import fit
from dpstream.accounting.strategies.cells.optimum import optimum
from dpstream.accounting.strategies.cells.products import floor_of
from dpstream.accounting.strategies.cells.residual import residual
from dpstream.accounting.strategies.cells.strategy import identity
from dpstream.accounting.workloads.attributes import explicit, interval, of_size
from dpstream.accounting.workloads.workload import Workload, marginals, over, workload_of
from tests.accounting.strategies.cells.shapes import attributes, floor, rows, small
from tests.accounting.strategies.cells.test_fitted import WORKLOADS

SMALL = {
    **WORKLOADS,
    "unlike": marginals(attributes(3, 5, 4), [2], "prefix"),
    "all ways": marginals(attributes(3, 4, 3), [1, 2, 3], "range"),
    "long": marginals(attributes(8, 8), [2], "prefix"),
}


def uneven(workload: Workload, seed: int) -> list[Float64]:
    rng = np.random.default_rng(seed)
    return [rng.dirichlet(np.full(n, 4.0)) for n in workload.sizes]


@pytest.mark.parametrize("name", SMALL)
def test_below_what_matrices_say(name: str) -> None:
    """Every width, of weights of any kind: below the singular values of all queries written out."""
    workload = SMALL[name]
    for weights in (uneven(workload, 1), list(fit(workload).weights)):
        dense = floor(rows(workload), kron(weights))
        least = optimum(workload, 1e-6).error
        for width in range(5):
            assert (
                union_floor(workload, weights, [width]) <= dense * (1 + 1e-9) <= least * (1 + 2e-9)
            )


@pytest.mark.parametrize("name", ["ranges", "prefixes", "unlike", "all ways"])
def test_with_all_of_each_attribute_it_is_exact(name: str) -> None:
    workload = SMALL[name]
    weights = uneven(workload, 2)
    dense = floor(rows(workload), kron(weights))
    assert union_floor(workload, weights) == pytest.approx(dense, rel=1e-5)
    best = union_floor(workload, fit(workload).weights)
    assert 0.95 <= best / optimum(workload, 1e-6).error <= 1


@pytest.mark.parametrize(
    ("kind", "width", "part"), [("range", 1, 0.75), ("range", 3, 0.9), ("prefix", 3, 0.82)]
)
@pytest.mark.parametrize("sizes", [(8, 8), (12, 12), (10, 10, 4)])
def test_few_dimensions_beside_u_lose_a_part(
    sizes: tuple[int, ...], kind: str, width: int, part: float
) -> None:
    """What lies in the rest of long attributes counts, though its couplings do not."""
    workload = marginals(attributes(*sizes), [2], kind)
    weights = [np.full(n, 1 / n) for n in sizes]
    dense = floor(rows(workload), kron(weights))
    assert part * dense <= union_floor(workload, weights, [width]) <= dense * (1 + 1e-9)


@pytest.mark.parametrize("sizes", [(8, 8), (10, 10, 4)])
def test_u_alone_is_a_floor_of_ranges(sizes: tuple[int, ...]) -> None:
    workload = marginals(attributes(*sizes), [2], "range")
    weights = [np.full(n, 1 / n) for n in sizes]
    dense = floor(rows(workload), kron(weights))
    assert 0.4 * dense <= union_floor(workload, weights, [0]) <= dense * (1 + 1e-9)


@pytest.mark.parametrize("width", [1, 3, 7])
@pytest.mark.parametrize("times", [1e-6, 1e6])
def test_queries_that_are_scaled_have_a_scaled_floor(width: int, times: float) -> None:
    """At even weights half of the directions of ranges are not coupled to u at all."""
    ranges = interval("range", 8).dense()
    weights = [np.full(8, 1 / 8)] * 2
    floors = [
        union_floor(
            workload_of(attributes(8, 8), [(1.0, {0: factor, 1: factor})]), weights, [width]
        )
        for factor in (explicit(ranges, 8), explicit(ranges * times, 8))
    ]
    assert floors[1] == pytest.approx(floors[0] * times**4, rel=1e-4)


@pytest.mark.parametrize(
    ("sizes", "ways", "widths"), [((45, 45, 45), 2, (40, 2)), ((3,) * 12, 6, (2, 0))]
)
def test_a_width_of_too_much_work_is_passed_over(
    sizes: tuple[int, ...], ways: int, widths: tuple[int, int]
) -> None:
    """One matrix of too many rows, or too many matrices; the next width is taken then."""
    workload = marginals(attributes(*sizes), [ways], "range")
    weights = [np.full(n, 1 / n) for n in sizes]
    narrow = union_floor(workload, weights, widths[1:])
    assert 0 < narrow == union_floor(workload, weights, widths)


def diagonal_blocks(workload: Workload) -> float:
    """What a floor would be without the couplings between the residual spaces."""
    queries = rows(workload)
    gram = queries.T @ queries / workload.cells
    total = 0.0
    for code in range(1 << len(workload.sizes)):
        each = [
            np.eye(n) - 1 / n if code >> k & 1 else np.full((n, n), 1 / n)
            for k, n in enumerate(workload.sizes)
        ]
        space = kron(each)
        values = np.linalg.eigvalsh(space @ gram @ space)
        total += float(np.sqrt(np.maximum(values, 0)).sum())
    return total**2


@pytest.mark.parametrize("name", ["ranges", "prefixes", "unlike"])
def test_a_floor_of_diagonal_blocks_alone_is_false(name: str) -> None:
    workload = SMALL[name]
    assert diagonal_blocks(workload) > optimum(workload).error * 1.005
    even = [np.full(n, 1 / n) for n in workload.sizes]
    assert union_floor(workload, even) <= floor(rows(workload), kron(even)) * (1 + 1e-9)


@pytest.mark.parametrize("part", [0.01, 0.03, 0.1])
def test_a_part_over_l_that_is_not_definite_is_no_bound(part: float) -> None:
    """Nearly one query, of a cell with little weight: what is taken from u leaves a negative
    eigenvalue, and the product of two of them would count as something that K has."""
    factor = explicit(np.diag([1.0, part, part / 2]), 3)
    for products in ([(1.0, {0: factor, 1: factor})], [(1.0, {0: factor, 1: factor}), (0.1, {})]):
        workload = workload_of(attributes(3, 3), products)
        weights = [np.array([0.2, 0.5, 0.3])] * 2
        dense = floor(rows(workload), kron(weights))
        least = [union_floor(workload, weights, [width]) for width in range(3)]
        assert max(least) <= dense * (1 + 1e-9)
        assert least[2] == pytest.approx(dense, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "kind", "part"),
    [([10] * 20, "range", 0.98), ([10] * 20, "prefix", 0.96), ([100] * 3, "range", 0.98),
     ([100] * 5, "range", 0.98), ([100] * 5, "prefix", 0.97)],
)  # fmt: skip
def test_large_domains(sizes: list[int], kind: str, part: float) -> None:
    plan = auto(marginals(attributes(*sizes), [2], kind))
    assert part <= math.sqrt(plan.floor / plan.error) <= 1


@pytest.mark.parametrize("name", small())
def test_auto_says_how_far_it_is_from_the_floor(name: str) -> None:
    workload = small()[name]
    plan = auto(workload)
    assert plan.gap <= 1e-3 and plan.note == ""
    assert plan.strategy.error(workload) == pytest.approx(plan.error, rel=1e-6)


@pytest.mark.parametrize("name", small())
def test_relative_counts_each_query_by_its_size(name: str) -> None:
    workload = small()[name].relative()
    plan = auto(small()[name], "relative")
    assert plan.objective == "relative"
    assert plan.strategy.error(workload) == pytest.approx(plan.error, rel=1e-6)
    assert plan.floor <= optimum(workload, 1e-4).error <= plan.error * (1 + 1e-4)


@pytest.mark.parametrize("name", ["example", "prefixes", "a product", "tables"])
def test_worst_is_no_better_than_the_total_in_the_mean(name: str) -> None:
    workload = small()[name]
    plan, total = auto(workload, "worst", 1e-2), auto(workload)
    largest = max(variances.max() for variances in total.strategy.variances(workload))
    assert total.error / workload.weight * (1 - 2e-3) <= plan.error <= largest * 1.011
    assert plan.gap <= 1e-2 and plan.strategy.error(workload) >= total.floor * (1 - 1e-9)


def test_a_union_too_large_for_a_floor_says_so() -> None:
    workload = marginals(attributes(16, 24, 32), [2], "range")
    plan = auto(workload)
    assert plan.note == LARGE and plan.strategy.name == "fitted"
    assert plan.floor < plan.error <= residual(workload)[1]
    # It is a floor: on a grid that one matrix is solved for, the optimum is above it.
    coarse = marginals(attributes(4, 6, 8), [2], "range")
    assert floor_of(coarse) <= optimum(coarse).floor


def test_certificates_reach_the_reader() -> None:
    workload = small()["predicates"]
    plan = auto(workload)
    assert plan.floor <= floor(rows(workload), plan.certificate[0]) * (1 + 1e-9)


def test_cells_themselves_and_tables_of_large_domains() -> None:
    cells = over([300, 300, 300], ["identity"] * 3)
    plan = auto(cells)
    assert plan.strategy.name == "identity" and plan.error == plan.floor == 27e6
    assert plan.strategy.error(cells) == pytest.approx(27e6)
    table = over([100, 60_000], ["identity", "total"])
    assert auto(table).error == pytest.approx(100) and auto(table).gap == 0


def test_many_ranges_of_many_attributes() -> None:
    workload = marginals(attributes(*[10] * 40), [3], "range")
    plan = auto(workload)
    assert plan.note == LARGE and plan.strategy.name == "fitted"
    assert plan.strategy.error(workload) == pytest.approx(plan.error)


def test_objectives_there_are() -> None:
    with pytest.raises(UsageError, match="objective"):
        auto(small()["ranges"], "secret")


def test_an_attribute_too_large_to_list_its_queries_is_refused_at_once() -> None:
    # Nearly 2 billion ranges: their list alone would take 30 GB.
    with (
        mock.patch.object(module, "residual", side_effect=AssertionError),
        pytest.raises(UsageError, match="8192"),
    ):
        auto(over([60_000, 60_000], ["range", "total"]))


def long_unions() -> dict[str, Workload]:
    """Unions over an attribute of 40 cells, which is long where `at_most` says so."""
    both = [of_size("a", 40), of_size("b", 3)]
    ranges, prefixes = interval("range", 40), interval("prefix", 40)
    width, cells = interval("width", 40, 5), interval("identity", 40)
    relative = interval("range", 40, relative=True)
    return {
        "one attribute": workload_of(both[:1], [(1.0, {0: ranges}), (5.0, {0: prefixes})]),
        "with a total": workload_of(both[:1], [(1.0, {0: prefixes}), (9.0, {})]),
        "two kinds": workload_of(
            both, [(1.0, {0: ranges, 1: interval("identity", 3)}), (1.0, {0: prefixes})]
        ),
        "attributes apart": workload_of(
            both, [(1.0, {0: ranges}), (2.0, {1: interval("range", 3)}), (1.0, {})]
        ),
        "windows": workload_of(both, [(1.0, {0: width}), (1.0, {1: interval("prefix", 3)})]),
        "cells": workload_of(both, [(1.0, {0: cells}), (1.0, {1: interval("prefix", 3)})]),
        "relative": workload_of(both, [(1.0, {0: relative}), (1.0, {0: cells})]),
        "two long": workload_of(
            [of_size("a", 40), of_size("b", 30)],
            [(1.0, {0: ranges}), (1.0, {1: interval("prefix", 30)})],
        ),
        "written out": workload_of(
            both, [(1.0, {0: explicit([[1.0, -1.0] * 20, [-2.0] * 40], 40)}), (1.0, {0: prefixes})]
        ),
    }  # fmt: skip


#: How far the strategy is from the optimum, where more is known than all cells.
_NEAR = {"one attribute": 1.025, "with a total": 1.05, "two kinds": 1.05, "attributes apart": 1.35}
#: Unions for which no product is made.
_OTHER = ("relative", "cells", "two long", "written out")


@pytest.mark.parametrize("name", long_unions())
def test_an_attribute_of_very_many_cells(name: str) -> None:
    """Errors are those of the strategy, and the floor is one, by the optimum of all cells."""
    workload = long_unions()[name]
    with (
        mock.patch.object(module, "MANY_CELLS", 20),
        mock.patch.object(products_module, "MANY_CELLS", 20),
        mock.patch.object(module, "optimum", side_effect=AssertionError),
        mock.patch.object(module, "fit", side_effect=AssertionError),
    ):
        plan = auto(workload)
    assert plan.note == LONG
    variances = plan.strategy.variances(workload)  # of the inverse
    total = sum(
        product.weight * float(each.sum())
        for product, each in zip(workload.products, variances, strict=True)
    )
    assert plan.error == pytest.approx(total, rel=1e-6)
    best = optimum(workload, 1e-4)
    assert 0 < plan.floor <= best.floor * (1 + 1e-6) and best.floor <= plan.error * (1 + 1e-9)
    assert plan.error <= identity(workload).error(workload)
    assert (plan.strategy.name == "product") == (
        name not in ("relative", "cells", "two long", "written out")
    )
    assert plan.error <= best.error * _NEAR.get(name, math.inf)


@pytest.mark.parametrize("name", STRATEGIES[1:])
def test_every_strategy_of_a_small_domain(name: str) -> None:
    workload = small()["ranges"]
    strategy = named(workload, name)
    assert strategy.name == name
    assert largest(workload, strategy) == pytest.approx(
        max(variances.max() for variances in strategy.variances(workload))
    )


def test_a_strategy_is_refused_where_it_cannot_be_made() -> None:
    workload = marginals(attributes(*[10] * 20), [2], "range")
    for name in ("optimum", "eigen"):
        with pytest.raises(UsageError):
            named(workload, name)
    assert named(over([100] * 3, ["range"] * 3), "optimum").sensitivity2 > 0


def test_the_largest_variance_without_a_list_of_queries() -> None:
    workload = over([100] * 3, ["range"] * 3)  # 128,787,625,000 queries
    assert largest(workload, identity(workload)) == pytest.approx(100.0**3)
    with pytest.raises(UsageError):
        largest(workload, residual(workload)[0])
