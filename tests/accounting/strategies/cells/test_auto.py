"""The choice of a strategy is the best of all that are known.

Mixes of noise: bounds against balls and fractions, and singular ones refused.
"""

import math
from fractions import Fraction
from unittest import mock

import flint
import numpy as np
import pytest

from dpstream.accounting import mixing as engine
from dpstream.accounting.arrays import Float64, kron
from dpstream.accounting.balls import precision
from dpstream.accounting.errors import UsageError
from dpstream.accounting.strategies.cells import auto as module
from dpstream.accounting.strategies.cells import products as products_module
from dpstream.accounting.strategies.cells.auto import (
    LARGE,
    LONG,
    STRATEGIES,
    auto,
    largest,
    strategy_named,
    union_floor,
)
from dpstream.accounting.strategies.cells.fitted import fit
from dpstream.accounting.strategies.cells.mixing import inverse_norm2, matrices, mixed
from dpstream.accounting.strategies.cells.optimum import optimum
from dpstream.accounting.strategies.cells.products import floor_of
from dpstream.accounting.strategies.cells.residual import Residual, residual
from dpstream.accounting.strategies.cells.strategy import CellStrategy, dense_gram, identity
from dpstream.accounting.workloads.attributes import explicit, interval, of_size
from dpstream.accounting.workloads.workload import Workload, marginals, over, workload_of
from tests.accounting.strategies.cells.shapes import attributes, floor, rows, small
from tests.accounting.strategies.cells.test_residual import WORKLOADS
from tests.golden.refusals import Refused

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


def test_objectives_there_are(refused: Refused) -> None:
    refused(lambda: auto(small()["ranges"], "secret"))


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
    strategy = strategy_named(workload, name)
    assert strategy.name == name
    assert largest(workload, strategy) == pytest.approx(
        max(variances.max() for variances in strategy.variances(workload))
    )


def test_a_strategy_is_refused_where_it_cannot_be_made(refused: Refused) -> None:
    workload = marginals(attributes(*[10] * 20), [2], "range")
    for name in ("optimum", "eigen"):
        refused(strategy_named, workload, name)
    assert strategy_named(over([100] * 3, ["range"] * 3), "optimum").sensitivity2 > 0


def test_the_largest_variance_without_a_list_of_queries(refused: Refused) -> None:
    workload = over([100] * 3, ["range"] * 3)  # 128,787,625,000 queries
    assert largest(workload, identity(workload)) == pytest.approx(100.0**3)
    refused(lambda: largest(workload, residual(workload)[0]))


def by_balls(mix: Float64) -> float:
    """Largest squared column norm of the inverse, in balls, rounded up."""
    with precision(200):
        inverse = flint.arb_mat(mix.tolist()).inv()
        n = len(mix)
        sums = [
            sum((inverse[i, j] * inverse[i, j] for i in range(n)), flint.arb(0)) for j in range(n)
        ]
        return max(float(s.upper()) for s in sums)


@pytest.mark.parametrize("name", small())
def test_bounds_hold_in_balls(name: str) -> None:
    workload = small()[name]
    done = mixed(auto(workload).strategy, workload.sizes)
    exact = 1.0
    for factor in done.factors:
        exact *= by_balls(factor)
    assert exact <= done.inverse_norm2 * (1 + 1e-15)
    assert 1 - 1e-9 <= done.inverse_norm2 <= exact * (1 + 1e-6)


@pytest.mark.parametrize("name", small())
def test_the_mix_has_the_strategys_error_but_for_a_thousandth(name: str) -> None:
    workload = small()[name]
    plan = auto(workload)
    done = mixed(plan.strategy, workload.sizes)
    matrix = kron(list(done.factors))
    assert np.linalg.matrix_rank(matrix) == workload.cells
    error = done.inverse_norm2 * np.linalg.norm(rows(workload) @ matrix) ** 2
    gram = dense_gram(np.asarray(np.linalg.inv(matrix @ matrix.T), np.float64), workload.sizes)
    assert error == pytest.approx(gram.sensitivity2 * gram.trace(workload), rel=1e-6)
    axes = len(done.factors)
    assert plan.error * (1 - 1e-9) <= error <= plan.error * (1 + 1.01e-3) ** axes


@pytest.mark.parametrize("upper", [True, False])
def test_bounds_are_true_for_exact_inverses(upper: bool) -> None:
    rng = np.random.default_rng(5)
    mix = np.triu(rng.integers(1, 9, (6, 6))) if upper else rng.integers(-9, 9, (6, 6))
    exact = by_fractions(mix.tolist())
    bound = inverse_norm2(mix.astype(float))
    assert exact <= Fraction(bound) <= exact * Fraction(1 + 1e-6)


def by_fractions(mix: list[list[int]]) -> Fraction:
    """Gauss and Jordan on fractions."""
    n = len(mix)
    table = [
        [Fraction(v) for v in row] + [Fraction(i == j) for j in range(n)]
        for i, row in enumerate(mix)
    ]
    for k in range(n):
        pivot = next(i for i in range(k, n) if table[i][k])
        table[k], table[pivot] = table[pivot], table[k]
        table[k] = [v / table[k][k] for v in table[k]]
        for i in range(n):
            if i != k:
                table[i] = [a - table[i][k] * b for a, b in zip(table[i], table[k], strict=True)]
    return max(sum((table[i][n + j] ** 2 for i in range(n)), Fraction(0)) for j in range(n))


@pytest.mark.parametrize("seed", range(4))
def test_the_engines_own_bound_is_the_same(seed: int, refused: Refused) -> None:
    """Plans are certified here, mixes that come from elsewhere by ``accounting.mixing``: both bound
    the same number from above, closely, and refuse the same matrices."""
    rng = np.random.default_rng(seed)
    mix = rng.normal(size=(9, 9)) * 2.0 ** rng.integers(-3, 4, 9)
    mix = np.triu(mix) if seed % 2 else mix
    exact = by_balls(mix)
    for bound in (inverse_norm2(mix), engine.inverse_norm2(mix)):
        assert exact <= bound <= exact * (1 + 1e-6)
    singular = mix.copy()
    singular[:, 3] = singular[:, 5]
    refused(lambda: inverse_norm2(singular))
    refused(lambda: engine.inverse_norm2(singular))


def test_a_mix_that_is_no_inverse_is_refused(refused: Refused) -> None:
    """With it part of the exact counts would be published."""
    thin = np.random.default_rng(0).normal(size=(5, 3))
    bad = [
        np.zeros((3, 3)),
        np.diag([1.0, 0.0]),
        thin @ thin.T,
        np.diag([1.0, np.nan]),
        np.ones((2, 2)),
        np.ones((2, 3)),
        np.triu(np.ones((4, 4))) * [[1], [1], [1], [0]],
        np.diag([1, 1e-200]),
    ]
    for mix in bad[:-1]:
        refused(inverse_norm2, mix)
    nearly = np.eye(40) * 1e-3 + np.triu(np.full((40, 40), 1.0), 1)
    refused(lambda: inverse_norm2(nearly))


def test_the_bound_is_of_the_matrix_that_is_used() -> None:
    mix = mixed(auto(over([8], ["range"])).strategy, (8,)).factors[0]
    smaller = mix / 1.25
    assert inverse_norm2(smaller) == pytest.approx(1.25**2 * inverse_norm2(mix), rel=1e-9)


def mixed_in(strategy: CellStrategy, sizes: tuple[int, ...]) -> bool:
    """Whether X of a factor is another than the strategy's: the identity is mixed in."""
    given = [matrix / matrix.diagonal().max() for matrix in matrices(strategy, sizes)]
    used = [np.linalg.inv(factor @ factor.T) for factor in mixed(strategy, sizes).factors]
    return any(not np.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(given, used, strict=True))


def test_singular_strategies_are_mixed_with_the_identity() -> None:
    workload = marginals(attributes(3, 4, 2), [1])
    strategy = residual(workload)[0]
    assert mixed_in(strategy, workload.sizes)
    assert len(mixed(strategy, workload.sizes).factors) == 1
    assert not mixed_in(auto(over([8], ["range"])).strategy, (8,))
    strategy = auto(over([6, 4], ["range", "total"])).strategy
    assert mixed_in(strategy, (6, 4)) and len(mixed(strategy, (6, 4)).factors) == 2


def test_nearly_singular_strategies_are_too() -> None:
    """A completed optimum can be inverted, but what it hardly measures would drown in noise."""
    workload = small()["example"]
    strategy = auto(workload).strategy
    assert mixed_in(strategy, workload.sizes)
    assert np.abs(mixed(strategy, workload.sizes).factors[0]).max() <= 1e-3**-0.5


def test_what_rounding_may_hide_is_part_of_the_bound() -> None:
    steep = np.diag([1.0] * 20 + [1e-10])
    steep[:20, 20] = 1.0
    assert inverse_norm2(steep) >= by_balls(steep) * (1 + 1e-5)


def test_too_many_cells_for_one_matrix(refused: Refused) -> None:
    workload = marginals(attributes(100, 100), [1])
    refused(lambda: mixed(residual(workload)[0], workload.sizes))
    refused(lambda: mixed(identity(over([9000], ["identity"])), (9000,)))
    scaled = CellStrategy("x", dense_gram(7 * np.eye(3)))
    assert mixed(scaled, (3,)).inverse_norm2 == pytest.approx(1, abs=1e-9)


def test_an_inverse_that_is_less_exact_gives_no_smaller_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it leaves of the identity shortens the longest column by as much as may be."""
    mix = np.diag([0.25, 1.0, 1.0])[:, [1, 2, 0]]
    left_factor = np.zeros((3, 3))
    left_factor[2, 2] = 0.009  # row 2 of the inverse has the longest column's only number
    near = (np.eye(3) - left_factor) @ np.linalg.inv(mix)
    assert (near**2).sum(axis=0).max() == pytest.approx(16 * 0.991**2)
    monkeypatch.setattr(np.linalg, "inv", lambda _: near)
    assert 16 <= inverse_norm2(mix) <= 16 * (1 + 1e-9)


def test_what_floats_may_hide_of_the_rest_is_in_the_bound() -> None:
    """The inverse is exact, the rest found is 0: what is added are n units of |Y| |L|."""
    size, far = 40, 2.0**20
    mix = np.eye(size)
    mix[0, -1] = far
    hidden = size * 2.0**-53 * (size + far**2)
    assert inverse_norm2(mix) >= (1 + far**2) / (1 - hidden) ** 2


def test_below_the_diagonal_is_seen() -> None:
    assert inverse_norm2(np.array([[1.0, 0.0], [1.0, 1.0]])) == pytest.approx(2)


def test_what_is_mixed_in_is_a_thousandth_of_sensitivity_one(refused: Refused) -> None:
    workload = marginals(attributes(3, 4, 2), [1])
    strategy = residual(workload)[0]
    assert isinstance(strategy.gram, Residual)
    done, matrix = mixed(strategy, workload.sizes), strategy.gram.dense()
    mixture = 0.999 * matrix / matrix.diagonal().max() + 0.001 * np.eye(24)
    [factor] = done.factors
    np.testing.assert_allclose(np.linalg.inv(factor @ factor.T), mixture, atol=1e-10)
    assert mixture.diagonal().max() == pytest.approx(1)
    refused(lambda: matrices(identity(over([9000, 2], ["identity"] * 2)), (9000, 2)))
