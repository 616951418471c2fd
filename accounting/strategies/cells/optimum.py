"""The exact optima: the strategies of least total and of least worst error, with certificates.

Minimise tr(V X^-1) over X with diag X <= 1.  For weights m of the cells that sum to 1, D = diag(m),

    tr(V X^-1) >= tr(V X^-1) tr(D X) >= (tr (D^1/2 V D^1/2)^1/2)^2 = F(m)^2,

and with equality for X = D^-1/2 (D^1/2 V D^1/2)^1/2 D^-1/2, whose diagonal is the slope of F: the
dual of ``climb``.  V = R R^T of rank r needs the r x r matrix R^T D R alone: X = R (R^T D R)^-1/2
R^T, its trace F.  A full-rank X is then scaled to a diagonal of ones on both sides (the error of
what is left of the gap becomes of second order), a deficient one completed.  Blocks of reflections
as in ``folding``.  Weights of many cells begin as those of fewer, interpolated over the logit of
the position.

A certificate is m (and V): whoever recomputes F(m)^2 has a lower bound of every strategy's error.

**Least worst error**, the largest variance of a query.  For weights p of the queries and m of the
cells, each summing to 1, and every X with diag X <= 1,

    max_q var_q >= sum_q p_q var_q >= (tr (D^1/2 V_p D^1/2)^1/2)^2 = F(m, p)^2

with V_p = W^T diag(p) W, and F is concave in both together: the dual of ``climb`` over two
simplices.  The slopes are the squared column norms, as above, and the variances of
X = D^-1/2 (D^1/2 V_p D^1/2)^1/2 D^-1/2.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import scipy.linalg

from dpstream.accounting.arrays import Float64, kron
from dpstream.accounting.errors import UsageError, instance
from dpstream.accounting.libraries import one_thread
from dpstream.accounting.strategies.cells.climb import (
    Point,
    Slopes,
    best_of,
    climb,
    points_for,
    sure_sum,
)
from dpstream.accounting.strategies.cells.eigen import completed
from dpstream.accounting.strategies.cells.folding import Folding, folding_of
from dpstream.accounting.strategies.cells.strategy import (
    Blocks,
    CellStrategy,
    Kron,
    Solved,
    dense_gram,
)
from dpstream.accounting.workloads.attributes import interval, of_size
from dpstream.accounting.workloads.workload import Workload, workload_of

#: Weights of a coarser grid come first where that is at least so many cells: an eighth of them.
_COARSE, _FINER = 256, 8
#: What a deficient optimum is completed beyond its largest norm, so that it is invertible.
_RIDGE = 1e-7


class _Part(NamedTuple):
    """A block of V: itself where it has full rank, else its root R (cells, r)."""

    gram: Float64
    root: Float64 | None


@one_thread()
def optimum(
    workload: Workload, tolerance: float = 1e-3, most: int = 100, start: Float64 | None = None
) -> Solved:
    """Return the optimum of a domain that one matrix is solved for, to a relative gap.

    Args:
        tolerance: relative gap between error and floor at which the search stops.
        most: largest number of points that are tried.
        start: (n,) first weights of the cells; ``None``: chosen by the workload.
    """
    folding = folding_of(workload)
    parts = [_part(gram) for gram in folding.grams(workload)]

    def dual(weights: Float64) -> Slopes:
        per_cell, factors = weights / folding.counts, []
        value, sure, slopes = 0.0, 0.0, np.zeros(len(weights))
        for part, orbits in zip(parts, folding.orbits, strict=True):
            block = _block(part, per_cell[orbits])
            value, sure = value + block[0], sure + block[1]
            slopes[orbits] += block[2]
            factors.append(block[3])
        return Slopes(value, (slopes / folding.counts,), factors, sure)

    first = _start(workload, folding) if start is None else folding.gather(start)
    rows = max(len(p.gram) if p.root is None else p.root.shape[1] for p in parts)
    points = climb(dual, [first], points_for(rows, most))
    best = best_of(points, lambda point: _primal(folding, parts, point), tolerance)
    spread = folding.spread(best.certificate[0] / folding.counts)
    strategy = CellStrategy("optimum", best.solution())
    return Solved(strategy, best.error, best.floor, (spread,), best.steps)


def _part(gram: Float64) -> _Part:
    """Full rank, or a root by Cholesky with pivots."""
    size = len(gram)
    if not size or not gram.any():
        return _Part(gram, np.zeros((size, 0)))
    lower, pivots, rank, _ = scipy.linalg.lapack.dpstrf(gram, lower=1)
    if rank == size and abs(lower[-1, -1]) > 1e-7 * abs(lower[0, 0]):
        return _Part(gram, None)
    root = np.empty((size, rank))
    root[pivots - 1] = np.tril(lower)[:, :rank]
    return _Part(gram, root)


def _block(part: _Part, weights: Float64) -> tuple[float, float, Float64, Any]:
    """Share of F, of its lower bound, of the slopes, and the roots of the eigenvalues with
    their vectors."""
    root = part.root
    if root is None:
        scale = np.sqrt(weights)
        values, vectors = scipy.linalg.eigh(
            scale[:, None] * part.gram * scale, driver="evd", overwrite_a=True, check_finite=False
        )
        roots = np.sqrt(np.maximum(values, 0.0))
        slopes = (vectors**2 @ roots) / weights
        return float(roots.sum()), sure_sum(values), slopes, (roots, vectors)
    if not root.shape[1]:
        return 0.0, 0.0, np.zeros(len(weights)), None
    values, vectors = scipy.linalg.eigh(
        (root.T * weights) @ root, driver="evd", overwrite_a=True, check_finite=False
    )
    roots = np.sqrt(np.maximum(values, 1e-30 * values[-1]))
    half = (root @ vectors) * roots**-0.5
    return float(roots.sum()), sure_sum(values), np.einsum("ik,ik->i", half, half), half


def _primal(
    folding: Folding, parts: list[_Part], point: Point
) -> tuple[float, Callable[[], Blocks]]:
    """Error of the strategy that belongs to a point, and how to make it."""
    [weights], evaluation = point
    per_cell, norms = weights / folding.counts, evaluation.slopes[0]
    plain = norms.max() * evaluation.value
    if all(part.root is None for part in parts):
        if evaluation.gap > 0.5:
            return plain, lambda: _scaled(folding, per_cell, None, evaluation)
        error = 0.0
        for part, orbits, (roots, vectors) in zip(
            parts, folding.orbits, evaluation.solution, strict=True
        ):
            inner = np.sqrt(norms[orbits] * per_cell[orbits])
            half = vectors * np.maximum(roots, 1e-150) ** -0.5
            # A matrix times its own transpose costs half a product.
            moved = half @ half.T
            moved *= part.gram
            error += float(inner @ moved @ inner)
        if error <= plain:
            return error, lambda: _scaled(folding, per_cell, norms, evaluation)
        return plain, lambda: _scaled(folding, per_cell, None, evaluation)
    gram = completed(_ranked(folding, parts, per_cell, evaluation), _RIDGE)
    trace = gram.trace_of([part.gram for part in parts])
    return float(gram.diagonal.max()) * trace, lambda: gram


def _scaled(
    folding: Folding, per_cell: Float64, norms: Float64 | None, evaluation: Slopes
) -> Blocks:
    """X of a full-rank point; with ``norms`` its diagonal is made one."""
    blocks = []
    for orbits, (roots, vectors) in zip(folding.orbits, evaluation.solution, strict=True):
        outer = per_cell[orbits] ** -0.5
        if norms is not None:
            outer = outer / np.sqrt(norms[orbits])
        half = outer[:, None] * vectors * np.sqrt(roots)
        blocks.append(half @ half.T)
    return Blocks(folding, tuple(blocks))


def _ranked(folding: Folding, parts: list[_Part], per_cell: Float64, evaluation: Slopes) -> Blocks:
    """X of a point some of whose blocks are deficient."""
    blocks = []
    for part, factor, orbits in zip(parts, evaluation.solution, folding.orbits, strict=True):
        if part.root is None:
            roots, vectors = factor
            half = per_cell[orbits][:, None] ** -0.5 * vectors * np.sqrt(roots)
            blocks.append(half @ half.T)
            continue
        blocks.append(np.zeros((len(orbits),) * 2) if factor is None else factor @ factor.T)
    return Blocks(folding, tuple(blocks))


def _start(workload: Workload, folding: Folding) -> Float64:
    """First weights of the orbits."""
    [product, *others] = workload.products
    if others or len(workload.sizes) > 1 or workload.cells < 2 * _COARSE or not product.axes:
        return folding.counts
    [factor] = product.factors
    if factor.kind not in ("range", "prefix", "width"):
        return folding.counts
    size = workload.cells
    cells = max(_COARSE, size // _FINER)
    width = max(1, factor.width * cells // size) if factor.width else 0
    coarse = interval(factor.kind, cells, width, factor.relative)
    solved = optimum(workload_of([of_size("cell", cells)], [(1.0, {0: coarse})]), 1e-5)
    return folding.gather(refined_weights(solved.certificate[0], size))


def refined_weights(weights: Float64, size: int) -> Float64:
    """Return (size,) weights of a finer grid: log weights over the logit of the position."""

    def logit(cells: int) -> Float64:
        at = (np.arange(cells) + 0.5) / cells
        return np.asarray(np.log(at / (1 - at)))

    fine, coarse, logs = logit(size), logit(len(weights)), np.log(weights)
    finer_weights = np.interp(fine, coarse, logs)
    for end, beyond in ((0, fine < coarse[0]), (-1, fine > coarse[-1])):
        next_ = 1 if end == 0 else -2
        steep = (logs[next_] - logs[end]) / (coarse[next_] - coarse[end])
        finer_weights[beyond] = logs[end] + steep * (fine[beyond] - coarse[end])
    finer_weights = np.exp(finer_weights - finer_weights.max())
    return np.asarray(finer_weights / finer_weights.sum())


def by_axes(name: str, workload: Workload, solve: Callable[[Workload], Solved]) -> Solved:
    """Return the product of the solutions of one product's axes; equal axes are solved once.

    Args:
        solve: gives a strategy of one matrix.
    """
    [product] = workload.products
    parts = workload.axes(product)
    solved = {key: solve(part) for key, part in {p.structure: p for p in parts}.items()}
    solutions = [solved[part.structure] for part in parts]
    return Solved(
        CellStrategy(name, Kron(tuple(instance(s.strategy.gram, Blocks) for s in solutions))),
        product.weight * math.prod(s.error for s in solutions),
        product.weight * math.prod(s.floor for s in solutions),
        tuple(array for s in solutions for array in s.certificate),
        max(s.steps for s in solutions),
    )


#: Numbers of the query matrix, which is written out here.
MAX_WORST = 1 << 24


@one_thread()
def worst(workload: Workload, tolerance: float = 1e-3, most: int = 400) -> Solved:
    """Return the minimax strategy: of one product axis by axis, else of all cells.

    The product of the minimax strategies of a product is minimax.

    Raises:
        UsageError: a query matrix beyond the limit.
    """
    if len(workload.products) == 1 and len(workload.sizes) > 1:
        share = tolerance / len(workload.sizes)
        return by_axes("worst", workload, lambda part: worst(part, share, most))
    if workload.queries * workload.cells > MAX_WORST:
        raise UsageError(
            "objective",
            f"worst needs a query matrix of at most {MAX_WORST} numbers",
            "ask for the total, or fewer queries",
        )
    return _solved(workload, rows_of(workload), tolerance, most)


def rows_of(workload: Workload) -> Float64:
    """Return (queries, n) all queries times the roots of their weights, written out."""
    return np.concatenate(
        [
            math.sqrt(product.weight) * kron([f.dense() for f in workload.factors_of(product)])
            for product in workload.products
        ]
    )


def _solved(workload: Workload, rows: Float64, tolerance: float, most: int) -> Solved:
    def dual(m: Float64, p: Float64) -> Slopes:
        half = rows * np.sqrt(p)[:, None]
        scale = np.sqrt(m)
        inner = scale[:, None] * (half.T @ half) * scale
        values, vectors = scipy.linalg.eigh(inner, driver="evd", overwrite_a=True)
        roots = np.sqrt(np.maximum(values, 1e-24 * values[-1]))
        norms = (vectors**2 @ roots) / m
        moved = (rows * scale) @ (vectors * roots**-0.5)
        variances = np.einsum("qi,qi->q", moved, moved)
        return Slopes(float(roots.sum()), (norms, variances), (roots, vectors), sure_sum(values))

    def primal(point: Point) -> tuple[float, Callable[[], Float64]]:
        norms, variances = point.slopes.slopes
        roots, vectors = point.slopes.solution
        half = point.weights[0][:, None] ** -0.5 * vectors * np.sqrt(roots)
        return float(norms.max() * variances.max()), lambda: half @ half.T

    start = [np.ones(workload.cells), np.ones(len(rows))]
    best = best_of(climb(dual, start, points_for(workload.cells, most)), primal, tolerance)
    # Completion makes it invertible too: what it adds for that raises a variance by 1e-7 of itself.
    gram = completed(dense_gram(best.solution(), workload.sizes), 1e-7)
    variances = np.einsum("qi,ij,qj->q", rows, gram.covariance, rows, optimize=True)
    error = gram.sensitivity2 * float(variances.max())
    return Solved(CellStrategy("worst", gram), error, best.floor, best.certificate, best.steps)
