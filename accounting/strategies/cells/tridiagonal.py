"""The optimum for all ranges or prefixes of very many cells, by tridiagonal matrices.

The Gram matrix V of all prefixes is T^T T, T the lower triangle of ones; that of all ranges has
V_ij = (i + 1) (n - j), i <= j.  Both have tridiagonal inverses, and so has D^1/2 V D^1/2 of
``optimum``, D = diag(m): its eigenvectors take n^2 steps in the place of n^3.  The error of the
strategy with its diagonal scaled to ones needs V of each eigenvector, which is a sum of squares of
running sums, and so are the variances of other intervals under this strategy (`Blocks.spread_of`).
So only the strategy itself, at the end, is a product of matrices.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import scipy.linalg

from dpstream.accounting.arrays import Float64
from dpstream.accounting.errors import required
from dpstream.accounting.strategies.cells.climb import Point, Slopes, climb
from dpstream.accounting.strategies.cells.optimum import Solved, finer, optimum
from dpstream.accounting.strategies.cells.strategy import (
    CellStrategy,
    Spread,
    dense_gram,
    mirrored,
)
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


#: Kinds of factors whose variances are running sums too.
SUMMED = (*KINDS, "identity", "total", "width")


class _Decomposed(NamedTuple):
    """Eigenvalues, rising, and eigenvectors of the inverse of D^1/2 V D^1/2, D = diag(weights)."""

    weights: Float64
    values: Float64
    vectors: Float64


def is_tridiagonal(factor: Factor) -> bool:
    """Whether a factor is one that is solved here."""
    return factor.kind in KINDS and not factor.relative


@one_thread()
def tridiagonal_optimum(
    factor: Factor, tolerance: float = 1e-3, most: int = 6, others: Iterable[Factor] = ()
) -> Solved:
    """The optimum of all ranges or prefixes, to a relative gap.

    Args:
        factor: of a kind in KINDS, its rows not divided by their norms.
        most: points that are tried.
        others: further factors of the attribute whose spreads are computed; those that are no
            running sums are left out.
    """
    best: tuple[float, Float64, Float64] | None = None
    decomposed: list[_Decomposed] = []
    start = _start(factor)
    floor, certificate, tried = 0.0, start, 0
    for point in _points(factor, start, most, decomposed):
        tried += 1
        [weights] = point.weights
        if point.slopes.sure**2 > floor:
            floor, certificate = point.slopes.sure**2, weights
        error, norms = point.slopes.solution
        if best is None or error < best[0]:
            best = error, weights, norms
        if best[0] <= floor * (1 + tolerance):
            break
    error, weights, norms = required(best, "a point is tried")
    if not np.array_equal(decomposed[0].weights, weights):
        decomposed.clear()  # before the next one, as each has n^2 numbers
        decomposed.append(_decomposed(factor, weights))
    _, values, vectors = decomposed.pop()
    scale = (weights * norms) ** 0.5
    summed = [f for f in (factor, *others) if f.kind in SUMMED and not f.relative]
    spreads = _spreads(summed, values, vectors, scale)
    vectors *= (values**-0.25)[None, :]
    vectors *= ((weights * norms) ** -0.5)[:, None]
    matrix = mirrored(scipy.linalg.blas.dsyrk(1.0, np.asfortranarray(vectors), lower=1))
    del vectors
    gram = replace(dense_gram(matrix.T), spread_of=spreads)  # symmetric, its rows are adjacent
    return Solved(CellStrategy("optimum", gram), error, floor, (certificate,), tried)


@one_thread()
def tridiagonal_floor(factor: Factor) -> float:
    """A floor of all ranges or prefixes from eigenvalues alone; see `tridiagonal_optimum`."""
    diagonal, beside = _inverse(factor, _start(factor))
    values = scipy.linalg.eigvalsh_tridiagonal(diagonal, beside, lapack_driver="sterf")
    return _sure(np.maximum(values, 1e-300)) ** 2


def _start(factor: Factor) -> Float64:
    """First weights of the cells, from a coarser attribute."""
    cells = min(factor.size, _COARSE)
    coarse = workload_of([of_size("cell", cells)], [(1.0, {0: interval(factor.kind, cells)})])
    return finer(optimum(coarse, 1e-5).certificate[0], factor.size)


def _points(
    factor: Factor, start: Float64, most: int, decomposed: list[_Decomposed]
) -> Iterator[Point]:
    """Points of the climb; ``decomposed`` gets what the last one was computed from."""

    def dual(weights: Float64) -> Slopes:
        decomposed.clear()
        decomposed.append(_decomposed(factor, weights))
        [(_, values, vectors)] = decomposed
        roots = values**-0.5
        slopes = np.zeros(len(weights))
        for begin in range(0, len(values), _COLUMNS):
            part = vectors[:, begin : begin + _COLUMNS]
            slopes += (part * part) @ roots[begin : begin + _COLUMNS]
        slopes /= weights
        error = 0.0
        scale = np.sqrt(slopes * weights)[:, None]
        for begin in range(0, len(values), _COLUMNS):
            part = vectors[:, begin : begin + _COLUMNS] * scale
            squares = _squares(factor, part)
            error += float(squares @ values[begin : begin + _COLUMNS] ** 0.5)
        return Slopes(float(roots.sum()), (slopes,), (error, slopes), _sure(values))

    return climb(dual, [start], most)


def _sure(values: Float64) -> float:
    """Sum of the roots of the inverses of computed eigenvalues, less what their error may add."""
    return float(((values + _OFF * values[-1]) ** -0.5).sum())


def _inverse(factor: Factor, weights: Float64) -> tuple[Float64, Float64]:
    """(n,) diagonal of the inverse of D^1/2 V D^1/2, and (n - 1,) numbers beside it."""
    size = len(weights)
    diagonal, beside = np.full(size, 2.0), np.full(size - 1, -1.0)
    if factor.kind == "range":
        diagonal, beside = diagonal / (size + 1), beside / (size + 1)
    else:
        diagonal[0] = 1.0
    scale = weights**-0.5
    return diagonal * scale**2, beside * scale[1:] * scale[:-1]


def _decomposed(factor: Factor, weights: Float64) -> _Decomposed:
    diagonal, beside = _inverse(factor, weights)
    eigenvalues, vectors = scipy.linalg.eigh_tridiagonal(diagonal, beside, check_finite=False)
    return _Decomposed(weights, np.maximum(eigenvalues, 1e-300), vectors)


def _squares(factor: Factor, columns: Float64) -> Float64:
    """(k,) h V h of each column."""
    sums = np.cumsum(columns, axis=0)
    squares = np.einsum("ik,ik->k", sums, sums)
    if factor.kind == "prefix":
        return np.asarray(squares)
    return np.asarray((factor.size + 1) * squares - sums.sum(axis=0) ** 2)


def _spreads(
    factors: Sequence[Factor], values: Float64, vectors: Float64, scale: Float64
) -> dict[bytes, Spread]:
    """Variances of the queries of each factor if node noise has sd 1: X^-1 is the sum over the
    eigenvectors of h h^T, h the vector times ``scale`` and the fourth root of its eigenvalue."""
    by_name = {factor.canonical(): factor for factor in factors}
    totals = {name: 0.0 for name, factor in by_name.items() if factor.kind == "range"}
    listed = {name: np.zeros(f.rows) for name, f in by_name.items() if f.kind != "range"}
    for begin in range(0, len(values), _COLUMNS):
        part = vectors[:, begin : begin + _COLUMNS] * scale[:, None]
        part *= values[begin : begin + _COLUMNS] ** 0.25
        for name in totals:
            totals[name] += float(_squares(by_name[name], part).sum())
        for name in listed:
            answers = by_name[name].apply(part)
            listed[name] += np.einsum("qk,qk->q", answers, answers)
    spreads = {
        name: Spread(total / by_name[name].rows, None, None) for name, total in totals.items()
    }
    for name, each in listed.items():
        spreads[name] = Spread(float(each.mean()), float(each.min()), float(each.max()))
    return spreads
