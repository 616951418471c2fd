"""The strategy of least worst error: the largest variance of a query, with a certificate.

For weights p of the queries and m of the cells, each summing to 1, and every X with diag X <= 1,

    max_q var_q >= sum_q p_q var_q >= (tr (D^1/2 V_p D^1/2)^1/2)^2 = F(m, p)^2

with V_p = W^T diag(p) W, and F is concave in both together: the dual of ``climb`` over two
simplices.  The slopes are the squared column norms, as in ``optimum``, and the variances of
X = D^-1/2 (D^1/2 V_p D^1/2)^1/2 D^-1/2.
"""

import math
from typing import NamedTuple

import numpy as np
import scipy.linalg

from dpstream.accounting.arrays import Float64, kron
from dpstream.accounting.errors import PolicyError, required
from dpstream.accounting.strategies.cells.climb import Slopes, climb, points_for, sure_sum
from dpstream.accounting.strategies.cells.eigen import completed
from dpstream.accounting.strategies.cells.strategy import Blocks, CellStrategy, Kron, dense_gram
from dpstream.accounting.strategies.cells.threads import one_thread
from dpstream.accounting.workloads.workload import Workload

#: Numbers of the query matrix, which is written out here.
MAX_WORST = 1 << 24


class Worst(NamedTuple):
    """A strategy of least worst variance, and its proof.

    Attributes:
        error: largest (weighted) variance at mu = 1.
        floor: lower bound of it for every strategy.
        certificate: (cell weights, query weights) for each axis.
    """

    strategy: CellStrategy
    error: float
    floor: float
    certificate: tuple[tuple[Float64, Float64], ...]
    steps: int

    @property
    def gap(self) -> float:
        """error / floor - 1, of the variance."""
        return self.error / self.floor - 1


@one_thread()
def worst(workload: Workload, tolerance: float = 1e-3, most: int = 400) -> Worst:
    """Of one product axis by axis (the product of the minimax strategies is minimax), else of all
    cells.

    Raises:
        PolicyError: a query matrix beyond the limit.
    """
    if len(workload.products) == 1 and len(workload.sizes) > 1:
        [product] = workload.products
        parts = {part.structure: part for part in workload.axes(product)}
        solved = {
            structure: worst(part, tolerance / len(workload.sizes), most)
            for structure, part in parts.items()
        }
        of_axes = [solved[part.structure] for part in workload.axes(product)]
        return Worst(
            CellStrategy("worst", Kron(tuple(f.strategy.gram for f in of_axes))),  # type: ignore[misc]
            product.weight * math.prod(f.error for f in of_axes),
            product.weight * math.prod(f.floor for f in of_axes),
            tuple(f.certificate[0] for f in of_axes),
            max(f.steps for f in of_axes),
        )
    if workload.queries * workload.cells > MAX_WORST:
        raise PolicyError(
            "objective",
            f"worst needs a query matrix of at most {MAX_WORST} numbers",
            "ask for the total, or fewer queries",
        )
    return _solved(workload, rows_of(workload), tolerance, most)


def rows_of(workload: Workload) -> Float64:
    """(queries, n) all queries times the roots of their weights, written out."""
    blocks = []
    for product in workload.products:
        rows = kron([factor.dense() for factor in workload.factors_of(product)])
        blocks.append(math.sqrt(product.weight) * rows)
    return np.concatenate(blocks)


def _solved(workload: Workload, rows: Float64, tolerance: float, most: int) -> Worst:
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

    best: tuple[float, Float64] | None = None
    floor, certificate = 0.0, (np.zeros(0), np.zeros(0))
    start = [np.ones(workload.cells), np.ones(len(rows))]
    steps = 0
    for (m, p), evaluation in climb(dual, start, points_for(workload.cells, most)):
        steps += 1
        norms, variances = evaluation.slopes
        error = float(norms.max() * variances.max())
        if evaluation.sure**2 > floor:
            floor, certificate = evaluation.sure**2, (m, p)
        if best is None or error < best[0]:
            roots, vectors = evaluation.solution
            half = m[:, None] ** -0.5 * vectors * np.sqrt(roots)
            best = error, half @ half.T
        if best[0] <= floor * (1 + tolerance):
            break
    best = required(best, "best is there")
    # Completion makes it invertible too: what it adds for that raises a variance by 1e-7 of itself.
    gram = completed(dense_gram(best[1], workload.sizes), 1e-7)
    error = gram.sensitivity2 * _largest(gram, rows)
    return Worst(CellStrategy("worst", gram), error, floor, (certificate,), steps)


def _largest(gram: Blocks, rows: Float64) -> float:
    """Largest variance of a row if node noise has sd 1."""
    return float(np.einsum("qi,ij,qj->q", rows, gram.covariance, rows, optimize=True).max())
