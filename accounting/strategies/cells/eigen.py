"""The eigen-design: eigenvectors of V as design queries, and their best weights.

**Program 1**: the best weights of given design queries, by its dual.  A strategy that asks design
query q_i (the rows of an orthonormal Q) with squared weight u_i has X = Q^T diag(u) Q; its error is
sum c_i / u_i, c_i = q_i V q_i^T, under B u <= 1 with B = (Q o Q)^T.  For weights nu of the cells
that sum to 1,

    sum c_i / u_i >= (sum c_i / u_i) (nu^T B u) >= (sum sqrt(c_i (B^T nu)_i))^2 = F(nu)^2

(Cauchy-Schwarz), with equality for u_i = sqrt(c_i / (B^T nu)_i): a dual as in ``climb`` whose
slopes are B u.  nu uniform gives the singular value bound, which holds for every strategy.

**Program 2**, the eigen-design: weighted eigenvectors of V, and columns completed to the full norm.
Repeated eigenvalues leave the eigenvectors open; those of the even and odd blocks (``folding``),
the sines of all ranges and the cosines of tables are chosen, and vectors of eigenvalue 0 are not
asked.  Completion adds to each cell what its column lacks of the largest norm: it raises no
sensitivity and can only lower the error.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy.linalg

from dpstream.accounting.arrays import Float64, kron
from dpstream.accounting.errors import required
from dpstream.accounting.libraries import one_thread
from dpstream.accounting.strategies.cells.climb import Slopes, climb
from dpstream.accounting.strategies.cells.folding import Folding, folding_of
from dpstream.accounting.strategies.cells.residual import spaces_of
from dpstream.accounting.strategies.cells.strategy import RANK, Blocks, CellStrategy
from dpstream.accounting.workloads.workload import Workload


class Vectors:
    """The matrix B of the vectors of a folding's blocks: their squares, over the orbits of cells.

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

    def norms(self, u: Float64) -> Float64:
        """Return B u: the squared norm of the strategy's column of a cell, for each orbit."""
        norms = np.zeros(self.cells)
        for part, orbits, at in zip(self.parts, self.folding.orbits, self.cuts, strict=False):
            norms[orbits] += part @ u[at : at + part.shape[1]]
        return norms

    def spread(self, nu: Float64) -> Float64:
        """Return B^T nu, nu the weights of whole orbits."""
        each = zip(self.parts, self.folding.orbits, strict=True)
        return np.concatenate([part.T @ nu[orbits] for part, orbits in each])


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
def weigh(basis: Vectors, c: Float64, tolerance: float = 1e-3, memory: int = 20) -> Weights:
    """Solve program 1 to a relative gap.

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


# Eigenvectors of tables of counts: products of cosines, one for each axis.
#
# V is a number on each residual space (``residual``), so that any basis of a space is one of
# eigenvectors.  Which one matters where only some of them are weighed together: a vector of a
# decomposition may lie on few cells, and what is left of the others' columns is lost.  Cosines,
# v_k[j] ~ cos(pi k (j + 1/2) / n), lie on all: the squares of v_k and v_(n-k) add up to a constant,
# and these two stand side by side.  Those of even k are even, those of odd k odd (``folding``).


def of_tables(workload: Workload, folding: Folding) -> tuple[list[Float64], list[Float64]]:
    """Return (vectors,) eigenvalues above 0 and (cells, vectors) eigenvectors of each block.

    Args:
        workload: of tables of counts; every axis of ``folding`` is folded.
    """
    spaces = spaces_of(workload)
    traces = spaces.traces(workload.weights) * float(workload.cells)
    mean_traces = {
        key: trace / dim
        for key, trace, dim in zip(spaces.keys, traces, spaces.dims, strict=True)
        if trace > 0 and dim > 0
    }
    values, vectors = [], []
    for parity in folding.parities:
        parts = [_axis(n, odd) for n, odd in zip(folding.sizes, parity, strict=True)]
        inside = [[bool(k) for k in numbers] for numbers, _ in parts]
        traces_of_vectors = [
            mean_traces.get(tuple(axis for axis, named in enumerate(chosen) if named), 0.0)
            for chosen in itertools.product(*inside)
        ]
        positive = np.array(traces_of_vectors) > 0
        values.append(np.array(traces_of_vectors)[positive])
        vectors.append(kron([block for _, block in parts])[:, positive])
    return values, vectors


def _axis(size: int, odd: int) -> tuple[list[int], Float64]:
    """The numbers k of one parity, mirrors side by side, and their vectors on half the axis."""
    numbers = sorted(range(odd, size, 2), key=lambda k: (min(k, size - k), k))
    if size == 1:
        return numbers, np.ones((1, 1))
    low = size // 2
    cells = np.arange(low if odd else size - low)
    cosines = np.cos(np.pi / size * np.outer(cells + 0.5, numbers))
    cosines *= np.where(np.array(numbers) > 0, math.sqrt(2 / size), math.sqrt(1 / size))
    # A cell and its mirror are one coordinate, (e_c +- e_c') / sqrt 2; a middle cell stays.
    cosines[cells < low] *= math.sqrt(2)
    return numbers, np.asarray(cosines)


class Spectrum(NamedTuple):
    """Eigenvectors of V that are asked, block by block, and their eigenvalues.

    Attributes:
        values: (vectors,) > 0, in the blocks' order.
        vectors: for each block, (its cells, vectors).
    """

    folding: Folding
    values: Float64
    vectors: tuple[Float64, ...]

    @property
    def bound(self) -> float:
        """The singular value bound of the squared error: (sum of roots)^2 / n."""
        return float(np.sqrt(self.values).sum()) ** 2 / self.folding.cells


@one_thread()
def spectrum(workload: Workload) -> Spectrum:
    """Return the eigenvectors that a domain's strategy weights, and the workload's eigenvalues."""
    folding = folding_of(workload)
    if workload.marginal:
        each, vectors = of_tables(workload, folding)
        return Spectrum(folding, np.concatenate(each), tuple(vectors))
    parts = [
        scipy.linalg.eigh(gram, driver="evd") if len(gram) else (np.zeros(0), gram)
        for gram in folding.grams(workload)
    ]
    largest = max(values[-1] for values, _ in parts if len(values))
    masks = [values > RANK * largest for values, _ in parts]
    return Spectrum(
        folding,
        np.concatenate([values[k] for (values, _), k in zip(parts, masks, strict=True)]),
        tuple(vectors[:, k] for (_, vectors), k in zip(parts, masks, strict=True)),
    )


def eigen(spectrum: Spectrum, tolerance: float = 1e-3) -> CellStrategy:
    """Return the eigen-design of a workload.

    Program 1 says nothing of what completion is worth, so that the result depends on how its
    solver goes.  Small steps leave more to complete: prefixes of 2,048 cells are 1.240 times the
    bound, with a solution of gap 1e-6 1.281.
    """
    weights = weigh(
        Vectors(spectrum.folding, spectrum.vectors), spectrum.values, tolerance, memory=0
    )
    return CellStrategy("eigen", designed(spectrum, weights.u))


def root(spectrum: Spectrum) -> CellStrategy:
    """Return the strategy X = V^1/2: roots of the eigenvalues as squared weights, completed.

    They are the dual's first point.
    """
    return CellStrategy("root", designed(spectrum, np.sqrt(spectrum.values)))


@one_thread()
def designed(spectrum: Spectrum, u: Float64) -> Blocks:
    """Return the blocks with squared weights u of the eigenvectors, completed."""
    blocks, at = [], 0
    for vectors in spectrum.vectors:
        part = u[at : at + vectors.shape[1]]
        blocks.append(np.asarray((vectors * part) @ vectors.T))
        at += vectors.shape[1]
    return completed(Blocks(spectrum.folding, tuple(blocks)))


def completed(gram: Blocks, ridge: float = 0.0) -> Blocks:
    """Return blocks with equal column norms, and a ridge of ``ridge`` times the largest.

    Each cell gets the difference of its column from the largest.
    """
    diagonal = gram.diagonal
    lack = diagonal.max() * (1 + ridge) - diagonal
    return Blocks(
        gram.folding,
        tuple(
            block + np.diag(lack[orbits])
            for block, orbits in zip(gram.blocks, gram.folding.orbits, strict=True)
        ),
    )
