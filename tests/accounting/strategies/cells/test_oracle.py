"""Optima against an independent solver of convex programs (Clarabel), which knows nothing of duals,
reflections or roots: the programs as they stand in the paper.

Matrices are vectors of their upper triangles, column by column, off-diagonals times sqrt 2.
"""

import clarabel
import numpy as np
import pytest
from scipy import sparse

from dpstream.accounting.strategies.cells.auto import auto
from dpstream.accounting.strategies.cells.eigen import Vectors, spectrum, weigh
from dpstream.accounting.strategies.cells.optimum import optimum
from dpstream.accounting.workloads.workload import Workload, marginals, of_matrix, over
from tests.accounting.strategies.cells.shapes import EXAMPLE4, attributes, predicates, rows
from tests.bench.paper.fewer_weights import Columns, Sines, squares

ROOT2 = np.sqrt(2)


def solved(cost, blocks) -> float:  # type: ignore[no-untyped-def]
    """The least cost @ x with b - A x in each block's cone."""
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    size = len(cost)
    matrix = sparse.vstack([sparse.csc_matrix(a) for a, _, _ in blocks]).tocsc()
    bound = np.concatenate([b for _, b, _ in blocks])
    nothing = sparse.csc_matrix((size, size))
    solution = clarabel.DefaultSolver(
        nothing, np.asarray(cost, float), matrix, bound, [cone for _, _, cone in blocks], settings
    ).solve()
    assert solution.status == clarabel.SolverStatus.Solved
    return float(solution.obj_val)


def program_1(squares, c) -> float:  # type: ignore[no-untyped-def]
    """min sum c_i / u_i under B u <= 1: 1 / u_i <= t_i is |(2, u_i - t_i)| <= u_i + t_i."""
    cells, count = squares.shape
    scaled = c / c.max()
    u, t = sparse.eye(count), sparse.eye(count)
    lines = sparse.hstack([sparse.csc_matrix(squares), sparse.csc_matrix((cells, count))])
    cones = sparse.vstack(
        [sparse.hstack([-u, -t]), sparse.hstack([-u, t]), sparse.csc_matrix((count, 2 * count))]
    ).tocsr()
    order = np.arange(3 * count).reshape(3, count).T.ravel()
    bound = np.concatenate([np.zeros(2 * count), np.full(count, 2.0)])[order]
    matrix = sparse.vstack([lines, cones[order]]).tocsc()
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    kinds = [clarabel.NonnegativeConeT(cells), *[clarabel.SecondOrderConeT(3)] * count]
    solution = clarabel.DefaultSolver(
        sparse.csc_matrix((2 * count, 2 * count)),
        np.concatenate([np.zeros(count), scaled]),
        matrix,
        np.concatenate([np.ones(cells), bound]),
        kinds,
        settings,
    ).solve()
    assert solution.status == clarabel.SolverStatus.Solved
    return float(solution.obj_val) * float(c.max())


@pytest.mark.parametrize(
    "workload",
    [over([64], ["range"]), over([48], ["prefix"]), marginals(attributes(4, 4, 5), [2], "range"),
     predicates(40), of_matrix(EXAMPLE4),
     pytest.param(over([256], ["range"]), marks=pytest.mark.slow),
     pytest.param(over([256], ["prefix"]), marks=pytest.mark.slow),
     pytest.param(predicates(256), marks=pytest.mark.slow)],
    ids=["ranges", "prefixes", "range marginals", "predicates", "example", "256 ranges",
         "256 prefixes", "256 predicates"],
)  # fmt: skip
def test_program_1(workload: Workload) -> None:
    eigensystem = spectrum(workload)
    basis = Vectors(eigensystem.folding, eigensystem.vectors)
    weights = weigh(basis, eigensystem.values, 1e-6)
    least = program_1(squares(basis), eigensystem.values)
    assert weights.bound * (1 - 1e-6) <= least <= weights.error * (1 + 5e-6)
    assert weights.error <= least * (1 + 5e-6)


def test_program_1_of_sines() -> None:
    sines = Sines(100)
    least = program_1(squares(sines), sines.eigenvalues())
    assert weigh(sines, sines.eigenvalues(), 1e-6).error == pytest.approx(least, rel=3e-6)
    off = Columns(squares(sines) * 1.001)
    assert abs(weigh(off, sines.eigenvalues(), 1e-6).error / least - 1) > 5e-4


def triangle(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of an upper triangle, column by column."""
    columns = np.repeat(np.arange(size), np.arange(size) + 1)
    return np.concatenate([np.arange(k + 1) for k in range(size)]), columns


def root_of(workload: Workload) -> np.ndarray:
    """(n, r) R of full rank with V = R R^T."""
    values, vectors = np.linalg.eigh(workload.gram())
    nonzero = values > 1e-9 * values[-1]
    return vectors[:, nonzero] * np.sqrt(values[nonzero])


def semidefinite(root, queries=None) -> tuple[np.ndarray, list]:  # type: ignore[no-untyped-def, type-arg]
    """[[Y, R^T], [R, X]] >= 0 (Y >= R^T X^-1 R, X singular or not) and diag X <= 1, over the
    triangles of Y and X; with ``queries`` q = a R^T also a Y a <= one number more for each.

    Returns: costs of that number, or of tr(Y); the blocks.
    """
    n, rank = root.shape
    (row, column), (top, beside) = triangle(n), triangle(rank)
    of_y, of_x, more = len(top), len(row), 0 if queries is None else 1
    big_row, big_column = triangle(rank + n)
    place = {pair: k for k, pair in enumerate(zip(big_row, big_column, strict=True))}
    matrix = sparse.lil_matrix((len(big_row), of_y + of_x + more))
    for first, shift, pairs in (
        (0, 0, zip(top, beside, strict=True)), (of_y, rank, zip(row, column, strict=True)),
    ):  # fmt: skip
        for k, (r, c) in enumerate(pairs):
            matrix[place[r + shift, c + shift], first + k] = -1.0 if r == c else -ROOT2
    constant = np.zeros(len(big_row))
    for i in range(rank):
        for c in range(n):
            constant[place[i, rank + c]] = ROOT2 * root[c, i]
    diagonal = sparse.lil_matrix((n, of_y + of_x + more))
    for c, k in enumerate(np.flatnonzero(row == column).tolist()):
        diagonal[c, of_y + k] = 1.0
    blocks = [(diagonal, np.ones(n), clarabel.NonnegativeConeT(n)),
              (matrix, constant, clarabel.PSDTriangleConeT(rank + n))]  # fmt: skip
    if queries is None:
        return np.concatenate([top == beside, np.zeros(of_x)]).astype(float), blocks
    within = np.linalg.lstsq(root, queries.T, rcond=None)[0].T
    each = within[:, top] * within[:, beside] * np.where(top == beside, 1.0, 2.0)
    lines = np.hstack([each, np.zeros((len(each), of_x)), -np.ones((len(each), 1))])
    blocks.append((lines, np.zeros(len(each)), clarabel.NonnegativeConeT(len(each))))
    return np.append(np.zeros(of_y + of_x), 1.0), blocks


SMALL = {
    "example": of_matrix(EXAMPLE4),
    "ranges": over([12], ["range"]),
    "prefixes": over([10], ["prefix"]),
    "range marginals": marginals(attributes(2, 2, 3), [2], "range"),
    "a product": over([3, 4], ["range", "prefix"]),
    "predicates": predicates(10),
}


@pytest.mark.parametrize("name", SMALL)
def test_the_optimum(name: str) -> None:
    """No strategy at all is better, whatever its rows: minimise tr(V X^-1) over diag X <= 1."""
    workload = SMALL[name]
    least = solved(*semidefinite(root_of(workload)))
    plan = optimum(workload, 1e-5)
    assert plan.floor <= least * (1 + 1e-5) and least <= plan.error * (1 + 1e-4)
    assert plan.error == pytest.approx(least, rel=1e-3)
    assert auto(workload).error >= least * (1 - 1e-3)


@pytest.mark.parametrize("name", ["example", "prefixes", "a product"])
def test_the_worst_query(name: str) -> None:
    workload = SMALL[name]
    least = solved(*semidefinite(root_of(workload), rows(workload)))
    plan = auto(workload, "worst", 1e-4)
    assert plan.floor <= least * (1 + 1e-5)
    assert plan.error == pytest.approx(least, rel=1e-3)
