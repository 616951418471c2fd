"""Eigen-designs with fewer weights, as the paper proposes for large domains; the basis of ranges.

*Separation* weighs groups of eigenvectors one after the other and then the groups; *principal
vectors* weighs the largest ones and gives the others one common weight.  Both are for comparison:
the dual with all weights takes a few products.
"""

import numpy as np
from typing_extensions import override

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.strategies.cells.eigen import Vectors, Weights, weigh


class Sines(Vectors):
    """sqrt(2 / (n+1)) sin(pi j k / (n+1)): the eigenvectors of all ranges of n cells, never formed.

    sin^2 = (1 - cos) / 2, so that both products are one Fourier transform of n + 1 numbers.
    """

    def __init__(self, size: int) -> None:
        self.cells = self.vectors = size

    def eigenvalues(self) -> Float64:
        """(n,) of the Gram matrix of all ranges, falling."""
        k = np.arange(1, self.cells + 1)
        return (self.cells + 1) / (2 * np.sin(np.pi * k / (2 * self.cells + 2))) ** 2

    @override
    def norms(self, u: Float64) -> Float64:
        n = self.cells
        cosines = np.fft.rfft(np.concatenate([[0.0], u])).real
        half = np.concatenate([cosines, cosines[1 : (n + 2) // 2][::-1]])[1 : n + 1]
        return np.asarray((u.sum() - half) / (n + 1))

    @override
    def spread(self, nu: Float64) -> Float64:
        return self.norms(nu)


class Columns(Vectors):
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


def squares(basis: Vectors, chosen: slice = slice(None)) -> Float64:
    """(orbits, k) columns of B."""
    u, columns = np.zeros(basis.vectors), []
    for k in range(*chosen.indices(basis.vectors)):
        u[k] = 1.0
        columns.append(basis.norms(u))
        u[k] = 0.0
    return np.array(columns).T


def separation(basis: Vectors, c: Float64, size: int, tolerance: float = 1e-3) -> Weights:
    """Eigen-query separation: groups of ``size``, largest eigenvalues first."""
    order = np.argsort(-c, kind="stable")
    merged, u, columns = [], np.zeros(len(c)), np.zeros((basis.cells, 0))
    groups = [order[at : at + size] for at in range(0, len(c), size)]
    roots = []
    for group in groups:
        part = Columns(_columns(basis, group))
        weights = weigh(part, c[group], tolerance)
        u[group] = weights.u
        merged.append(part.norms(weights.u))
        roots.append(weights.error)
    columns = np.array(merged).T
    factors = weigh(Columns(columns), np.array(roots), tolerance)
    for group, factor in zip(groups, factors.u, strict=True):
        u[group] *= factor
    return _rated(basis, c, u, factors)


def principal(basis: Vectors, c: Float64, count: int, tolerance: float = 1e-3) -> Weights:
    """Principal vectors: the ``count`` largest are weighed, the others share one weight."""
    order = np.argsort(-c, kind="stable")
    rest = np.zeros(len(c))
    rest[order[count:]] = 1.0
    columns = np.column_stack([_columns(basis, order[:count]), basis.norms(rest)])
    weights = weigh(
        Columns(columns), np.append(c[order[:count]], c[order[count:]].sum()), tolerance
    )
    u = np.empty(len(c))
    u[order[:count]], u[order[count:]] = weights.u[:-1], weights.u[-1]
    return _rated(basis, c, u, weights)


def _columns(basis: Vectors, chosen: Int64) -> Float64:
    """Columns of B by number, runs of them at once."""
    cuts = np.flatnonzero(np.diff(chosen) != 1) + 1
    runs = np.split(chosen, cuts)
    return np.column_stack([squares(basis, slice(int(r[0]), int(r[-1]) + 1)) for r in runs])


def _rated(basis: Vectors, c: Float64, u: Float64, weights: Weights) -> Weights:
    u = u / basis.norms(u).max()
    support = c > 0
    return Weights(
        u, weights.nu, float((c[support] / u[support]).sum()), weights.bound, weights.steps
    )
