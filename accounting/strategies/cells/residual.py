"""Marginals in closed form, and any workload by its parts along residual spaces.

The residual space of a set S of attributes holds what the table of S says beyond the tables of S's
subsets: the product of (I - J/n) over S and of J/n over the others, J all ones.  A strategy that
is a multiple x_S of the identity on each has error sum_S t_S / x_S with t_S = tr(V P_S), and one
squared column norm, sum_S x_S dim_S / N, for all cells.  Hence x_S ~ sqrt(t_S / dim_S) is the best
of them, with error (sum_S sqrt(t_S dim_S))^2 / N; for tables of counts V itself is such a
multiple, and the singular value bound shows that no strategy is better.

Only sets below a product's axes have t_S > 0.  y_S = x_S / N and 1/N of the traces are computed,
so that domains of 10^100 cells stay in range.
"""

import functools
import itertools
import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from typing_extensions import override

from dpstream.accounting.arrays import Bool, Float64, Int64, kron
from dpstream.accounting.errors import UsageError
from dpstream.accounting.limits import MAX_RESIDUAL_PARTS, MAX_RESIDUAL_SPACES
from dpstream.accounting.strategies.cells.bases import Basis, Even
from dpstream.accounting.strategies.cells.climb import Point, Slopes, best_of, climb
from dpstream.accounting.strategies.cells.strategy import CellStrategy, Gram, Solved, Spread
from dpstream.accounting.workloads.attributes import Factor
from dpstream.accounting.workloads.workload import Product, Workload

_UP = 1 + 2.0**-40
#: Parts that are computed at a time, and numbers of which the variances of a product are added up.
_CHUNK, _MAX_ADDED = 1 << 18, 1 << 28


class Subsets(NamedTuple):
    """Subsets of equal size, for products with equally many axes; each (subset, product) is a part.

    Attributes:
        products: (products,) numbers of the products.
        pairs: (products, axes) number in ``Spaces.pairs`` of each axis with its factor.
        inside: (subsets, axes) whether an axis is in the subset.
    """

    products: Int64
    pairs: Int64
    inside: Bool


@dataclass(frozen=True, eq=False)
class Spaces:
    """The residual spaces of a workload, and the parts of its products on them.

    Attributes:
        keys: attributes of each space.
        dims: (spaces,) dimension.
        products: (parts,) number of the product; a part is one subset of its axes.
        spaces: (parts,) number of the residual space.
        mass: (parts,) trace of one Gram matrix on it, divided by N.
        pairs: (attribute, factor) pairs that occur in the workload.
        subsets: the parts in groups, in the order of the parts.
    """

    keys: tuple[tuple[int, ...], ...]
    dims: Float64
    products: Int64
    spaces: Int64
    mass: Float64
    pairs: tuple[tuple[int, Factor], ...]
    subsets: tuple[Subsets, ...]

    def masses(self, along: Float64, rest: Float64) -> Float64:
        """Return (parts,) product of ``rest`` over axes in the subset and of ``along`` over the
        others.

        Args:
            along, rest: (pairs,) figures of the pairs.
        """
        return np.concatenate([_masses(group, along, rest) for group in self.subsets])

    def traces(self, weights: Float64) -> Float64:
        """Return (spaces,) t_S / N for weights of the products."""
        return self.sums(self.mass * weights[self.products])

    def sums(self, mass: Float64) -> Float64:
        """Return (spaces,) sums of the masses of the parts of each space."""
        return np.bincount(self.spaces, mass, len(self.keys)).astype(np.float64)

    def back(self, inverse: Float64) -> Float64:
        """Return (products,) sum of variances of a product's queries, from 1 / y of each space."""
        return np.bincount(self.products, self.mass * inverse[self.spaces]).astype(np.float64)


@functools.lru_cache(maxsize=2)
def spaces_of(workload: Workload) -> Spaces:
    """Return all residual spaces on which a workload has a part.

    They are computed once for a plan and its comparisons.

    Raises:
        UsageError: more parts or spaces than a limit.
    """
    ways: dict[int, list[int]] = {}
    for number, product in enumerate(workload.products):
        ways.setdefault(len(product.axes), []).append(number)
    if sum(len(numbers) << way for way, numbers in ways.items()) > MAX_RESIDUAL_PARTS:
        raise UsageError(
            "queries", f"tables and their subsets are at most {MAX_RESIDUAL_PARTS}", "ask fewer"
        )
    _check_number(1 << max(ways))
    keys = dict[tuple[int, ...], int]()
    pairs: dict[tuple[int, Factor], int] = {}
    parts: list[tuple[Int64, Int64]] = []
    groups: list[Subsets] = []
    for way, numbers in sorted(ways.items()):
        chosen = [workload.products[number] for number in numbers]
        axes = np.array([p.axes for p in chosen], np.int64).reshape(len(chosen), way)
        named = [
            [pairs.setdefault(pair, len(pairs)) for pair in zip(p.axes, p.factors, strict=True)]
            for p in chosen
        ]
        which = np.array(named, np.int64).reshape(len(chosen), way)
        for subsets in _subsets(way, max(1, _CHUNK // len(chosen))):
            inside = (subsets[:, :, None] == np.arange(way)).any(axis=1)
            spaces = _numbers(axes[:, subsets].swapaxes(0, 1), keys)
            parts.append((np.tile(np.array(numbers), len(subsets)), spaces))
            groups.append(Subsets(np.array(numbers, np.int64), which, inside))
            _check_number(len(keys))
    products, spaces = map(np.concatenate, zip(*parts, strict=True))
    masses = np.array([f.masses for _, f in pairs]).reshape(-1, 2)
    masses = masses / np.array([[workload.sizes[axis]] for axis, _ in pairs]).reshape(-1, 1)
    mass = np.concatenate([_masses(group, *masses.T) for group in groups])
    dims = _dims(workload.sizes, keys)
    return Spaces(tuple(keys), dims, products, spaces, mass, tuple(pairs), tuple(groups))


def _masses(group: Subsets, along: Float64, rest: Float64) -> Float64:
    inside = group.inside[:, None]
    return np.asarray(np.where(inside, rest[group.pairs], along[group.pairs]).prod(axis=2).ravel())


def _subsets(way: int, most: int) -> Iterator[Int64]:
    """(subsets, axes) the subsets of so many axes, the small ones first, in arrays of one size."""
    for count in range(way + 1):
        every = itertools.combinations(range(way), count)
        while chunk := list(itertools.islice(every, most)):
            yield np.array(chunk, np.int64).reshape(len(chunk), count)


def _check_number(spaces: int) -> None:
    if spaces > MAX_RESIDUAL_SPACES:
        raise UsageError(
            "queries",
            f"have parts on at most {MAX_RESIDUAL_SPACES:,} residual spaces, of which a product "
            "has one for each subset of its attributes",
            "ask products of fewer attributes, or one product alone",
        )


def _numbers(sets: Int64, keys: dict[tuple[int, ...], int]) -> Int64:
    """(subsets x products,) number of each set; new ones are added, subset by subset.

    Args:
        sets: (subsets, products, axes of a set).
    """
    width, count = sets.shape[1:]
    rows = sets.reshape(len(sets) * width, count)
    if count <= 8:
        codes = rows @ (1 << (7 * np.arange(count)))
        _, first, back = np.unique(codes, return_index=True, return_inverse=True)
    else:
        _, first, back = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    new = np.argsort(first // width, kind="stable")
    numbers = np.empty(len(first), np.int64)
    numbers[new] = [
        keys.setdefault(key, len(keys)) for key in map(tuple, rows[first[new]].tolist())
    ]
    return numbers[back.ravel()]


def _dims(sizes: tuple[int, ...], keys: Iterable[tuple[int, ...]]) -> Float64:
    """(sets,) dimension of each residual space."""
    less = [float(size - 1) for size in sizes]
    return np.array([math.prod([less[axis] for axis in key]) for key in keys])


@dataclass(frozen=True, eq=False)
class Tables(Gram):
    """A strategy that measures one residual table for each set of attributes in ``keys``.

    Attributes:
        sizes: cells of each attribute.
        keys: the measured sets S of attributes.
        y: (sets,) coefficient y_S > 0 of each of these sets.
    """

    sizes: tuple[int, ...]
    keys: tuple[tuple[int, ...], ...]
    y: Float64

    @functools.cached_property
    def scales(self) -> dict[tuple[int, ...], float]:
        """y of each set."""
        return dict(zip(self.keys, self.y.tolist(), strict=True))

    def inverse(self, spaces: Spaces, masses: Float64) -> Float64:
        """Return (spaces,) 1 / y where there is mass, 1e300 for a space that no table measures."""
        y = np.array([self.scales.get(key, 0.0) for key in spaces.keys])
        return np.where(masses > 0, 1 / np.maximum(y, 1e-300), 0.0)

    @abstractmethod
    def parts_of(self, axis: int, factor: Factor) -> tuple[Float64, Float64]:
        """Return (rows,) an attribute's factor of each variance at y = 1, out of S and in S."""

    @override
    def variances(self, workload: Workload) -> list[Float64]:
        return [self._variances(product) for product in workload.products]

    def _variances(self, product: Product) -> Float64:
        variances = np.zeros(product.rows)
        sides = list(map(self.parts_of, product.axes, product.factors))
        for count in range(len(sides) + 1):
            for subset in itertools.combinations(range(len(sides)), count):
                mass = kron([side[k in subset] for k, side in enumerate(sides)])
                if mass.any():
                    key = tuple(product.axes[k] for k in subset)
                    variances += mass / self.scales.get(key, 1e-300)
        return variances

    @functools.cached_property
    def dims(self) -> Float64:
        """(sets,) the count of numbers in each table."""
        return _dims(self.sizes, self.keys)

    @property
    @abstractmethod
    def noise2(self) -> Float64:
        """(sets,) s_S^2 of each table at mu = 1: its noise of sd 1 is multiplied by s_S."""

    @property
    @abstractmethod
    def bases(self) -> tuple[Basis, ...]:
        """The measured numbers of each attribute."""

    @abstractmethod
    def dense(self) -> Float64:
        """Return (n, n) the strategy as a matrix over all cells, for small domains."""

    @override
    def spreads(self, workload: Workload) -> list[Spread]:
        work = sum(
            rows << len(p.axes) for rows, p in zip(workload.rows, workload.products, strict=True)
        )
        if work > _MAX_ADDED:
            return [Spread(mean, None, None) for mean in self.means(workload).tolist()]
        return super().spreads(workload)


@dataclass(frozen=True, eq=False)
class Residual(Tables):
    """The Gram matrix X = N sum_S y_S P_S."""

    @property
    @override
    def sensitivity2(self) -> float:
        return math.fsum(self.y * self.dims) * _UP

    @override
    def parts_of(self, axis: int, factor: Factor) -> tuple[Float64, Float64]:
        along, rest = factor.parts
        return along / factor.size, rest / factor.size

    @override
    def trace(self, workload: Workload) -> float:
        spaces = spaces_of(workload)
        masses = spaces.traces(workload.weights)
        if any(
            m > 0 and key not in self.scales for m, key in zip(masses, spaces.keys, strict=True)
        ):
            return math.inf
        return float(masses @ self.inverse(spaces, masses))

    @override
    def spreads(self, workload: Workload) -> list[Spread]:
        if workload.marginal:  # the cells of a table have one variance
            return [Spread(mean, mean, mean) for mean in self.means(workload).tolist()]
        return super().spreads(workload)

    @override
    def means(self, workload: Workload) -> Float64:
        spaces = spaces_of(workload)
        total = spaces.back(self.inverse(spaces, np.ones(len(spaces.keys))))
        return np.asarray(total / np.array(workload.rows, np.float64))

    @property
    @override
    def bases(self) -> tuple[Basis, ...]:
        return tuple(map(Even, self.sizes))

    @property
    @override
    def noise2(self) -> Float64:
        """(sets,) noise variance of each space's table at mu = 1, before its subtraction.

        Published are Sub_S (table of S + noise), Sub the product of differences over S's
        attributes; a unit costs prod (1 - 1/n) / noise2 of mu^2 for each, in all 1.
        """
        cells = np.array([math.prod(float(self.sizes[a]) for a in key) for key in self.keys])
        return self.sensitivity2 / (cells * self.y)

    @override
    def dense(self) -> Float64:
        total = np.zeros((math.prod(self.sizes),) * 2)
        for key, y in zip(self.keys, self.y, strict=True):
            each = [
                np.eye(n) - 1 / n if axis in key else np.full((n, n), 1 / n)
                for axis, n in enumerate(self.sizes)
            ]
            total += len(total) * y * kron(each)
        return total


def residual(workload: Workload) -> tuple[CellStrategy, float]:
    """Return the best strategy of this form and its error; exact for tables of counts."""
    spaces = spaces_of(workload)
    traces = spaces.traces(workload.weights)
    needed = (traces > 0) & (spaces.dims > 0)
    keys = tuple(key for key, flag in zip(spaces.keys, needed, strict=True) if flag)
    total = float(np.sqrt(traces[needed] * spaces.dims[needed]).sum())
    gram = Residual(workload.sizes, keys, np.sqrt(traces[needed] / spaces.dims[needed]) / total)
    return CellStrategy("residual", gram), total**2


def worst_table(workload: Workload, tolerance: float = 1e-4) -> Solved:
    """Return the strategy of least worst (weighted) variance over tables of counts.

    For weights p of the tables that sum to 1 the largest variance is at least the mean one, whose
    least value is (sum_S sqrt(t_S(p) dim_S))^2: a dual as in ``climb``, with the variances as
    slopes.
    """
    if not workload.marginal:
        raise UsageError("objective", "worst is for tables of counts here", "use total")
    spaces = spaces_of(workload)
    rows = np.array(workload.rows, np.float64)
    scale = workload.weights / rows

    def dual(p: Float64) -> Slopes:
        traces = spaces.traces(p * scale)
        y = np.sqrt(traces / np.maximum(spaces.dims, 1e-300))
        inverse = np.where(spaces.dims > 0, 1 / np.maximum(y, 1e-300), 0.0)
        value = float(y @ spaces.dims)
        return Slopes(value, (spaces.back(inverse) * scale,), y, value)

    def primal(point: Point) -> tuple[float, Float64]:
        value, (variances,), y = point.slopes[:3]
        return value * float(variances.max()), y / value

    best = best_of(climb(dual, [np.ones(len(rows))]), primal, tolerance)
    support = [k for k, y in enumerate(best.solution) if y > 0 and spaces.dims[k] > 0]
    keys = tuple(spaces.keys[k] for k in support)
    gram = Residual(workload.sizes, keys, best.solution[support])
    strategy = CellStrategy("residual", gram)
    return Solved(strategy, best.error, best.floor, best.certificate, best.steps)
