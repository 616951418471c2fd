"""Residual tables with a basis for each attribute, and their weights in closed form.

With bases (``bases``) for the attributes, the *residual table* of a set S of attributes holds what
the table of S says beyond the totals: M of each attribute in S, summed over the other attributes.
A query of the attributes T is a unique sum, over the subsets S of T, of a query of each of these
tables.  Its variance is

    sum over S below T of  s_S^2 prod_(i in S) rest_i prod_(i in T \\ S) along_i

for tables with independent noise of sd s_S.  A table costs p_S / s_S^2 of mu^2, p_S the product of
the bases' ``norm2``, and costs add up.  Let V_S be the weighted sum of the factors of s_S^2.  By
the Cauchy-Schwarz inequality sum V_S s_S^2 is least, at cost 1, for s_S^2 ~ sqrt(p_S / V_S), and
the error is (sum_S sqrt(V_S p_S))^2.
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
        y_by_key = dict(zip(self.keys, self.y.tolist(), strict=True))
        y = np.array([y_by_key.get(key, 0.0) for key in spaces.keys])
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
        y_by_key = dict(zip(self.keys, self.y.tolist(), strict=True))
        return [self._variances(product, y_by_key) for product in workload.products]

    def _variances(self, product: Product, y_by_key: dict[tuple[int, ...], float]) -> Float64:
        variances = np.zeros(product.rows)
        pairs = list(zip(product.axes, product.factors, strict=True))
        sides = [(self.bases[a].along(f), self.bases[a].rest(f)) for a, f in pairs]
        for count in range(len(pairs) + 1):
            for subset in itertools.combinations(range(len(pairs)), count):
                mass = kron([side[k in subset] for k, side in enumerate(sides)])
                if mass.any():
                    variances += mass / y_by_key.get(tuple(product.axes[k] for k in subset), 1e-300)
        return variances

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
    solved = scipy.linalg.solve_triangular(basis.root, basis.moves, lower=True)
    return np.asarray(solved.T @ solved)


def _sums(spaces: Spaces, mass: Float64) -> Float64:
    """(spaces,) sums of the masses of the parts of each space."""
    return np.bincount(spaces.spaces, mass, len(spaces.keys)).astype(np.float64)


def costs_of(keys: Sequence[tuple[int, ...]], bases: Sequence[Basis]) -> Float64:
    """(sets,) cost of each residual table at noise of sd 1, rounded up."""
    norms = [basis.norm2 for basis in bases]
    return np.array([math.prod([norms[axis] for axis in key]) * _UP for key in keys])


def figures_of(spaces: Spaces, bases: Sequence[Basis]) -> tuple[Float64, Float64]:
    """(pairs,) sums of ``along`` and of ``rest`` of each pair's factor."""
    by_name: dict[tuple[Basis, bytes], tuple[float, float]] = {}
    figures = []
    for axis, factor in spaces.pairs:
        name = bases[axis], factor.canonical()
        if name not in by_name:
            by_name[name] = bases[axis].masses(factor)
        figures.append(by_name[name])
    along, rest = np.array(figures, np.float64).reshape(-1, 2).T
    return along, rest


def weighed(workload: Workload, bases: tuple[Basis, ...]) -> tuple[CellStrategy, float]:
    """The strategy with the best weights for these bases, and its error.

    Returns:
        (strategy, weighted total of the variances at mu = 1).
    """
    spaces = spaces_of(workload)
    mass = spaces.masses(*figures_of(spaces, bases)) * workload.weights[spaces.products]
    masses = _sums(spaces, mass)
    costs = costs_of(spaces.keys, bases)
    measured = (masses > 0) & (spaces.dims > 0)
    roots = np.sqrt(masses[measured] * costs[measured])
    keys = tuple(key for key, used in zip(spaces.keys, measured, strict=True) if used)
    y = np.sqrt(masses[measured] / costs[measured]) / roots.sum()
    return CellStrategy("fitted", FittedTables(workload.sizes, keys, y, bases)), float(
        roots.sum() ** 2
    )
