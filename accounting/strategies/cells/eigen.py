"""Program 2, the eigen-design: weighted eigenvectors of V, and columns completed to the full norm.

Repeated eigenvalues leave the eigenvectors open; those of the even and odd blocks (``folding``),
the sines of all ranges and the cosines of tables (``cosines``) are chosen, and vectors of
eigenvalue 0 are not asked.  Completion
adds to each cell what its column lacks of the largest norm: it raises no sensitivity and can only
lower the error.

*Separation* weighs groups of eigenvectors one after the other and then the groups; *principal
vectors* weighs the largest ones and gives the others one common weight.  Both are for comparison:
the dual with all weights takes a few products.
"""

from typing import NamedTuple

import numpy as np
import scipy.linalg

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.strategies.cells.cosines import of_tables
from dpstream.accounting.strategies.cells.folding import Folding, folding_of
from dpstream.accounting.strategies.cells.strategy import RANK, Blocks, CellStrategy
from dpstream.accounting.strategies.cells.threads import one_thread
from dpstream.accounting.strategies.cells.weighting import (
    Basis,
    Columns,
    Vectors,
    Weights,
    weigh,
)
from dpstream.accounting.workloads.workload import Workload


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
    """Of a domain that one matrix is solved for."""
    folding = folding_of(workload)
    if workload.marginal:
        each, vectors = of_tables(workload, folding)
        return Spectrum(folding, np.concatenate(each), tuple(vectors))
    found = [
        scipy.linalg.eigh(gram, driver="evd") if len(gram) else (np.zeros(0), gram)
        for gram in folding.grams(workload)
    ]
    largest = max(values[-1] for values, _ in found if len(values))
    kept = [values > RANK * largest for values, _ in found]
    return Spectrum(
        folding,
        np.concatenate([values[k] for (values, _), k in zip(found, kept, strict=True)]),
        tuple(vectors[:, k] for (_, vectors), k in zip(found, kept, strict=True)),
    )


def eigen(found: Spectrum, tolerance: float = 1e-3) -> CellStrategy:
    """The eigen-design of a workload.

    Program 1 says nothing of what completion is worth, so that the result depends on how its
    solver goes.  Small steps leave more to complete: prefixes of 2,048 cells are 1.240 times the
    bound, with a solution of gap 1e-6 1.281.
    """
    weights = weigh(Vectors(found.folding, found.vectors), found.values, tolerance, memory=0)
    return CellStrategy("eigen", designed(found, weights.u))


def root(found: Spectrum) -> CellStrategy:
    """Roots of the eigenvalues as squared weights (the dual's first point), completed: X =
    V^1/2."""
    return CellStrategy("root", designed(found, np.sqrt(found.values)))


@one_thread()
def designed(found: Spectrum, u: Float64) -> Blocks:
    """Squared weights u of the eigenvectors, completed."""
    blocks, at = [], 0
    for vectors in found.vectors:
        part = u[at : at + vectors.shape[1]]
        blocks.append(np.asarray((vectors * part) @ vectors.T))
        at += vectors.shape[1]
    return completed(Blocks(found.folding, tuple(blocks)))


def completed(gram: Blocks, ridge: float = 0.0) -> Blocks:
    """Adds to each cell what its column lacks of the largest, and ``ridge`` times that to all."""
    diagonal = gram.diagonal
    lack = diagonal.max() * (1 + ridge) - diagonal
    return Blocks(
        gram.folding,
        tuple(
            block + np.diag(lack[orbits])
            for block, orbits in zip(gram.blocks, gram.folding.orbits, strict=True)
        ),
    )


def separation(basis: Basis, c: Float64, size: int, tolerance: float = 1e-3) -> Weights:
    """Eigen-query separation: groups of ``size``, largest eigenvalues first."""
    order = np.argsort(-c, kind="stable")
    merged, u, whole = [], np.zeros(len(c)), np.zeros((basis.cells, 0))
    groups = [order[at : at + size] for at in range(0, len(c), size)]
    roots = []
    for group in groups:
        part = Columns(_columns(basis, group))
        weights = weigh(part, c[group], tolerance)
        u[group] = weights.u
        merged.append(part.norms(weights.u))
        roots.append(weights.error)
    whole = np.array(merged).T
    factors = weigh(Columns(whole), np.array(roots), tolerance)
    for group, factor in zip(groups, factors.u, strict=True):
        u[group] *= factor
    return _rated(basis, c, u, factors)


def principal(basis: Basis, c: Float64, count: int, tolerance: float = 1e-3) -> Weights:
    """Principal vectors: the ``count`` largest are weighed, the others share one weight."""
    order = np.argsort(-c, kind="stable")
    rest = np.zeros(len(c))
    rest[order[count:]] = 1.0
    columns = np.column_stack([_columns(basis, order[:count]), basis.norms(rest)])
    found = weigh(Columns(columns), np.append(c[order[:count]], c[order[count:]].sum()), tolerance)
    u = np.empty(len(c))
    u[order[:count]], u[order[count:]] = found.u[:-1], found.u[-1]
    return _rated(basis, c, u, found)


def _columns(basis: Basis, chosen: Int64) -> Float64:
    """Columns of B by number, runs of them at once."""
    cuts = np.flatnonzero(np.diff(chosen) != 1) + 1
    runs = np.split(chosen, cuts)
    return np.column_stack([basis.squares(slice(int(r[0]), int(r[-1]) + 1)) for r in runs])


def _rated(basis: Basis, c: Float64, u: Float64, found: Weights) -> Weights:
    u = u / basis.norms(u).max()
    asked = c > 0
    return Weights(u, found.nu, float((c[asked] / u[asked]).sum()), found.bound, found.steps)
