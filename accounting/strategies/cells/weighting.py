"""Program 1: the best weights of given design queries, by its dual.

A strategy that asks design query q_i (the rows of an orthonormal Q) with squared weight u_i has X
= Q^T diag(u) Q; its error is sum c_i / u_i, c_i = q_i V q_i^T, under B u <= 1 with B = (Q o Q)^T.
For weights nu of the cells that sum to 1,

    sum c_i / u_i >= (sum c_i / u_i) (nu^T B u) >= (sum sqrt(c_i (B^T nu)_i))^2 = F(nu)^2

(Cauchy-Schwarz), with equality for u_i = sqrt(c_i / (B^T nu)_i): a dual as in ``climb`` whose
slopes are B u.  nu uniform gives the singular value bound, which holds for every strategy.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from typing_extensions import override

from dpstream.accounting.arrays import Float64
from dpstream.accounting.errors import required
from dpstream.accounting.strategies.cells.climb import Slopes, climb
from dpstream.accounting.strategies.cells.folding import Folding
from dpstream.accounting.strategies.cells.threads import one_thread


class Basis(ABC):
    """B, the squares of an orthonormal basis, over the orbits of a folding (or over all cells)."""

    cells: int
    vectors: int

    @abstractmethod
    def norms(self, u: Float64) -> Float64:
        """B u: squared column norm of a cell of each orbit."""

    @abstractmethod
    def spread(self, nu: Float64) -> Float64:
        """B^T nu, nu the weights of whole orbits."""

    @abstractmethod
    def squares(self, chosen: slice) -> Float64:
        """(orbits, k) columns of B."""


class Vectors(Basis):
    """Vectors of the blocks of a folding.

    Args:
        parts: for each block, (its cells, vectors) orthonormal columns.
    """

    def __init__(self, folding: Folding, parts: Sequence[Float64]) -> None:
        self.folding = folding
        self.cells = len(folding.counts)
        self.cuts = np.cumsum([0, *(part.shape[1] for part in parts)])
        self.vectors = int(self.cuts[-1])
        self.parts = [
            part**2 / folding.counts[orbits][:, None]
            for part, orbits in zip(parts, folding.orbits, strict=True)
        ]

    @override
    def norms(self, u: Float64) -> Float64:
        norms = np.zeros(self.cells)
        for part, orbits, at in zip(self.parts, self.folding.orbits, self.cuts, strict=False):
            norms[orbits] += part @ u[at : at + part.shape[1]]
        return norms

    @override
    def spread(self, nu: Float64) -> Float64:
        each = zip(self.parts, self.folding.orbits, strict=True)
        return np.concatenate([part.T @ nu[orbits] for part, orbits in each])

    @override
    def squares(self, chosen: slice) -> Float64:
        u = np.zeros(self.vectors)
        columns = []
        for k in range(*chosen.indices(self.vectors)):
            u[k] = 1.0
            columns.append(self.norms(u))
            u[k] = 0.0
        return np.array(columns).T


class Columns(Basis):
    """B written out, e.g. of merged vectors."""

    def __init__(self, matrix: Float64) -> None:
        self.matrix = matrix
        self.cells, self.vectors = matrix.shape

    @override
    def norms(self, u: Float64) -> Float64:
        return np.asarray(self.matrix @ u)

    @override
    def spread(self, nu: Float64) -> Float64:
        return np.asarray(self.matrix.T @ nu)

    @override
    def squares(self, chosen: slice) -> Float64:
        return self.matrix[:, chosen]


class Weights(NamedTuple):
    """A solution of Program 1.

    Attributes:
        u: (vectors,) squared weights, scaled so that the largest column norm is 1.
        nu: (orbits,) dual weights.
        error: sum c / u.
        bound: F(nu)^2; no weights of these design queries have less error.
        steps: evaluations that were needed.
    """

    u: Float64
    nu: Float64
    error: float
    bound: float
    steps: int

    @property
    def gap(self) -> float:
        """error / bound - 1."""
        return self.error / self.bound - 1


@one_thread()
def weigh(basis: Basis, c: Float64, tolerance: float = 1e-3, memory: int = 20) -> Weights:
    """Program 1 to a relative gap.

    Args:
        basis: squares of the design queries.
        c: (vectors,) squared norms of the workload along each; those of 0 get no weight.
        memory: see ``climb``.
    """
    roots = np.sqrt(np.maximum(c, 0.0))
    positive = roots > 0

    def dual(nu: Float64) -> Slopes:
        below = np.sqrt(np.maximum(basis.spread(nu), 1e-300))
        u = np.where(positive, roots / below, 0.0)
        return Slopes(float(roots @ below), (np.maximum(basis.norms(u), 0.0),), u)

    best: Weights | None = None
    for step, point in enumerate(climb(dual, [np.ones(basis.cells)], memory=memory), 1):
        value, (norms,), u = point.slopes[:3]
        error = float(norms.max()) * value
        bound = value**2 if best is None else max(best.bound, value**2)
        if best is None or error < best.error:
            best = Weights(u / norms.max(), point.weights[0], error, bound, step)
        best = best._replace(bound=bound, steps=step)
        if best.gap <= tolerance:
            break
    return required(best, "best is there")
