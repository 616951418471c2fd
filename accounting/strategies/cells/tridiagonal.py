"""The optimum for all ranges or prefixes of very many cells, by tridiagonal matrices.

The Gram matrix V of all prefixes is T^T T, T the lower triangle of ones; that of all ranges has
V_ij = (i + 1) (n - j), i <= j.  Both have tridiagonal inverses, and so has D^1/2 V D^1/2 of
``optimum``, D = diag(m): its eigenvectors take n^2 steps in the place of n^3.  The error of the
strategy with its diagonal scaled to ones needs V of each eigenvector, which is a sum of squares of
running sums.  So only the strategy itself, at the end, is a product of matrices.
"""

from collections.abc import Iterator

import numpy as np
import scipy.linalg

from dpstream.accounting.arrays import Float64
from dpstream.accounting.errors import required
from dpstream.accounting.strategies.cells.climb import Point, Slopes, climb
from dpstream.accounting.strategies.cells.optimum import Solved, finer, optimum
from dpstream.accounting.strategies.cells.strategy import CellStrategy, dense_gram, mirrored
from dpstream.accounting.strategies.cells.threads import one_thread
from dpstream.accounting.workloads.attributes import of_size
from dpstream.accounting.workloads.factors import Factor, interval
from dpstream.accounting.workloads.workload import workload_of

#: Cells of an attribute above which ranges and prefixes are solved so.
MANY_CELLS = 4096
#: Kinds of factors that are solved so, and cells of the grid that the first weights come from.
KINDS, _COARSE = ("range", "prefix"), 1024
#: Columns worked on at a time; what an eigenvalue may be off, in units of the largest.
_COLUMNS, _OFF = 512, 64 * 2.0**-52


@one_thread()
def tridiagonal_optimum(factor: Factor, tolerance: float = 1e-3, most: int = 6) -> Solved:
    """The optimum of all ranges or prefixes, to a relative gap.

    Args:
        factor: of a kind in KINDS, its rows not divided by their norms.
        most: points that are tried.
    """
    size = factor.size
    cells = min(size, _COARSE)
    coarse = workload_of([of_size("cell", cells)], [(1.0, {0: interval(factor.kind, cells)})])
    start = finer(optimum(coarse, 1e-5).certificate[0], size)
    best: tuple[float, Float64, Float64] | None = None
    floor, certificate, tried = 0.0, start, 0
    for point in _points(factor, start, most):
        tried += 1
        [weights] = point.weights
        if point.found.sure**2 > floor:
            floor, certificate = point.found.sure**2, weights
        error, norms = point.found.kept
        if best is None or error < best[0]:
            best = error, weights, norms
        if best[0] <= floor * (1 + tolerance):
            break
    error, weights, norms = required(best, "a point is tried")
    values, vectors = _decomposed(factor, weights)
    vectors *= (values**-0.25)[None, :]
    vectors *= ((weights * norms) ** -0.5)[:, None]
    matrix = mirrored(scipy.linalg.blas.dsyrk(1.0, np.asfortranarray(vectors), lower=1))
    del vectors
    gram = dense_gram(matrix.T)  # symmetric, its rows are adjacent
    return Solved(CellStrategy("optimum", gram), error, floor, (certificate,), tried)


def _points(factor: Factor, start: Float64, most: int) -> Iterator[Point]:
    def dual(weights: Float64) -> Slopes:
        values, vectors = _decomposed(factor, weights)
        roots = values**-0.5
        slopes = np.zeros(len(weights))
        for begin in range(0, len(values), _COLUMNS):
            part = vectors[:, begin : begin + _COLUMNS]
            slopes += (part * part) @ roots[begin : begin + _COLUMNS]
        slopes /= weights
        value = float(roots.sum())
        sure = float(((values + _OFF * values[-1]) ** -0.5).sum())
        error = 0.0
        scale = np.sqrt(slopes * weights)[:, None]
        for begin in range(0, len(values), _COLUMNS):
            part = vectors[:, begin : begin + _COLUMNS] * scale
            squares = _squares(factor, part)
            error += float(squares @ values[begin : begin + _COLUMNS] ** 0.5)
        return Slopes(value, (slopes,), (error, slopes), sure)

    return climb(dual, [start], most)


def _decomposed(factor: Factor, weights: Float64) -> tuple[Float64, Float64]:
    """Eigenvalues, rising, and eigenvectors of the inverse of D^1/2 V D^1/2."""
    size = len(weights)
    diagonal, beside = np.full(size, 2.0), np.full(size - 1, -1.0)
    if factor.kind == "range":
        diagonal, beside = diagonal / (size + 1), beside / (size + 1)
    else:
        diagonal[0] = 1.0
    scale = weights**-0.5
    eigenvalues, vectors = scipy.linalg.eigh_tridiagonal(
        diagonal * scale**2, beside * scale[1:] * scale[:-1], check_finite=False
    )
    return np.maximum(eigenvalues, 1e-300), vectors


def _squares(factor: Factor, columns: Float64) -> Float64:
    """(k,) h V h of each column."""
    sums = np.cumsum(columns, axis=0)
    squares = np.einsum("ik,ik->k", sums, sums)
    if factor.kind == "prefix":
        return np.asarray(squares)
    return np.asarray((factor.size + 1) * squares - sums.sum(axis=0) ** 2)
