"""The choice of a strategy is the best of all that are known."""

import math
from unittest import mock

import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.accounting.strategies.cells import auto as module
from dpstream.accounting.strategies.cells import products
from dpstream.accounting.strategies.cells.auto import LARGE, LONG, auto
from dpstream.accounting.strategies.cells.fixed import identity
from dpstream.accounting.strategies.cells.optimum import optimum
from dpstream.accounting.strategies.cells.products import floor_of
from dpstream.accounting.strategies.cells.residual import residual
from dpstream.accounting.workloads.attributes import of_size
from dpstream.accounting.workloads.factors import explicit, interval
from dpstream.accounting.workloads.workload import Workload, marginals, over, workload_of
from tests.accounting.strategies.cells.shapes import attributes, floor, rows, small


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
    with pytest.raises(PolicyError, match="objective"):
        auto(small()["ranges"], "secret")


def test_an_attribute_too_large_to_list_its_queries_is_refused_at_once() -> None:
    # Nearly 2 billion ranges: their list alone would take 30 GB.
    with (
        mock.patch.object(module, "residual", side_effect=AssertionError),
        pytest.raises(PolicyError, match="8192"),
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
        mock.patch.object(products, "MANY_CELLS", 20),
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
