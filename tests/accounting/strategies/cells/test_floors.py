"""Floors of unions: below the exact optimum, close to it, and seen to be false where they are."""

import math

import numpy as np
import pytest

from dpstream.accounting.arrays import Float64, kron
from dpstream.accounting.strategies.cells.auto import auto
from dpstream.accounting.strategies.cells.fitting import fit
from dpstream.accounting.strategies.cells.floors import union_floor
from dpstream.accounting.strategies.cells.optimum import optimum
from dpstream.accounting.workloads.factors import explicit, interval
from dpstream.accounting.workloads.workload import Workload, marginals, workload_of
from tests.accounting.strategies.cells.shapes import attributes, floor, rows
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
