"""The optimum against a general solver; certificates by other code.

The eigen-design, its completion and its cheaper variants.

The climb reaches the optimum, and each gap on its way is true.

Even and odd blocks are the same matrix in another basis.
"""

import itertools
import math
from collections.abc import Callable, Iterable

import numpy as np
import pytest
from scipy.optimize import minimize

from dpstream.accounting.arrays import Float64, kron
from dpstream.accounting.strategies.cells.climb import Point, Slopes, climb
from dpstream.accounting.strategies.cells.eigen import (
    Vectors,
    Weights,
    completed,
    designed,
    eigen,
    root,
    spectrum,
    weigh,
)
from dpstream.accounting.strategies.cells.folding import Folding, folding_of
from dpstream.accounting.strategies.cells.optimum import optimum, refined_weights, worst
from dpstream.accounting.strategies.cells.residual import worst_table
from dpstream.accounting.strategies.cells.strategy import Blocks, dense_gram
from dpstream.accounting.workloads.workload import marginals, of_matrix, over
from tests.accounting.strategies.cells.shapes import (
    EXAMPLE4,
    attributes,
    floor,
    rows,
    singular_bound,
    small,
)
from tests.bench.paper.fewer_weights import Columns, Sines, principal, separation, squares
from tests.golden.refusals import Refused


def dense_oracle(queries: Float64, seed: int = 0) -> float:
    """Least tr(V (A^T A)^-1) over square A of unit columns, by a general solver on A itself."""
    v, n = queries.T @ queries, queries.shape[1]

    def value(flat: Float64) -> tuple[float, Float64]:
        raw = flat.reshape(n, n)
        norms = np.linalg.norm(raw, axis=0)
        a = raw / norms
        inverse = np.linalg.inv(a.T @ a + 1e-9 * np.eye(n))
        slope = -2 * a @ inverse @ v @ inverse
        slope = (slope - a * (a * slope).sum(0)) / norms
        return float(np.trace(v @ inverse)), slope.ravel()

    start = np.random.default_rng(seed).normal(size=n * n) * 0.1 + np.eye(n).ravel()
    options = {"maxiter": 20_000}
    return float(minimize(value, start, jac=True, method="L-BFGS-B", options=options).fun)


@pytest.mark.parametrize("name", ["example", "ranges", "odd ranges", "prefixes", "predicates"])
def test_against_a_general_solver(name: str) -> None:
    workload = small()[name]
    solved, other = optimum(workload, 1e-5), dense_oracle(rows(workload))
    assert solved.floor * (1 - 1e-4) <= other
    assert solved.error <= other * (1 + 1e-4)


@pytest.mark.parametrize("name", small())
def test_certificates_hold_by_other_code(name: str) -> None:
    workload = small()[name]
    solved = optimum(workload)
    [certificate] = solved.certificate
    assert solved.gap <= 1e-3
    assert solved.floor <= floor(rows(workload), certificate) * (1 + 1e-9)
    gram, queries = solved.strategy.gram, rows(workload)
    assert isinstance(gram, Blocks)
    matrix = gram.dense()
    error = np.diag(matrix).max() * np.trace(
        queries @ np.linalg.pinv(matrix, rcond=1e-12) @ queries.T
    )
    assert error == pytest.approx(solved.error, rel=1e-4)
    assert solved.strategy.error(workload) == pytest.approx(solved.error, rel=1e-6)
    assert (np.linalg.eigvalsh(matrix) > -1e-9).all()


@pytest.mark.parametrize("name", small())
def test_never_worse_than_the_eigen_design(name: str) -> None:
    workload, eigensystem = small()[name], spectrum(small()[name])
    error = optimum(workload, 1e-4).error
    assert error <= min(eigen(eigensystem).error(workload), root(eigensystem).error(workload)) * (
        1 + 1e-4
    )


def test_the_order_of_cells_does_not_matter() -> None:
    matrix = rows(over([10], ["prefix"]))
    order = np.random.default_rng(1).permutation(10)
    one, other = optimum(of_matrix(matrix), 1e-7), optimum(of_matrix(matrix[:, order]), 1e-7)
    assert one.error == pytest.approx(other.error, rel=2e-7)


@pytest.mark.parametrize("ways", [1, 2])
def test_rank_deficient_unions(ways: int) -> None:
    solved = optimum(marginals(attributes(4, 3, 5), [ways], "range"), 1e-3)
    assert solved.gap <= 1e-3 and solved.steps <= 60


def test_a_finer_grid_begins_near_its_optimum() -> None:
    for kind in ("range", "prefix"):
        solved = optimum(over([1024], [kind]))
        assert solved.gap <= 1e-3 and solved.steps <= 3
    weights = np.array([4.0, 2.0, 1.0, 1.0]) / 8
    assert refined_weights(weights, 4) == pytest.approx(weights)
    assert (
        refined_weights(weights, 64).sum() == pytest.approx(1)
        and (np.diff(refined_weights(weights, 64)) <= 0).all()
    )


def test_the_worst_prefix_of_256() -> None:
    solution = worst(over([256], ["prefix"]))
    assert math.sqrt(solution.error) <= 2.536 and solution.gap <= 1e-3


@pytest.mark.parametrize("name", ["example", "ranges", "prefixes", "range marginals", "a product"])
def test_certificates_of_worst_hold_by_other_code(name: str) -> None:
    workload = small()[name]
    solution = worst(workload, 2e-2)
    m, p = (kron(list(solution.certificate[k::2])) for k in (0, 1))
    assert p.min() >= 0 and p.sum() <= 1 + 1e-12 and solution.gap <= 2e-2
    assert solution.floor <= floor(rows(workload) * np.sqrt(p)[:, None], m) * (1 + 1e-9)
    variances = np.concatenate(solution.strategy.variances(workload))
    assert variances.max() == pytest.approx(solution.error, rel=1e-6)


def test_tables_agree_with_their_closed_form() -> None:
    workload = small()["tables"]
    assert worst(workload, 1e-3).error == pytest.approx(worst_table(workload).error, rel=2e-3)


def test_too_many_queries(refused: Refused) -> None:
    refused(lambda: worst(over([512], ["range"])))


@pytest.mark.parametrize("size", [1, 2, 7, 16, 33])
def test_sines_are_the_eigenvectors_of_all_ranges(size: int) -> None:
    basis, gram = Sines(size), over([size], ["range"]).gram()
    j = np.arange(1, size + 1)
    q = np.sqrt(2 / (size + 1)) * np.sin(np.pi * np.outer(j, j) / (size + 1))
    np.testing.assert_allclose(q @ gram @ q, np.diag(basis.eigenvalues()), atol=1e-8)
    u = np.random.default_rng(0).random(size)
    np.testing.assert_allclose(basis.norms(u), q**2 @ u, atol=1e-12)
    np.testing.assert_allclose(basis.spread(u), (q**2).T @ u, atol=1e-12)
    np.testing.assert_allclose(squares(basis), q**2, atol=1e-12)


@pytest.mark.parametrize("name", ["example", "odd ranges", "range marginals", "prefixes"])
def test_vectors_of_blocks(name: str) -> None:
    eigensystem = spectrum(small()[name])
    basis = Vectors(eigensystem.folding, eigensystem.vectors)
    b = squares(basis)
    u = np.random.default_rng(0).random(basis.vectors)
    nu = np.random.default_rng(1).random(basis.cells)
    np.testing.assert_allclose(basis.norms(u), b @ u)
    np.testing.assert_allclose(basis.spread(nu), b.T @ nu)
    # Each vector has norm 1 over all cells.
    np.testing.assert_allclose(eigensystem.folding.counts @ b, 1.0)


@pytest.mark.parametrize("name", ["example", "ranges", "prefixes", "range marginals", "predicates"])
def test_program_1_against_a_general_solver(name: str) -> None:
    eigensystem = spectrum(small()[name])
    basis, c = Vectors(eigensystem.folding, eigensystem.vectors), eigensystem.values
    solved = weigh(basis, c, 1e-7)
    assert basis.norms(solved.u).max() == pytest.approx(1) and solved.gap <= 1e-7
    assert (c / solved.u).sum() == pytest.approx(solved.error)
    b = squares(basis)
    other = minimize(
        lambda u: (c / u).sum(),
        np.full(len(c), 0.3),
        jac=lambda u: -c / u**2,
        method="SLSQP",
        bounds=[(1e-4, 2)] * len(c),
        constraints={"type": "ineq", "fun": lambda u: 1 - b @ u, "jac": lambda u: -b},
        options={"maxiter": 500, "ftol": 1e-12},
    )
    assert solved.error <= other.fun * (1 + 1e-6) and other.fun >= solved.bound * (1 - 1e-4)


def test_queries_without_a_share_get_no_weight() -> None:
    solved = weigh(Columns(np.eye(3)), np.array([1.0, 0.0, 4.0]))
    assert solved.u[1] == 0 and solved.error == pytest.approx(5)
    # A bound that the dual does not prove would be caught here: each column alone can be 1.
    assert solved.bound <= 5 * (1 + 1e-12)


@pytest.mark.parametrize("name", small())
def test_the_bound_is_the_singular_values(name: str) -> None:
    workload = small()[name]
    assert spectrum(workload).bound == pytest.approx(singular_bound(rows(workload)))


@pytest.mark.parametrize("name", small())
def test_completion_raises_no_sensitivity_and_no_error(name: str) -> None:
    workload = small()[name]
    eigensystem = spectrum(workload)
    solved = weigh(Vectors(eigensystem.folding, eigensystem.vectors), eigensystem.values)
    done = designed(eigensystem, solved.u)
    assert done.sensitivity2 == pytest.approx(1)
    np.testing.assert_allclose(done.diagonal, done.diagonal[0])
    assert done.trace(workload) <= solved.error * (1 + 1e-9)


def test_completion_is_counted_in_the_sensitivity() -> None:
    bare = dense_gram(np.diag([1.0, 0.25]))
    done = completed(bare, ridge=0.5)
    assert done.sensitivity2 >= np.diag(done.dense()).max() == 1.5
    assert np.diag(completed(bare).dense()).tolist() == [1, 1]


def test_example_4() -> None:
    eigensystem = spectrum(of_matrix(EXAMPLE4))
    assert eigensystem.bound == pytest.approx(14.933, abs=5e-4)
    ratio = math.sqrt(eigen(eigensystem).error(of_matrix(EXAMPLE4)) / eigensystem.bound)
    assert 1.0 <= ratio <= 1.0180


def test_eigen_the_order_of_cells_does_not_matter() -> None:
    matrix = np.random.default_rng(0).integers(0, 2, (9, 7)) + 0.0
    order = np.random.default_rng(1).permutation(7)
    errors = [
        eigen(spectrum(w), 1e-6).error(w) for w in (of_matrix(matrix), of_matrix(matrix[:, order]))
    ]
    assert errors[0] == pytest.approx(errors[1], rel=1e-9)


@pytest.mark.parametrize(
    "make", [lambda b, c: separation(b, c, 4), lambda b, c: principal(b, c, 3)]
)
def test_fewer_weights_are_feasible_and_little_worse(
    make: Callable[[Vectors, Float64], Weights],
) -> None:
    eigensystem = spectrum(over([32], ["range"]))
    basis = Vectors(eigensystem.folding, eigensystem.vectors)
    best, fewer = weigh(basis, eigensystem.values, 1e-5), make(basis, eigensystem.values)
    assert basis.norms(fewer.u).max() <= 1 + 1e-12 and (fewer.u > 0).all()
    assert best.bound <= fewer.error <= 1.25 * best.error


def test_roots_of_the_eigenvalues() -> None:
    workload = over([16], ["prefix"])
    gram = root(spectrum(workload)).gram
    assert isinstance(gram, Blocks)
    values, vectors = np.linalg.eigh(workload.gram())
    plain = (vectors * np.sqrt(values)) @ vectors.T
    off = gram.dense() - plain
    np.testing.assert_allclose(off, np.diag(np.diag(off)), atol=1e-9)


def diagonal(v: Float64) -> Callable[[Float64], Slopes]:
    """F = sum of sqrt(v m), highest at m ~ v, where it is the root of the sum of v."""

    def dual(m: Float64) -> Slopes:
        roots = np.sqrt(v * m)
        return Slopes(float(roots.sum()), (roots / m,))

    return dual


def last(points: Iterable[Point]) -> Point:
    *_, point = points
    return point


@pytest.mark.parametrize("memory", [0, 20])
def test_a_diagonal_problem_takes_one_step(memory: int) -> None:
    v = np.array([1.0, 4.0, 9.0, 0.1])
    first, second, *_ = climb(diagonal(v), [np.ones(4)], memory=memory)
    assert first.slopes.gap > 0.1
    np.testing.assert_allclose(second.weights[0], v / v.sum(), rtol=1e-9)
    assert abs(second.slopes.gap) < 1e-9


@pytest.mark.parametrize("seed", range(3))
def test_values_rise_and_every_gap_is_true(seed: int) -> None:
    squares = np.random.default_rng(seed).normal(size=(30, 12)) ** 2

    def dual(m: Float64) -> Slopes:
        below = np.sqrt(squares.T @ m)
        return Slopes(float(below.sum()), (squares @ (1 / below),))

    points = list(climb(dual, [np.ones(30)], 300))
    values = [point.slopes.value for point in points]
    assert all(b > a for a, b in itertools.pairwise(values))
    assert points[-1].slopes.gap < 1e-6
    for point in points:
        assert point.weights[0].sum() == pytest.approx(1)
        assert float(point.weights[0] @ point.slopes.slopes[0]) == pytest.approx(point.slopes.value)
        # What the gap promises: no point has more than F sqrt(1 + gap).
        assert values[-1] ** 2 <= point.slopes.value**2 * (1 + point.slopes.gap) * (1 + 1e-12)


def test_two_simplices() -> None:
    table = np.random.default_rng(0).random((4, 5)) + 0.1

    def dual(m: Float64, p: Float64) -> Slopes:
        inner = m[:, None] * table * p
        roots = np.sqrt(inner.sum())
        return Slopes(float(roots), (table @ p / roots, m @ table / roots))

    point = last(climb(dual, [np.ones(4), np.ones(5)], 300))
    assert point.slopes.value**2 <= table.max()
    assert [w.sum() for w in point.weights] == pytest.approx([1, 1])


SHAPES = [
    ((6,), (True,)),
    ((7,), (True,)),
    ((1,), (True,)),
    ((5,), (False,)),
    ((3, 4), (True, True)),
    ((3, 4, 5), (True, False, True)),
    ((2, 1, 3), (True,) * 3),
]


@pytest.mark.parametrize(("sizes", "folded"), SHAPES)
def test_blocks_are_the_matrix_in_another_basis(
    sizes: tuple[int, ...], folded: tuple[bool, ...]
) -> None:
    rng, folding = np.random.default_rng(0), Folding(sizes, folded)
    grams = []
    for n, fold in zip(sizes, folded, strict=True):
        root = rng.normal(size=(n, n))
        gram = root @ root.T
        grams.append(gram + gram[::-1, ::-1] if fold else gram)
    matrix = kron(grams)
    blocks = [
        kron([folding.part(gram, axis, parity[axis]) for axis, gram in enumerate(grams)])
        for parity in folding.parities
    ]
    assert sum(map(len, blocks)) == folding.cells
    values = np.concatenate([np.linalg.eigvalsh(block) for block in blocks])
    np.testing.assert_allclose(np.sort(values), np.linalg.eigvalsh(matrix), rtol=1e-9)
    np.testing.assert_allclose(folding.unfold(blocks), matrix, atol=1e-9)
    diagonal = sum(
        np.bincount(orbits, np.diag(block), len(folding.counts))
        for orbits, block in zip(folding.orbits, blocks, strict=True)
    )
    np.testing.assert_allclose(
        folding.spread(diagonal / folding.counts), np.diag(matrix), rtol=1e-12
    )


@pytest.mark.parametrize(("sizes", "folded"), SHAPES)
def test_orbits_gather_what_they_spread(sizes: tuple[int, ...], folded: tuple[bool, ...]) -> None:
    folding = Folding(sizes, folded)
    values = np.random.default_rng(1).random(len(folding.counts))
    assert folding.counts.sum() == folding.cells
    np.testing.assert_allclose(folding.gather(folding.spread(values)), values * folding.counts)


def test_an_axis_is_folded_only_if_all_queries_allow_it() -> None:
    assert folding_of(over([4, 4], ["range", "prefix"])).folded == (True, False)
    assert folding_of(marginals(attributes(3, 4), [1, 2], "range")).folded == (True, True)
