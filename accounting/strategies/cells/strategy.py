"""The measured sums of cells: the Gram matrix X = A^T A of a strategy A, in a structured form.

A unit that is counted in one cell moves the strategy's answers by the norm of that cell's column,
so that the squared sensitivity is the largest entry of X's diagonal, rounded up.  With noise of
that sd (mu = 1) least squares answers a workload with covariance W X^-1 W^T times the squared
sensitivity: the weighted total of the variances is s tr(V X^-1).  X need only span the workload's
rows here; what a stream publishes needs an invertible one (``mixing``).

Two strategies need no search: every cell, and the rows of a binary tree on an axis.
"""

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import scipy.linalg
from typing_extensions import override

from dpstream.accounting.arrays import Float64, kron
from dpstream.accounting.strategies.cells.folding import Folding, folding_of
from dpstream.accounting.workloads.attributes import Factor
from dpstream.accounting.workloads.workload import Product, Workload

#: Queries whose errors are computed one by one.
MAX_LISTED = 1 << 22
#: Eigenvalues below this part of the largest entry of all blocks are taken for 0.
RANK = 1e-11
#: Rows of a block whose eigenvalues cost nothing; larger ones are inverted by Cholesky if they can.
_FEW = 512
_UP = 1 + 2.0**-40


class Spread(NamedTuple):
    """Variances of the queries of one product; ``None``: too many to be computed one by one."""

    mean: float
    least: float | None
    most: float | None


class Gram(ABC):
    """The interface of the forms of a Gram matrix X."""

    @property
    @abstractmethod
    def sensitivity2(self) -> float:
        """Largest squared column norm, rounded up."""

    @abstractmethod
    def trace(self, workload: Workload) -> float:
        """Return tr(V X^-1); infinite if X does not span the workload's rows."""

    @abstractmethod
    def variances(self, workload: Workload) -> list[Float64]:
        """Return the variance of each query of each product if node noise has sd 1 (flat, in their
        order).
        """

    def spreads(self, workload: Workload) -> list[Spread]:
        """Return Mean, least and largest variance of each product's queries if node noise has sd
        1.
        """
        if workload.queries > MAX_LISTED:
            return [Spread(mean, None, None) for mean in self.means(workload).tolist()]
        return [
            Spread(float(each.mean()), float(each.min()), float(each.max()))
            for each in self.variances(workload)
        ]

    def means(self, workload: Workload) -> Float64:
        """Return (products,) mean variance of a product's queries if node noise has sd 1."""
        alone = [
            replace(workload, products=(product._replace(weight=1.0),))
            for product in workload.products
        ]
        return np.array([self.trace(one) / one.queries for one in alone])


@dataclass(frozen=True, eq=False)
class Blocks(Gram):
    """One matrix over all cells, as the blocks of a folding.

    Attributes:
        spread_of: variances of the queries of some factors if node noise has sd 1, by
            ``Factor.canonical``: of a matrix over one attribute that takes long to invert.
    """

    folding: Folding
    blocks: tuple[Float64, ...]
    spread_of: Mapping[bytes, Spread] = field(default_factory=dict)

    @functools.cached_property
    def diagonal(self) -> Float64:
        """(orbits,) squared column norms of the cells of each orbit."""
        diagonal = np.zeros_like(self.folding.counts)
        for orbits, block in zip(self.folding.orbits, self.blocks, strict=True):
            diagonal[orbits] += np.diag(block)
        return diagonal / self.folding.counts

    @property
    @override
    def sensitivity2(self) -> float:
        return float(self.diagonal.max()) * _UP

    def dense(self) -> Float64:
        """Return (n, n) the matrix."""
        return self.folding.unfold(list(self.blocks))

    @override
    def trace(self, workload: Workload) -> float:
        spreads = self._solved(workload)
        if spreads is not None:
            rows = zip(spreads, workload.products, workload.rows, strict=True)
            return math.fsum(spread.mean * product.weight * n for spread, product, n in rows)
        allowed = folding_of(workload).folded
        if any(f and not a for f, a in zip(self.folding.folded, allowed, strict=True)):
            return self.unfolded.trace(workload)
        return self.trace_of(self.folding.grams(workload))

    @override
    def spreads(self, workload: Workload) -> list[Spread]:
        return self._solved(workload) or super().spreads(workload)

    def _solved(self, workload: Workload) -> list[Spread] | None:
        """``spreads``, where ``spread_of`` has the factors of all products."""
        if len(workload.sizes) > 1 or not self.spread_of:
            return None
        names = [workload.factors_of(product)[0].canonical() for product in workload.products]
        if any(name not in self.spread_of for name in names):
            return None
        return [self.spread_of[name] for name in names]

    def trace_of(self, grams: Sequence[Float64]) -> float:
        """Return tr(V X^-1) of the blocks of V in the same folding."""
        mass = sum(float(np.trace(gram)) for gram in grams)
        return math.fsum(
            trace_of(gram, block, self.scale, mass)
            for gram, block in zip(grams, self.blocks, strict=True)
        )

    @property
    def scale(self) -> float:
        """The largest entry of the blocks' diagonals, beside which rounded eigenvalues count as
        0.
        """
        return max(float(block.diagonal().max(initial=0.0)) for block in self.blocks)

    @functools.cached_property
    def unfolded(self) -> "Blocks":
        """Return the same matrix as one block."""
        return dense_gram(self.dense(), self.folding.sizes)

    @functools.cached_property
    def covariance(self) -> Float64:
        """(n, n) X^-1 (the pseudo-inverse of a singular one)."""
        return self.folding.unfold([pseudo_inverse(b, self.scale) for b in self.blocks])

    @override
    def variances(self, workload: Workload) -> list[Float64]:
        sizes = self.folding.sizes
        return [
            _two_sided(self.covariance.reshape(sizes * 2), workload.factors_of(product))
            for product in workload.products
        ]


def _two_sided(covariance: Float64, factors: Sequence[Factor]) -> Float64:
    """(queries,) variances of a product of factors; the covariance has each axis twice."""
    if len(factors) == 1:
        return factors[0].variances(covariance)
    left = covariance
    for axis, factor in enumerate(factors):
        rows = factor.dense()
        # Axes: those left, those left again, queries of those done.
        pair = np.moveaxis(left, (0, len(factors) - axis), (-2, -1))
        left = np.einsum("...iq,qi->...q", pair @ rows.T, rows)
    return left.ravel()


@dataclass(frozen=True, eq=False)
class Kron(Gram):
    """The product of one matrix for each axis."""

    factors: tuple[Blocks, ...]

    @property
    @override
    def sensitivity2(self) -> float:
        return math.prod(factor.sensitivity2 for factor in self.factors) * _UP

    @override
    def trace(self, workload: Workload) -> float:
        traces: dict[tuple[int, Workload], float] = {}
        total = []
        for product, parts in zip(
            workload.products, map(workload.axes, workload.products), strict=True
        ):
            value = product.weight
            for axis, part in enumerate(parts):
                if (axis, part) not in traces:
                    traces[axis, part] = self.factors[axis].trace(part)
                value *= traces[axis, part]
            total.append(value)
        return math.fsum(total)

    @override
    def variances(self, workload: Workload) -> list[Float64]:
        return [
            kron([f.variances(part)[0] for f, part in zip(self.factors, parts, strict=True)])
            for parts in map(workload.axes, workload.products)
        ]

    @override
    def spreads(self, workload: Workload) -> list[Spread]:
        of_axis: dict[tuple[int, Workload], Spread] = {}
        spreads = []
        for parts in map(workload.axes, workload.products):
            for axis, part in enumerate(parts):
                if (axis, part) not in of_axis:
                    [of_axis[axis, part]] = self.factors[axis].spreads(part)
            sides = [of_axis[key] for key in enumerate(parts)]
            mean = math.prod([side.mean for side in sides])
            if any(side.least is None for side in sides):
                spreads.append(Spread(mean, None, None))
                continue
            least = math.prod([side.least or 0.0 for side in sides])
            spreads.append(Spread(mean, least, math.prod([side.most or 0.0 for side in sides])))
        return spreads


class CellStrategy(NamedTuple):
    """A named strategy; ``gram`` need not be scaled."""

    name: str
    gram: Gram

    @property
    def sensitivity2(self) -> float:
        """Largest squared column norm of the strategy, rounded up."""
        return self.gram.sensitivity2

    def error(self, workload: Workload) -> float:
        """Return the weighted total of the queries' variances at mu = 1."""
        return self.sensitivity2 * self.gram.trace(workload)

    def variances(self, workload: Workload) -> list[Float64]:
        """Return (queries of a product,) variances at mu = 1, for each product."""
        return [self.sensitivity2 * variances for variances in self.gram.variances(workload)]

    def spreads(self, workload: Workload) -> list[Spread]:
        """Return Mean, least and largest variance of each product's queries at mu = 1."""
        scale = self.sensitivity2
        return [
            Spread(*(None if figure is None else scale * figure for figure in spread))  # type: ignore[arg-type]
            for spread in self.gram.spreads(workload)
        ]


def dense_gram(matrix: Float64, sizes: Sequence[int] | None = None) -> Blocks:
    """Return one block without folding."""
    sizes = (len(matrix),) if sizes is None else tuple(sizes)
    return Blocks(Folding(sizes, (False,) * len(sizes)), (matrix,))


def pseudo_inverse(block: Float64, scale: float) -> Float64:
    """Return X^-1 on the span of X, where its eigenvalues are not roundings of 0 beside
    ``scale``.
    """
    if not len(block):
        return block
    if len(block) > _FEW and (inverse := _lower_inverse(block, scale)) is not None:
        return mirrored(inverse)
    values, vectors = scipy.linalg.eigh(block, driver="evd")
    positive = values > RANK * scale
    scaled = vectors[:, positive] * values[positive] ** -0.5
    return np.asarray(scaled @ scaled.T)


def mirrored(matrix: Float64) -> Float64:
    """Copy the lower triangle of a matrix to its upper one in place, and return the matrix."""
    for begin in range(0, len(matrix), _FEW):
        end = begin + _FEW
        matrix[begin:end, end:] = matrix[end:, begin:end].T
        block = np.tril(matrix[begin:end, begin:end])
        matrix[begin:end, begin:end] = block + np.tril(block, -1).T
    return matrix


def _lower_inverse(block: Float64, scale: float) -> Float64 | None:
    """X^-1 in the lower triangle, by Cholesky; ``None`` where X may be deficient."""
    try:
        lower = scipy.linalg.cholesky(block, lower=True)
    except scipy.linalg.LinAlgError:
        return None
    if np.diag(lower).min() ** 2 <= RANK * scale:
        return None
    return np.asarray(scipy.linalg.lapack.dpotri(lower, lower=1, overwrite_c=1)[0])


def trace_of(gram: Float64, block: Float64, scale: float, mass: float) -> float:
    """Return tr(V X^-1) of one block; infinite where X does not span V.

    Args:
        scale: beside which X's eigenvalues are told from 0; ``mass``: beside which V is.
    """
    if not len(gram) or not gram.any():
        return 0.0
    if (lower := _lower_inverse(block, scale)) is not None:
        below = 0.0
        for begin in range(0, len(gram), _FEW):
            rows = slice(begin, begin + _FEW)
            below += float(np.einsum("ij,ij->", np.tril(lower[rows], begin), gram[rows]))
        return float(2 * below - np.diag(lower) @ np.diag(gram))
    inverse = pseudo_inverse(block, scale)
    beyond = gram - block @ (inverse @ gram)
    if np.abs(np.diag(beyond)).sum() > 1e-9 * mass:
        return math.inf
    return float(np.einsum("ij,ij->", inverse, gram))


class Solved(NamedTuple):
    """A strategy and what proves that it is good.

    Attributes:
        error: the strategy's weighted total error, or its largest variance, at mu = 1.
        floor: lower bound of every strategy's.
        certificate: weights that prove the floor: (n,) of the cells, of a worst error of the
            queries too, for each axis of a product.
        steps: evaluations of F that were needed.
    """

    strategy: CellStrategy
    error: float
    floor: float
    certificate: tuple[Float64, ...]
    steps: int

    @property
    def gap(self) -> float:
        """error / floor - 1, of the squared error."""
        return self.error / self.floor - 1


class Identity(Gram):
    """The Gram matrix X = I over any domain."""

    @property
    @override
    def sensitivity2(self) -> float:
        return 1.0

    @override
    def trace(self, workload: Workload) -> float:
        return math.fsum(
            product.weight
            * _summed(workload, product)
            * math.prod(sum(f.masses) for f in product.factors)
            for product in workload.products
        )

    @override
    def variances(self, workload: Workload) -> list[Float64]:
        return [
            kron([np.asarray(sum(factor.parts)) for factor in workload.factors_of(product)])
            for product in workload.products
        ]

    @override
    def spreads(self, workload: Workload) -> list[Spread]:
        of_factor: dict[Factor, Spread] = {}
        for factor in {f for product in workload.products for f in product.factors}:
            each = np.add(*factor.parts)
            of_factor[factor] = Spread(float(each.mean()), float(each.min()), float(each.max()))
        spreads = []
        for product in workload.products:
            sides = [of_factor[factor] for factor in product.factors]
            summed = _summed(workload, product)
            spreads.append(
                Spread(
                    *(
                        summed * math.prod(side)
                        for side in zip((1.0, 1.0, 1.0), *sides, strict=True)
                    )
                )
            )
        return spreads


def _summed(workload: Workload, product: Product) -> float:
    """Cells of the attributes that a product sums out."""
    return float(workload.cells // math.prod(workload.sizes[axis] for axis in product.axes))


def identity(workload: Workload) -> CellStrategy:
    """Return the strategy that measures every cell."""
    return CellStrategy("identity", Identity())


def _nodes(size: int) -> list[tuple[int, int]]:
    """(first, end) of each node of a balanced binary tree, parents first."""
    nodes = [(0, size)]
    for lo, hi in nodes:
        if hi - lo > 1:
            nodes += [(lo, (lo + hi + 1) // 2), ((lo + hi + 1) // 2, hi)]
    return nodes


def wavelet(size: int) -> Float64:
    """Return (n, n) Haar's rows: the total, and each node's left half minus its right half."""
    rows = [np.ones(size)]
    for lo, hi in _nodes(size):
        if hi - lo > 1:
            row = np.zeros(size)
            row[lo : (lo + hi + 1) // 2], row[(lo + hi + 1) // 2 : hi] = 1.0, -1.0
            rows.append(row)
    return np.array(rows)


def tree(size: int) -> Float64:
    """Return (2n - 1, n) sums of the nodes."""
    rows = np.zeros((2 * size - 1, size))
    for row, (lo, hi) in zip(rows, _nodes(size), strict=True):
        row[lo:hi] = 1.0
    return rows
