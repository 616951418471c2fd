r"""Residual tables with a basis for each attribute, and their weights in closed form.

With bases (``bases``) for the attributes, the *residual table* of a set S of attributes holds what
the table of S says beyond the totals: M of each attribute in S, summed over the other attributes.
A query of the attributes T is a unique sum, over the subsets S of T, of a query of each of these
tables.  Its variance is

    sum over S below T of  s_S^2 prod_(i in S) rest_i prod_(i in T \ S) along_i

for tables with independent noise of sd s_S.  A table costs p_S / s_S^2 of mu^2, p_S the product of
the bases' ``norm2``, and costs add up.  Let V_S be the weighted sum of the factors of s_S^2.  By
the Cauchy-Schwarz inequality sum V_S s_S^2 is least, at cost 1, for s_S^2 ~ sqrt(p_S / V_S), and
the error is (sum_S sqrt(V_S p_S))^2.

**Bases with a small error** for a union of products.  The error of fitted tables, (sum_S sqrt(V_S
p_S))^2, rises with two figures of each attribute i and factor f: v, the sum of ``rest`` (at
``norm2`` 1), and a, the sum of ``along``.  sum_S sqrt(V_S p_S) is concave in these figures, so that
its tangent

    sum_f w_f v_f + h_f a_f

lies above it, and bases that lower the tangent lower the error.  So the weights w and h are
computed from the present bases, then new bases from the weights, in turns.  For one attribute v and
a are those of a strategy X of it with g = X^-1 1 / (1^T X^-1 1).  Among strategies of unit diagonal
and equal 1^T X^-1 1, the least tr(V X^-1), V = sum_f w_f V_f, belongs to the optimum of
V + t 1 1^T for some t: the total is asked t times more often.  So only t is searched.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import scipy.linalg
from typing_extensions import override

from dpstream.accounting.arrays import Float64, kron
from dpstream.accounting.errors import instance
from dpstream.accounting.libraries import one_thread
from dpstream.accounting.strategies.cells.bases import Basis, Even, bits_of, fitted
from dpstream.accounting.strategies.cells.optimum import optimum, refined_weights
from dpstream.accounting.strategies.cells.residual import Spaces, Tables, spaces_of
from dpstream.accounting.strategies.cells.strategy import Blocks, CellStrategy
from dpstream.accounting.workloads.attributes import Factor, interval, of_size
from dpstream.accounting.workloads.workload import Workload, workload_of

_UP = 1 + 2.0**-40


@dataclass(frozen=True, eq=False)
class FittedTables(Tables):
    """The Gram matrix X = sum_S y_S (R of each attribute in S) x (1 1^T of each other).

    Attributes:
        measured: basis of each attribute; ``y`` is (sets,) 1 / s_S^2.
    """

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

    @override
    def parts_of(self, axis: int, factor: Factor) -> tuple[Float64, Float64]:
        return self.bases[axis].along(factor), self.bases[axis].rest(factor)

    @override
    def trace(self, workload: Workload) -> float:
        spaces = spaces_of(workload)
        mass = spaces.masses(*figures_of(spaces, self.bases)) * workload.weights[spaces.products]
        masses = spaces.sums(mass)
        inverse = self.inverse(spaces, masses)
        return math.inf if inverse.max() > 1e299 else float(masses @ inverse)

    @override
    def means(self, workload: Workload) -> Float64:
        spaces = spaces_of(workload)
        mass = spaces.masses(*figures_of(spaces, self.bases))
        inverse = self.inverse(spaces, spaces.sums(mass))
        total = np.bincount(spaces.products, mass * inverse[spaces.spaces])
        return np.asarray(total / np.array(workload.rows, np.float64))

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


def costs_of(keys: Sequence[tuple[int, ...]], bases: Sequence[Basis]) -> Float64:
    """Return (sets,) cost of each residual table at noise of sd 1, rounded up."""
    norms = [basis.norm2 for basis in bases]
    return np.array([math.prod([norms[axis] for axis in key]) * _UP for key in keys])


def figures_of(spaces: Spaces, bases: Sequence[Basis]) -> tuple[Float64, Float64]:
    """Return (pairs,) sums of ``along`` and of ``rest`` of each pair's factor."""
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
    """Return the strategy with the best weights for these bases, and its error.

    Returns:
        (strategy, weighted total of the variances at mu = 1).
    """
    spaces = spaces_of(workload)
    mass = spaces.masses(*figures_of(spaces, bases)) * workload.weights[spaces.products]
    masses = spaces.sums(mass)
    costs = costs_of(spaces.keys, bases)
    measured = (masses > 0) & (spaces.dims > 0)
    roots = np.sqrt(masses[measured] * costs[measured])
    keys = tuple(key for key, used in zip(spaces.keys, measured, strict=True) if used)
    y = np.sqrt(masses[measured] / costs[measured]) / roots.sum()
    return CellStrategy("fitted", FittedTables(workload.sizes, keys, y, bases)), float(
        roots.sum() ** 2
    )


#: Turns, and the relative change of the root of the error below which they end.
_TURNS, _SETTLED = 4, 1e-5
#: t in rows of the attribute's queries: its first values, and how often their distance is halved.
_FIRST, _HALVINGS = (0.01, 0.1, 1.0, 10.0, 100.0), 3
_TOLERANCE, _POINTS = 1e-5, 40
#: Above this number of cells t and the first weights of the cells come from a coarser attribute.
COARSE, _FINE_POINTS = 512, 2


class Fit(NamedTuple):
    """The result of a fit.

    Attributes:
        strategy: residual tables with fitted bases.
        error: weighted total of the variances at mu = 1.
        weights: (n,) weights of the cells of each attribute, from the optimum that gave its basis.
    """

    strategy: CellStrategy
    error: float
    weights: tuple[Float64, ...]


class _Solution(NamedTuple):
    basis: Basis
    weights: Float64


class _Kind(NamedTuple):
    """The queries of an attribute: its factors, and the weight of each (at most 1)."""

    factors: tuple[Factor, ...]
    shares: tuple[float, ...]
    bits: int

    @property
    def name(self) -> tuple[tuple[bytes, ...], tuple[float, ...], int]:
        """Equal for equal kinds."""
        return tuple(f.canonical() for f in self.factors), self.shares, self.bits


@one_thread()
def fit(workload: Workload) -> Fit:
    """Return residual tables with fitted bases for a union of products."""
    spaces = spaces_of(workload)
    bits = bits_of(max(len(product.axes) for product in workload.products))
    chosen = [_Solution(Even(n), np.full(n, 1 / n)) for n in workload.sizes]
    solver, best = _Solver(), None
    for _ in range(_TURNS):
        bases = tuple(solution.basis for solution in chosen)
        strategy, error = weighed(workload, bases)
        if best is not None and error > best.error * (1 - _SETTLED):
            break
        best = Fit(strategy, error, tuple(solution.weights for solution in chosen))
        rest, along = _slopes(workload, spaces, bases)
        for axis, n in enumerate(workload.sizes):
            named = [k for k, (other, _) in enumerate(spaces.pairs) if other == axis]
            if n == 1 or all(spaces.pairs[k][1].kind == "identity" for k in named):
                continue
            factors = [spaces.pairs[k][1] for k in named]
            chosen[axis] = solver.best(factors, rest[named], along[named], bits, chosen[axis])
    return best if best is not None else Fit(strategy, error, ())


def _slopes(
    workload: Workload, spaces: Spaces, bases: tuple[Basis, ...]
) -> tuple[Float64, Float64]:
    """(pairs,) w and h: slopes of sum_S sqrt(V_S p_S) in v and a of each pair."""
    along, rest = figures_of(spaces, bases)
    mass = spaces.masses(along, rest) * workload.weights[spaces.products]
    masses = spaces.sums(mass)
    costs = costs_of(spaces.keys, bases)
    mass *= (np.sqrt(costs / np.maximum(masses, 1e-300)) / 2)[spaces.spaces]
    inner, outer = np.zeros(len(along)), np.zeros(len(along))
    at = 0
    for group in spaces.subsets:
        size = len(group.inside) * len(group.products)
        part = mass[at : at + size].reshape(len(group.inside), -1)
        at += size
        np.add.at(inner, group.pairs, (group.inside.T @ part).T)
        np.add.at(outer, group.pairs, (~group.inside.T @ part).T)
    norms = np.array([bases[axis].norm2 for axis, _ in spaces.pairs])
    return (
        np.divide(inner, rest * norms, out=np.zeros_like(inner), where=rest > 0),
        np.divide(outer, along, out=np.zeros_like(outer), where=along > 0),
    )


class _Solver:
    """Bases for what they are fitted to; each is solved once."""

    def __init__(self) -> None:
        self._solutions: dict[tuple[object, float], _Solution] = {}

    def best(
        self, factors: list[Factor], rest: Float64, along: Float64, bits: int, before: _Solution
    ) -> _Solution:
        """The basis with the least tangent.

        Args:
            rest, along: (factors,) weights of the tangent; before: the basis so far.
        """
        if not rest.max() > 0:
            return before
        shares = tuple(float(f"{share:.3g}") for share in (rest / rest.max()).tolist())
        kind = _Kind(tuple(factors), shares, bits)
        size = factors[0].size
        coarse = _coarser(kind) if size > COARSE else None
        tangent = _tangent(kind.factors, rest, along)
        if coarse is None:
            solution = self._solved(kind, self._searched(kind, tangent))
        else:
            ratio = self._searched(coarse, _tangent(coarse.factors, rest, along))
            solution = self._solved(kind, ratio, coarse)
        return min(solution, before, key=tangent)

    def _searched(self, kind: _Kind, tangent: Callable[[_Solution], float]) -> float:
        """The best t, in rows of the kind's queries."""
        tried = {t: tangent(self._solved(kind, t)) for t in _FIRST}
        step = 10.0
        for _ in range(_HALVINGS):
            step = math.sqrt(step)
            at = min(tried, key=lambda t: tried[t])
            for t in (at / step, at * step):
                tried[t] = tangent(self._solved(kind, t))
        return min(tried, key=lambda t: tried[t])

    def _solved(self, kind: _Kind, t: float, coarse: _Kind | None = None) -> _Solution:
        if (kind.name, t) in self._solutions:
            return self._solutions[kind.name, t]
        near = [
            (abs(math.log(other / t)), solution)
            for (name, other), solution in self._solutions.items()
            if name == kind.name
        ]
        start, most = None, _POINTS
        if coarse is not None:
            weights = self._solved(coarse, t).weights
            start, most = refined_weights(weights, kind.factors[0].size), _FINE_POINTS
        elif near:
            start = min(near, key=lambda pair: pair[0])[1].weights
        solved = optimum(_workload(kind, t), _TOLERANCE, most, start)
        matrix = instance(solved.strategy.gram, Blocks).dense()
        solution = _Solution(fitted(matrix, kind.bits), solved.certificate[0])
        self._solutions[kind.name, t] = solution
        return solution


def _tangent(
    factors: Sequence[Factor], rest: Float64, along: Float64
) -> Callable[[_Solution], float]:
    """A function from a solution to the part of the tangent that its basis adds."""

    def value(solution: _Solution) -> float:
        basis, total = solution.basis, 0.0
        for factor, w, h in zip(factors, rest.tolist(), along.tolist(), strict=True):
            a, v = basis.masses(factor)
            total += w * v * basis.norm2 + h * a
        return total

    return value


def _workload(kind: _Kind, t: float) -> Workload:
    """The queries of a kind, and the total with t times the weight of all of them."""
    rows = sum(s * f.rows for s, f in zip(kind.shares, kind.factors, strict=True))
    products = [
        (share, {0: factor})
        for share, factor in zip(kind.shares, kind.factors, strict=True)
        if share >= 1e-6
    ]
    return workload_of([of_size("cell", kind.factors[0].size)], [*products, (t * rows, {})])


def _coarser(kind: _Kind) -> _Kind | None:
    """The same queries over fewer cells; ``None`` where a factor has no coarser form."""
    size = kind.factors[0].size
    if not all(f.kind in ("range", "prefix", "width", "identity") for f in kind.factors):
        return None
    cells = COARSE // 2
    factors = [
        interval(f.kind, cells, max(1, f.width * cells // size) if f.width else 0, f.relative)
        for f in kind.factors
    ]
    return kind._replace(factors=tuple(factors))
