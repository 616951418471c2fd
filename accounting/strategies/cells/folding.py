"""Reflections: a problem that stays the same when an axis is reversed splits into even and odd
cells.

V commutes with the reversal of each *folded* axis, hence so do the optimal weights and strategy,
and all of them are block diagonal in the basis of (e_c + e_c') / sqrt 2 and (e_c - e_c') / sqrt 2,
c' the mirror of c (the middle cell of an odd size is its own mirror and only even).  With k folded
axes there are 2^k blocks of about n / 2^k cells, hence 4^k times less work.  Cells that mirror
each other form an *orbit*: one weight, one squared column norm.
"""

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpstream.accounting.arrays import Float64, Int64, kron
from dpstream.accounting.errors import UsageError
from dpstream.accounting.limits import MAX_SOLVED_CELLS
from dpstream.accounting.workloads.attributes import Factor
from dpstream.accounting.workloads.workload import Workload


@dataclass(frozen=True)
class Folding:
    """The sizes of the axes, and whether each of them is folded."""

    sizes: tuple[int, ...]
    folded: tuple[bool, ...]

    @property
    def cells(self) -> int:
        """n."""
        return math.prod(self.sizes)

    @functools.cached_property
    def parities(self) -> list[tuple[int, ...]]:
        """The parity of each block: 0 or 1 (odd) for each axis; blocks without cells are left
        out.
        """
        choices = [
            (0, 1) if f and n > 1 else (0,) for n, f in zip(self.sizes, self.folded, strict=True)
        ]
        return list(itertools.product(*choices))

    @functools.cached_property
    def halves(self) -> tuple[int, ...]:
        """The number of orbits of each axis."""
        return tuple((n + 1) // 2 if f else n for n, f in zip(self.sizes, self.folded, strict=True))

    @functools.cached_property
    def counts(self) -> Float64:
        """(orbits,) cells of each orbit."""
        each = []
        for n, folded, half in zip(self.sizes, self.folded, self.halves, strict=True):
            count = np.full(half, 2.0 if folded else 1.0)
            if folded and n % 2:
                count[-1] = 1.0
            each.append(count)
        return np.asarray(kron(each))

    @functools.cached_property
    def orbits(self) -> list[Int64]:
        """(cells of the block,) the orbit of each cell, for each block."""
        grid = np.arange(math.prod(self.halves)).reshape(self.halves)
        return [grid[np.ix_(*map(np.arange, self._shape(p)))].ravel() for p in self.parities]

    def _shape(self, parity: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(
            n // 2 if odd else half
            for n, half, odd in zip(self.sizes, self.halves, parity, strict=True)
        )

    def spread(self, orbits: Float64) -> Float64:
        """Return (n,) values of the cells from those of their orbits."""
        grid = orbits.reshape(self.halves)
        for axis, (n, folded) in enumerate(zip(self.sizes, self.folded, strict=True)):
            if folded:
                cells = np.arange(n)
                grid = grid.take(np.minimum(cells, n - 1 - cells), axis=axis)
        return grid.ravel()

    def gather(self, cells: Float64) -> Float64:
        """Return (orbits,) sums over each orbit of values of the cells."""
        grid = cells.reshape(self.sizes)
        for axis, (n, folded) in enumerate(zip(self.sizes, self.folded, strict=True)):
            if folded:
                first, last = np.split(grid, [(n + 1) // 2], axis=axis)
                pad = [(0, first.shape[k] - last.shape[k]) for k in range(grid.ndim)]
                grid = first + np.pad(np.flip(last, axis), pad)
        return grid.ravel()

    def part(self, gram: Float64, axis: int, odd: int) -> Float64:
        """Return the block of one axis' symmetric matrix."""
        n, half = self.sizes[axis], self.halves[axis]
        if not self.folded[axis] or n == 1:
            return gram
        low = n // 2
        mirrored = gram[:low, ::-1][:, :low]
        if odd:
            return np.asarray(gram[:low, :low] - mirrored)
        block = np.empty((half, half))
        block[:low, :low] = gram[:low, :low] + mirrored
        if n % 2:
            block[:low, low] = block[low, :low] = math.sqrt(2) * gram[:low, low]
            block[low, low] = gram[low, low]
        return block

    def grams(self, workload: Workload) -> list[Float64]:
        """Return V of each block."""
        grams = [np.zeros((len(orbits),) * 2) for orbits in self.orbits]
        cut: dict[tuple[Factor, int, int], Float64] = {}
        for product in workload.products:
            factors = workload.factors_of(product)
            for axis, factor in enumerate(factors):
                if (factor, axis, 0) not in cut:
                    gram = factor.gram()
                    for odd in (0, 1):
                        cut[factor, axis, odd] = self.part(gram, axis, odd)
            for total, parity in zip(grams, self.parities, strict=True):
                parts = [cut[f, axis, parity[axis]] for axis, f in enumerate(factors)]
                block = kron(parts)
                if len(workload.products) == 1 and product.weight == 1:
                    np.copyto(total, block)
                else:
                    np.add(total, product.weight * block, out=total)
        return grams

    def unfold(self, blocks: list[Float64]) -> Float64:
        """Return (n, n) the matrix of these blocks."""
        left: dict[tuple[int, ...], Any] = {
            parity: block.reshape(self._shape(parity) * 2)
            for parity, block in zip(self.parities, blocks, strict=True)
        }
        axis_count = len(self.sizes)
        for axis in range(axis_count):
            if self.folded[axis] and self.sizes[axis] > 1:
                left = {
                    (*p[:axis], 0, *p[axis + 1 :]): _joined(
                        block, left[*p[:axis], 1, *p[axis + 1 :]], axis, axis + axis_count
                    )
                    for p, block in left.items()
                    if p[axis] == 0
                }
        [gram] = left.values()
        return np.asarray(gram.reshape(self.cells, self.cells))


def folding_of(workload: Workload) -> Folding:
    """Return a folding of every axis that all products allow to fold.

    Raises:
        UsageError: more cells than one matrix is made for.
    """
    if workload.cells > MAX_SOLVED_CELLS:
        raise UsageError(
            "strategy",
            f"needs one matrix over all cells, of which it may have {MAX_SOLVED_CELLS:,}",
            "choose another --strategy, or use coarser cells",
        )
    folded = [True] * len(workload.sizes)
    seen: set[tuple[int, Factor]] = set()
    for product in workload.products:
        for axis, factor in zip(product.axes, product.factors, strict=True):
            if (axis, factor) not in seen:
                seen.add((axis, factor))
                folded[axis] = folded[axis] and factor.reversible
    return Folding(workload.sizes, tuple(folded))


def _joined(even: Any, odd: Any, row: int, column: int) -> Any:
    """Both halves of one axis: its rows and columns in ``row`` and ``column``."""
    even = np.moveaxis(even, (row, column), (0, 1))
    odd = np.moveaxis(odd, (row, column), (0, 1))
    half, low = len(even), len(odd)
    size = half + low
    matrix = np.empty((size, size, *even.shape[2:]))
    near, far = (even[:low, :low] + odd) / 2, (even[:low, :low] - odd) / 2
    matrix[:low, :low], matrix[size - low :, size - low :] = near, near[::-1, ::-1]
    matrix[:low, size - low :], matrix[size - low :, :low] = far[:, ::-1], far[::-1]
    if half > low:
        edge = even[:low, low] / math.sqrt(2)
        matrix[:low, low], matrix[size - low :, low] = edge, edge[::-1]
        edge = even[low, :low] / math.sqrt(2)
        matrix[low, :low], matrix[low, size - low :] = edge, edge[::-1]
        matrix[low, low] = even[low, low]
    return np.moveaxis(matrix, (0, 1), (row, column))
