"""Residual tables with a basis for each attribute, weighed by the closed form.

With bases (``bases``) for the attributes, the *residual table* of a set S of attributes has what
the table of S says beyond the totals: M of each attribute in S, the sum over the others.  A query
of the attributes T is, in one way only, a sum over the subsets S of T of a query of that table, so
its variance is

    sum over S below T of  s_S^2 prod_(i in S) rest_i prod_(i in T \\ S) along_i

for tables with independent noise of sd s_S, at a cost of p_S / s_S^2 of mu^2, p_S the product of
the bases' ``norm2``; costs add up.  With V_S the weighted sum of what stands behind s_S^2, the
Cauchy-Schwarz inequality gives the least of sum V_S s_S^2 at cost 1: s_S^2 ~ sqrt(p_S / V_S), and
the error (sum_S sqrt(V_S p_S))^2.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy.linalg
from typing_extensions import override

from dpstream.accounting.arrays import Float64, kron
from dpstream.accounting.strategies.cells.bases import Basis
from dpstream.accounting.strategies.cells.residual import Spaces, Tables, spaces_of
from dpstream.accounting.strategies.cells.strategy import CellStrategy
from dpstream.accounting.workloads.workload import Product, Workload

_UP = 1 + 2.0**-40


@dataclass(frozen=True, eq=False)
class FittedTables(Tables):
    """X = sum_S y_S (R of each attribute in S) x (1 1^T of each other).

    Attributes:
        sizes: cells of each attribute.
        keys: sets S that are measured.
        y: (sets,) 1 / s_S^2, > 0.
        measured: basis of each attribute.
    """

    sizes: tuple[int, ...]
    keys: tuple[tuple[int, ...], ...]
    y: Float64
    measured: tuple[Basis, ...]

    @property
    @override
    def bases(self) -> tuple[Basis, ...]:
        return self.measured

    @functools.cached_property
    def costs(self) -> Float64:
        """(sets,) p_S, rounded up."""
        return costs_of(self.keys, self.bases)

    @property
    @override
    def sensitivity2(self) -> float:
        return math.fsum(self.y * self.costs) * _UP

    @property
    @override
    def noise2(self) -> Float64:
        return np.asarray(self.sensitivity2 / self.y)

    def _inverse(self, spaces: Spaces, masses: Float64) -> Float64:
        known = dict(zip(self.keys, self.y.tolist(), strict=True))
        y = np.array([known.get(key, 0.0) for key in spaces.keys])
        return np.where(masses > 0, 1 / np.maximum(y, 1e-300), 0.0)

    @override
    def trace(self, workload: Workload) -> float:
        spaces = spaces_of(workload)
        mass = spaces.masses(*figures_of(spaces, self.bases)) * workload.weights[spaces.products]
        masses = _sums(spaces, mass)
        inverse = self._inverse(spaces, masses)
        return math.inf if inverse.max() > 1e299 else float(masses @ inverse)

    @override
    def means(self, workload: Workload) -> Float64:
        spaces = spaces_of(workload)
        mass = spaces.masses(*figures_of(spaces, self.bases))
        inverse = self._inverse(spaces, _sums(spaces, mass))
        total = np.bincount(spaces.products, mass * inverse[spaces.spaces])
        return np.asarray(total / np.array(workload.rows, np.float64))

    @override
    def variances(self, workload: Workload) -> list[Float64]:
        known = dict(zip(self.keys, self.y.tolist(), strict=True))
        return [self._variances(product, known) for product in workload.products]

    def _variances(self, product: Product, known: dict[tuple[int, ...], float]) -> Float64:
        found = np.zeros(product.rows)
        pairs = list(zip(product.axes, product.factors, strict=True))
        sides = [(self.bases[a].along(f), self.bases[a].rest(f)) for a, f in pairs]
        for count in range(len(pairs) + 1):
            for subset in itertools.combinations(range(len(pairs)), count):
                mass = kron([side[k in subset] for k, side in enumerate(sides)])
                if mass.any():
                    found += mass / known.get(tuple(product.axes[k] for k in subset), 1e-300)
        return found

    @override
    def dense(self) -> Float64:
        size = math.prod(self.sizes)
        total = np.zeros((size, size))
        inner = [_inner(basis) for basis in self.bases]
        for key, y in zip(self.keys, self.y.tolist(), strict=True):
            each = [
                inner[axis] if axis in key else np.ones((n, n)) for axis, n in enumerate(self.sizes)
            ]
            total += y * kron(each)
        return total


def _inner(basis: Basis) -> Float64:
    """(n, n) R."""
    solved = scipy.linalg.solve_triangular(basis.root, _moved(basis), lower=True)
    return np.asarray(solved.T @ solved)


def _moved(basis: Basis) -> Float64:
    """(n - 1, n) M."""
    found = [basis.reduced(cell, 0) for cell in np.eye(basis.size, dtype=np.int64)]
    return np.array(found, np.float64).reshape(basis.size, -1).T * 2.0**-basis.bits


def _sums(spaces: Spaces, mass: Float64) -> Float64:
    """(spaces,) sums over the parts."""
    return np.bincount(spaces.spaces, mass, len(spaces.keys)).astype(np.float64)


def costs_of(keys: Sequence[tuple[int, ...]], bases: Sequence[Basis]) -> Float64:
    """(sets,) cost of each residual table at noise of sd 1, rounded up."""
    norms = [basis.norm2 for basis in bases]
    return np.array([math.prod([norms[axis] for axis in key]) * _UP for key in keys])


def figures_of(spaces: Spaces, bases: Sequence[Basis]) -> tuple[Float64, Float64]:
    """(pairs,) sums of ``along`` and of ``rest`` of each pair's factor."""
    known: dict[tuple[Basis, bytes], tuple[float, float]] = {}
    found = []
    for axis, factor in spaces.pairs:
        name = bases[axis], factor.canonical()
        if name not in known:
            known[name] = bases[axis].masses(factor)
        found.append(known[name])
    along, rest = np.array(found, np.float64).reshape(-1, 2).T
    return along, rest


def weighed(workload: Workload, bases: tuple[Basis, ...]) -> tuple[CellStrategy, float]:
    """The best weights of these bases, and the error."""
    spaces = spaces_of(workload)
    mass = spaces.masses(*figures_of(spaces, bases)) * workload.weights[spaces.products]
    masses = _sums(spaces, mass)
    costs = costs_of(spaces.keys, bases)
    asked = (masses > 0) & (spaces.dims > 0)
    roots = np.sqrt(masses[asked] * costs[asked])
    keys = tuple(key for key, kept in zip(spaces.keys, asked, strict=True) if kept)
    y = np.sqrt(masses[asked] / costs[asked]) / roots.sum()
    return CellStrategy("fitted", FittedTables(workload.sizes, keys, y, bases)), float(
        roots.sum() ** 2
    )
