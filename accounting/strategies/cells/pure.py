"""Strategies for pure epsilon: the p-identity of HDMM, on each axis.

With Laplace (or geometric) noise the sensitivity is the largest L1 norm of a column.  Strategies A
= [I; P] diag(1 / (1 + column sums of P)), P of p non-negative rows, have column norms of exactly 1
and are always invertible; tr(V (A^T A)^-1) needs the inverse of p x p alone and is minimised by
L-BFGS from a few fixed starts.  It is not convex: there is no floor, and the best found is taken.

Noise that is exact needs whole numbers: ``lattice`` rounds A to multiples of 2^-bits, and the
sensitivity is that of the rounded one, in whole units.  Rounding costs much where cells are hardly
asked one by one (nearly rank one), so that the choice is by the errors of what was rounded.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.errors import UsageError
from dpstream.accounting.libraries import one_thread
from dpstream.accounting.strategies.cells.strategy import Kron, dense_gram, tree, wavelet
from dpstream.accounting.workloads.workload import Workload

#: Cells of an axis for which the p-identity is looked for.
MAX_PURE_CELLS = 1024
_UP = 1 + 2.0**-40
_FIXED: dict[str, Callable[[int], Float64]] = {
    "identity": np.eye,
    "haar": wavelet,
    "hierarchical": tree,
}


class PureStrategy(NamedTuple):
    """A product of one matrix for each axis.

    Attributes:
        name: the kind of the best strategy.
        factors: the (rows, n) matrix of each axis.
    """

    name: str
    factors: tuple[Float64, ...]

    @property
    def sensitivity1(self) -> float:
        """Largest L1 norm of a column, rounded up."""
        return math.prod(float(np.abs(f).sum(0).max()) for f in self.factors) * _UP

    @property
    def gram(self) -> Kron:
        """A^T A."""
        return Kron(tuple(dense_gram(f.T @ f) for f in self.factors))

    def error(self, workload: Workload) -> float:
        """Return the weighted total of variances if a node at sensitivity 1 has noise of variance
        1.
        """
        return self.sensitivity1**2 * self.gram.trace(workload)

    def lattice(self, bits: int = 12) -> "LatticeStrategy":
        """Return the strategy in multiples of 2^-bits on each axis.

        A row of one cell alone is never rounded to nothing: the identity below other rows is what
        keeps every cell measured, however little of it the strategy wants.
        """
        return LatticeStrategy(tuple(_rounded(f, 2**bits) for f in self.factors))


def _rounded(factor: Float64, scale: int) -> Int64:
    rounded = np.rint(factor * scale)
    alone = (np.count_nonzero(factor, axis=1) == 1) & ~rounded.any(axis=1)
    rounded[alone] = np.sign(factor[alone])
    return rounded[rounded.any(axis=1)].astype(np.int64)


class LatticeStrategy(NamedTuple):
    """A strategy of whole numbers: for each axis (rows, n)."""

    factors: tuple[Int64, ...]

    @property
    def sensitivity1(self) -> int:
        """Largest L1 norm of a column, exact."""
        return math.prod(int(np.abs(f).sum(0).max()) for f in self.factors)

    def floats(self) -> PureStrategy:
        """Return the same strategy in floats, for the formulas of error."""
        return PureStrategy("lattice", tuple(f.astype(np.float64) for f in self.factors))


@one_thread()
def pure(workload: Workload, bits: int | None = None) -> PureStrategy:
    """Return the best strategy found for pure epsilon: p-identities, trees, wavelets or the cells.

    Args:
        bits: of the lattice that it will be rounded to, by which the choice is made.

    Raises:
        UsageError: a union over several axes, or an axis beyond the limit.
    """
    if len(workload.products) > 1 and len(workload.sizes) > 1:
        raise UsageError(
            "privacy",
            "pure epsilon answers one product of queries, or one attribute: a union of products, "
            "such as all 2-way tables, has no answer at delta 0",
            "give a delta above 0 (--delta 1e-9, or budget.delta = 1e-9 in the job) without "
            "--mechanism geometric, or ask one product",
        )
    parts = [workload] if len(workload.sizes) == 1 else workload.axes(workload.products[0])
    solved = {key: _best(part, bits) for key, part in {p.structure: p for p in parts}.items()}
    strategies = [solved[part.structure] for part in parts]
    names = {strategy.name for strategy in strategies}
    name = names.pop() if len(names) == 1 else "product"
    return PureStrategy(name, tuple(strategy.factors[0] for strategy in strategies))


def _best(part: Workload, bits: int | None) -> PureStrategy:
    if not any(product.axes for product in part.products):
        return PureStrategy("total", (np.ones((1, part.cells)),))
    if part.cells > MAX_PURE_CELLS:
        raise UsageError(
            "domain",
            f"pure epsilon needs attributes of at most {MAX_PURE_CELLS} cells",
            "merge cells",
        )
    candidates = [PureStrategy(name, (make(part.cells),)) for name, make in _FIXED.items()]
    rows = max(1, part.cells // 16)
    gram = part.gram()
    for start in range(3):
        matrix = p_identity(gram, rows, start)
        candidates.append(PureStrategy("p-identity", (matrix,)))

    def error(strategy: PureStrategy) -> float:
        rounded = strategy if bits is None else strategy.lattice(bits).floats()
        return rounded.error(part)

    return min(candidates, key=error)


def p_identity(gram: Float64, rows: int, start: int = 0) -> Float64:
    """Return (n + rows, n) the p-identity that L-BFGS finds from a fixed start.

    Args:
        gram: (n, n) V.
        rows: p.
        start: number of the starting point.
    """
    size = len(gram)
    first = _scattered(rows * size, start)
    minimum = minimize(
        value_and_gradient,
        first,
        args=(gram, rows),
        jac=True,
        method="L-BFGS-B",
        bounds=[(0, None)] * (rows * size),
        options={"maxiter": 1500, "maxcor": 20},
    )
    extra = minimum.x.reshape(rows, size)
    return np.asarray(np.concatenate([np.eye(size), extra]) / (1 + extra.sum(0)))


def _scattered(count: int, start: int) -> Float64:
    """Numbers in [0, 1) without a pattern, the same everywhere: splitmix64 of 1, 2, ..."""
    with np.errstate(over="ignore"):
        z = np.arange(1, count + 1, dtype=np.uint64) + np.uint64(start << 32)
        z *= np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray((z >> np.uint64(11)) * 2.0**-53)


def value_and_gradient(flat: Float64, gram: Float64, rows: int) -> tuple[float, Float64]:
    """Return tr(S V S N) with S = diag(1 + column sums), N = (I + P^T P)^-1, and its gradient."""
    extra = flat.reshape(rows, -1)
    sums = 1 + extra.sum(0)
    # P N = (I + P P^T)^-1 P.
    short = np.linalg.solve(np.eye(rows) + extra @ extra.T, extra)
    inverse = np.eye(len(gram)) - extra.T @ short
    scaled = sums[:, None] * gram * sums
    moved = scaled - (scaled @ extra.T) @ short
    value = float(np.trace(moved))
    slope = -2 * short @ moved + 2 * ((gram * inverse) @ sums)
    return value, slope.ravel()
