"""Tables in closed form against matrices and published figures.

Fitted residual tables against dense matrices, a numeric optimiser and published figures.

Bases of attributes against fractions and dense matrices.
"""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from scipy.optimize import minimize

from dpstream.accounting.arrays import Float64, kron
from dpstream.accounting.errors import InvariantError
from dpstream.accounting.strategies.cells.auto import Plan
from dpstream.accounting.strategies.cells.bases import (
    Basis,
    Even,
    Fitted,
    bits_of,
    cost2,
    difference_matrix,
    difference_norm2,
    difference_root,
    fitted,
    reduced,
    restored,
    table_bits,
)
from dpstream.accounting.strategies.cells.fitted import FittedTables, fit, weighed
from dpstream.accounting.strategies.cells.optimum import optimum
from dpstream.accounting.strategies.cells.residual import (
    Residual,
    residual,
    spaces_of,
    worst_table,
)
from dpstream.accounting.strategies.cells.stored import from_arrays, to_arrays
from dpstream.accounting.workloads.attributes import explicit, interval
from dpstream.accounting.workloads.workload import Workload, marginals, over, workload_of
from tests.accounting.strategies.cells.shapes import (
    ADULT,
    attributes,
    rows,
    singular_bound,
    small,
)
from tests.bench.paper.cell_baselines import tables
from tests.golden.refusals import Refused

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


def test_refusals(refused: Refused) -> None:
    refused(lambda: spaces_of(marginals(attributes(*[2] * 26), [25])))
    refused(lambda: worst_table(small()["range marginals"]))


def test_the_worst_error_is_that_of_its_strategy() -> None:
    for tolerance in (0.3, 1e-2, 1e-4):
        solution = worst_table(SMALL, tolerance)
        means = solution.strategy.gram.means(SMALL)
        assert solution.error == pytest.approx(solution.strategy.sensitivity2 * means.max())


def test_the_sensitivity_is_rounded_up() -> None:
    gram = residual(SMALL)[0].gram
    assert isinstance(gram, Residual)
    pairs = zip(gram.y.tolist(), gram.dims.tolist(), strict=True)
    exact = sum(Fraction(y) * Fraction(dim) for y, dim in pairs)
    assert exact <= Fraction(gram.sensitivity2) <= exact * (1 + Fraction(1, 2**39))


def mixed() -> Workload:
    """Factors of all kinds, two of one attribute, and one cell that says nothing."""
    domain = attributes(4, 5, 1, 3)
    return workload_of(
        domain,
        [(1.0, {0: interval("range", 4), 1: interval("prefix", 5)}),
         (2.0, {1: interval("range", 5), 3: interval("identity", 3)}),
         (0.5, {0: interval("range", 4), 2: interval("identity", 1)}), (1.0, {})],
    )  # fmt: skip


WORKLOADS = {
    "ranges": marginals(attributes(4, 4, 4), [2], "range"),
    "prefixes": marginals(attributes(5, 5, 5), [2], "prefix"),
    "three": marginals(attributes(3, 4, 3, 2), [3, 1], "prefix"),
    "mixed": mixed(),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_errors_and_sensitivity_are_those_of_the_matrix(name: str) -> None:
    workload = WORKLOADS[name]
    actual = fit(workload)
    gram = actual.strategy.gram
    assert isinstance(gram, FittedTables)
    matrix, queries = gram.dense(), rows(workload)
    inverse = np.linalg.pinv(matrix, rcond=1e-11, hermitian=True)
    assert np.allclose(queries @ inverse @ matrix, queries)  # all that is asked is measured
    variances = np.diag(queries @ inverse @ queries.T)
    weights = np.concatenate([np.full(p.rows, p.weight) for p in workload.products])
    flat = np.concatenate(gram.variances(workload))
    np.testing.assert_allclose(flat * weights, variances, rtol=1e-6)
    np.testing.assert_allclose(gram.means(workload), [v.mean() for v in gram.variances(workload)])
    assert np.diag(matrix).max() <= gram.sensitivity2 <= 1 + 1e-9
    assert actual.strategy.error(workload) == pytest.approx(actual.error, rel=1e-9)
    assert gram.sensitivity2 * variances.sum() == pytest.approx(actual.error, rel=1e-6)
    # Between the optimum and what even bases reach.
    assert optimum(workload).floor <= actual.error <= residual(workload)[1] * (1 + 1e-9)


@pytest.mark.parametrize("name", WORKLOADS)
def test_weights_are_the_best_of_these_bases(name: str) -> None:
    workload = WORKLOADS[name]
    gram = fit(workload).strategy.gram
    assert isinstance(gram, FittedTables)
    alone = [
        FittedTables(gram.sizes, gram.keys, np.where(np.arange(len(gram.keys)) == k, 1.0, 1e9),
                     gram.bases).trace(workload)
        for k in range(len(gram.keys))
    ]  # fmt: skip
    start = np.zeros(len(gram.keys))

    def error(logits: np.ndarray) -> float:
        y = np.exp(logits)
        return float((np.array(alone) / y).sum() * (y * gram.costs).sum())

    actual = minimize(error, start, method="BFGS")
    assert weighed(workload, gram.bases)[1] == pytest.approx(actual.fun, rel=1e-4)


def test_even_bases_are_the_plain_tables() -> None:
    workload = WORKLOADS["ranges"]
    strategy, error = weighed(workload, tuple(map(Even, workload.sizes)))
    assert error == pytest.approx(residual(workload)[1])
    for one, other in zip(
        strategy.variances(workload), residual(workload)[0].variances(workload), strict=True
    ):
        np.testing.assert_allclose(one, other)


def test_fitted_the_sensitivity_is_rounded_up() -> None:
    gram = fit(WORKLOADS["prefixes"]).strategy.gram
    assert isinstance(gram, FittedTables)
    exact = sum(
        Fraction(y) * math.prod([Fraction(gram.bases[axis].norm2) for axis in key])
        for y, key in zip(gram.y.tolist(), gram.keys, strict=True)
    )
    assert exact <= Fraction(gram.sensitivity2) <= exact * (1 + Fraction(1, 2**38))
    np.testing.assert_allclose(gram.noise2 * gram.y, gram.sensitivity2)


def test_stored() -> None:
    workload = WORKLOADS["mixed"]
    actual = fit(workload)
    plan = Plan(actual.strategy, "total", actual.error, actual.error, actual.weights)
    again = from_arrays(to_arrays(plan, workload.structure), workload.structure)
    assert isinstance(again.strategy.gram, FittedTables)
    assert again.strategy.error(workload) == actual.strategy.error(workload)
    assert [b.canonical() for b in again.strategy.gram.bases] == [
        b.canonical() for b in actual.strategy.gram.bases  # type: ignore[attr-defined]
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "kind", "most"),
    # ResidualPlanner+ has 21.79, 19.34, 10.28, 17.47.
    [([10] * 20, "range", 21.27), ([10] * 20, "prefix", 17.46), ([100] * 3, "range", 10.03),
     ([100] * 5, "range", 17.24)],
)  # fmt: skip
def test_figures(sizes: list[int], kind: str, most: float) -> None:
    workload = marginals(attributes(*sizes), [2], kind)
    result = fit(workload)
    assert most * 0.99 <= math.sqrt(result.error / workload.weight) <= most


def test_fewer_cells_say_how_often_the_total_is_asked() -> None:
    """Above 512 cells the basis starts from that of fewer."""
    workload = marginals(attributes(520, 520), [2, 1], "range")
    result = fit(workload)
    assert result.error < residual(workload)[1] / 20
    assert result.strategy.error(workload) == pytest.approx(result.error, rel=1e-9)


def test_cells_of_tables_of_counts_are_measured_evenly() -> None:
    gram = fit(WORKLOADS["mixed"]).strategy.gram
    assert isinstance(gram, FittedTables)
    assert [type(basis) for basis in gram.bases] == [Fitted, Fitted, Even, Even]


@pytest.mark.parametrize(("name", "loss"), [("ranges", 1.02), ("prefixes", 1.02)])
def test_close_to_the_optimum_of_all_cells(name: str, loss: float) -> None:
    workload = WORKLOADS[name]
    assert fit(workload).error <= optimum(workload).error * loss


def test_no_other_basis_tried_at_random_is_better() -> None:
    workload = WORKLOADS["prefixes"]
    result, rng = fit(workload), np.random.default_rng(6)
    gram = result.strategy.gram
    assert isinstance(gram, FittedTables)
    for _ in range(30):
        bases = []
        for basis in gram.bases:
            assert isinstance(basis, Fitted)
            moved = np.eye(5) + rng.normal(size=(5, 5)) * 0.02
            # A strategy near the one that the basis is of.
            matrix = np.linalg.inv(basis.covariance + np.outer(basis.spread, basis.spread))
            bases.append(fitted(moved.T @ matrix @ moved, 14))
        assert weighed(workload, tuple(bases))[1] >= result.error * (1 - 1e-3)


@pytest.mark.parametrize("sizes", [(), (5,), (2, 3), (4, 1), (3, 4, 5)])
def test_differences_are_those_of_the_matrix_and_come_back(sizes: tuple[int, ...]) -> None:
    table = np.random.default_rng(1).integers(0, 10**9, sizes)
    bases = [Even(n) for n in sizes]
    measured = reduced(table, bases)
    sub = kron([difference_matrix(n) for n in sizes]) if sizes else np.ones((1, 1))
    assert measured.dtype == np.int64 and np.array_equal(measured.ravel(), sub @ table.ravel())
    centred = kron([np.eye(n) - 1 / n for n in sizes]) if sizes else np.ones((1, 1))
    back = restored(measured.astype(np.float64), bases)
    assert back.shape == table.shape and np.allclose(back.ravel(), centred @ table.ravel())


def exact_difference_norm2(size: int) -> Fraction:
    """max_c |L^-1 Sub e_c|^2 of the very floats of L."""
    lower = [[Fraction(x) for x in row] for row in difference_root(size).tolist()]
    longest = Fraction(0)
    for column in difference_matrix(size).T.tolist():
        solved: list[Fraction] = []
        for i, row in enumerate(lower):
            rest = Fraction(column[i]) - sum((row[j] * solved[j] for j in range(i)), Fraction(0))
            solved.append(rest / row[i])
        longest = max(longest, sum((x * x for x in solved), Fraction(0)))
    return longest


@pytest.mark.parametrize("size", [2, 3, 7, 16])
def test_sensitivity_of_differences_is_bounded_from_above_and_closely(size: int) -> None:
    exact = exact_difference_norm2(size)
    assert exact <= Fraction(difference_norm2(size)) <= exact * (1 + Fraction(1, 10**11))
    assert difference_norm2(size) == pytest.approx(1 - 1 / size, rel=1e-11)
    assert np.allclose(
        difference_root(size) @ difference_root(size).T,
        difference_matrix(size) @ difference_matrix(size).T,
    )


def test_costs_multiply() -> None:
    assert cost2([]) == 1
    assert (
        cost2([Even(3), Even(4)]) == pytest.approx(2 / 3 * 3 / 4)
        and cost2([Even(3), Even(4)]) >= 0.5
    )
    assert difference_norm2(500) == pytest.approx(1 - 1 / 500, rel=1e-8)


def strategy(size: int, seed: int = 0) -> Float64:
    """A positive definite matrix of unit diagonal."""
    rows = np.random.default_rng(seed).normal(size=(2 * size, size)) + 1.0
    measured = rows.T @ rows
    return np.asarray(measured / np.sqrt(np.outer(np.diag(measured), np.diag(measured))))


def moves(basis: Basis) -> list[list[Fraction]]:
    """Rows of M."""
    columns = [basis.reduced(cell, 0).tolist() for cell in np.eye(basis.size, dtype=np.int64)]
    return [[Fraction(c[k], 1 << basis.bits) for c in columns] for k in range(basis.size - 1)]


def exact_norm2(basis: Basis) -> Fraction:
    """max_c |L^-1 M e_c|^2 of the very floats of L."""
    lower = [[Fraction(x) for x in row] for row in basis.root.tolist()]
    longest = Fraction(0)
    for column in zip(*moves(basis), strict=True):
        solved: list[Fraction] = []
        for i, row in enumerate(lower):
            rest = column[i] - sum((row[j] * solved[j] for j in range(i)), Fraction(0))
            solved.append(rest / row[i])
        longest = max(longest, sum((x * x for x in solved), Fraction(0)))
    return longest


BASES = [
    Even(4), Even(2), fitted(strategy(2), 12), fitted(strategy(5), 12), fitted(strategy(7, 1), 3),
]  # fmt: skip


@pytest.mark.parametrize("basis", BASES)
def test_a_table_is_its_total_spread_and_what_is_measured(basis: Basis) -> None:
    table = np.random.default_rng(2).integers(0, 10**6, (3, basis.size))
    measured = basis.reduced(table, 1)
    assert measured.dtype == np.int64 and measured.shape == (3, basis.size - 1)
    back = basis.restored(measured.astype(np.float64) * 2.0**-basis.bits, 1)
    assert np.allclose(back + table.sum(1)[:, None] * basis.spread, table)
    assert basis.spread.sum() == pytest.approx(1, abs=1e-15)


@pytest.mark.parametrize("basis", BASES)
def test_queries_are_unbiased_and_have_their_variance(basis: Basis) -> None:
    """Of w x = (w g) total + u M x, u found by solving for it."""
    n, rng = basis.size, np.random.default_rng(3)
    matrix = np.array([[float(x) for x in row] for row in moves(basis)])
    for factor in (
        interval("range", n),
        interval("prefix", n),
        explicit(rng.normal(size=(4, n)), n),
    ):
        queries = factor.dense()
        along = queries @ basis.spread
        u, *_ = np.linalg.lstsq(matrix.T, (queries - along[:, None]).T, rcond=None)
        assert np.allclose(u.T @ matrix + along[:, None], queries)
        variances = ((u.T @ basis.root) ** 2).sum(1)
        assert np.allclose(basis.rest(factor), variances)
        assert np.allclose(basis.along(factor), along**2)
        assert basis.masses(factor) == pytest.approx(((along**2).sum(), variances.sum()))


def test_a_fitted_basis_is_what_a_strategy_measures_beside_the_total() -> None:
    matrix = strategy(6)
    basis = fitted(matrix, 14)
    inverse = np.linalg.inv(matrix)
    total = 1 / inverse.sum()
    assert np.allclose(basis.spread, total * inverse.sum(0), atol=2**-13)
    factor = interval("range", 6)
    both = np.array([w @ inverse @ w for w in factor.dense()])
    assert np.allclose(basis.rest(factor) + basis.along(factor) / total, both, rtol=1e-3)
    assert basis.norm2 == pytest.approx(1 - total, rel=1e-3)


@pytest.mark.parametrize("basis", BASES)
def test_sensitivity_is_bounded_from_above_and_closely(basis: Basis) -> None:
    exact = exact_norm2(basis)
    assert exact <= Fraction(basis.norm2) <= exact * (1 + Fraction(1, 10**9))


def test_less_noise_than_was_measured_is_seen() -> None:
    """A basis that is fitted well but for a hair of its noise."""
    basis = fitted(strategy(5), 12)
    less = Fitted(basis.shares, basis.bits, basis.lower * (1 - 2.0**-30))
    assert exact_norm2(less) > Fraction(basis.norm2)
    # The sensitivity of X less its total is not that of what is measured with g in whole units.
    coarse = fitted(strategy(5), 2)
    total = 1 / np.linalg.inv(strategy(5)).sum()
    assert abs(float(exact_norm2(coarse)) - (1 - total)) > 1e-3


@pytest.mark.parametrize("seed", range(6))
def test_sensitivity_is_bounded_where_its_floats_cancel(seed: int) -> None:
    """(a c / 3 - b) / d in the longest column of L^-1, a c / 3 and b far larger than their rest."""
    a, c = np.random.default_rng(seed).uniform(1, 2, 2) * (1e5, 1)
    lower = np.array([[1.0, 0.0, 0.0], [a, 3.0, 0.0], [a * c / 3 - 20.0, c, 1e-5]])
    basis = Fitted(np.array([3, 1, 2, 2]), 3, lower)
    assert exact_norm2(basis) <= Fraction(basis.norm2) <= exact_norm2(basis) * 2


NEARLY_SINGULAR = np.array([[1.0, 0.0], [1e9, 1e-9]])


@pytest.mark.parametrize(
    "lower", [np.diag([1.0, 0.0]), np.diag([1.0, np.nan]), NEARLY_SINGULAR], ids=str
)
def test_noise_that_misses_a_direction_is_refused(lower: Float64) -> None:
    """Also where floats do not show that it has all of them."""
    with pytest.raises(InvariantError):
        Fitted(np.array([1, 1, 2]), 2, lower).norm2  # noqa: B018


def test_the_cost_of_a_table_is_rounded_up() -> None:
    for bases in itertools.product(BASES, repeat=3):
        exact = math.prod(Fraction(basis.norm2) for basis in bases)
        assert exact <= Fraction(cost2(bases)) <= exact * (1 + Fraction(1, 10**12))


def test_each_number_of_a_basis_names_its_noise() -> None:
    """Another split of a total, or another covariance, is other noise."""
    lower = np.array([[1.0, 0.0], [0.25, 2.0]])
    bases = [
        Fitted(np.array([1, 1, 2]), 2, lower),
        Fitted(np.array([1, 2, 1]), 2, lower),
        Fitted(np.array([2, 2, 4]), 3, lower),
        Fitted(np.array([1, 1, 2]), 2, lower * (1 + 2.0**-52)),
    ]
    assert len({basis.canonical() for basis in bases}) == len(bases)


def test_products() -> None:
    bases = [Even(3), fitted(strategy(4), 5)]
    table = np.random.default_rng(5).integers(0, 99, (3, 4))
    measured = reduced(table, bases)
    matrix = np.kron(*(np.array(moves(b), np.float64) for b in bases))
    assert np.array_equal(measured.ravel() / 2.0 ** table_bits(bases), matrix @ table.ravel())
    back = restored(measured / 2.0 ** table_bits(bases), bases)
    centred = [np.eye(b.size) - np.outer(b.spread, np.ones(b.size)) for b in bases]
    assert np.allclose(back.ravel(), np.kron(*centred) @ table.ravel())
    assert cost2(bases) == pytest.approx(bases[0].norm2 * bases[1].norm2) and cost2([]) == 1
    assert [bits_of(way) for way in (0, 1, 2, 3, 24)] == [14, 14, 12, 8, 1]
    assert len({basis.canonical() for basis in BASES}) == len(BASES)
