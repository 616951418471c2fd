"""The tree that all quantiles of a column come from: its matrix, its inverse, its accuracy.

A column's range on the grid is cut into at most ``LEAVES`` cells (powers of two).  A group's
histogram x over the cells is noised as A x + z, A the 0/1 matrix of a binary tree over the cells
(``accounting.tuning.question.encoder_matrix``), z one Gaussian (or geometric) for each node.  One
value is in one node of each level, so that r values of a unit move A x by at most r sqrt(levels)
in L2 (|A v| is convex in v >= 0 with sum r: largest with all r in one cell; so it is r times the
root of the levels, and not the root of r levels) and r levels in L1.  The estimate of the
histogram is least squares: the pseudo-inverse of A, the same for all groups and all columns of as
many cells.

Binary was measured against wider trees: sd of a prefix less its target at 256 cells, in units of
r / mu: 2 children 3.0, 4 children 3.1, 8 children 3.4, 16 children 3.9.
"""

import functools
from typing import NamedTuple

import numpy as np

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.query.plan import QueryColumn
from dpstream.accounting.tuning.question import encoder_matrix

#: Most cells of a range: quantiles are exact to 1/256 of it, and straight within a cell.
LEAVES = 256


class Tree(NamedTuple):
    """A binary tree over so many cells, read-only.

    Attributes:
        matrix: (nodes, cells) A; levels: nodes that a cell is in.
        prefixes: (cells, nodes) least squares of the histogram's prefixes.
        factor: (cells, cells) covariance of the prefixes for node noise of sd 1.
    """

    matrix: Int64
    levels: int
    prefixes: Float64
    factor: Float64


class Windows(NamedTuple):
    """Means of ``size`` neighbouring prefixes, from each cell on and before each cell.

    Attributes:
        means: two (cells, cells) matrices over prefixes; a prefix before the first is 0, and those
            behind the last are the last.
        variances: two (cells,), of the means; totals: two (cells,), covariances with the last
            prefix; all for node noise of sd 1.
    """

    means: tuple[Float64, Float64]
    variances: tuple[Float64, Float64]
    totals: tuple[Float64, Float64]


@functools.lru_cache(maxsize=16)
def windows_of(cells: int, size: int) -> Windows:
    """The windows of a tree's prefixes."""
    factor = tree_of(cells).factor
    start, of = np.divmod(np.arange(cells * size), size)
    ahead, behind = np.zeros((cells, cells)), np.zeros((cells, cells))
    np.add.at(ahead, (start, np.minimum(start + of, cells - 1)), 1 / size)
    there = start - 1 - of >= 0
    np.add.at(behind, (start[there], (start - 1 - of)[there]), 1 / size)
    both = ahead, behind
    variances = [((w @ factor) * w).sum(axis=1) for w in both]
    totals = [w @ factor[:, -1] for w in both]
    for part in (*both, *variances, *totals):
        part.setflags(write=False)
    return Windows(both, (variances[0], variances[1]), (totals[0], totals[1]))


@functools.lru_cache(maxsize=16)
def tree_of(cells: int) -> Tree:
    """The tree over ``cells`` cells."""
    matrix = encoder_matrix(cells)
    sums = np.tril(np.ones((cells, cells)))
    prefixes = sums @ np.linalg.pinv(matrix.astype(np.float64))
    factor = prefixes @ prefixes.T
    prefixes.setflags(write=False)
    factor.setflags(write=False)
    return Tree(matrix, int(matrix.sum(axis=0).max()), prefixes, factor)


def cells_of(column: QueryColumn) -> int:
    """Cells of a column's range: a power of two, at most ``LEAVES``."""
    lo, hi = column.grid_bounds()
    return int(min(LEAVES, 1 << (hi - lo).bit_length()))


def levels_of(column: QueryColumn) -> int:
    """Levels of its tree, without making it."""
    return cells_of(column).bit_length()


def rank_factor(column: QueryColumn) -> float:
    """Largest sd of a prefix less half of the total, for node noise of sd 1."""
    factor = tree_of(cells_of(column)).factor
    variance = factor.diagonal() - factor[:, -1] + factor[-1, -1] / 4
    return float(np.sqrt(variance.max()))


def cell_at(column: QueryColumn, values: Int64) -> Int64:
    """(n,) cell of values in grid units, which are clamped."""
    lo, hi = column.grid_bounds()
    return np.asarray((np.clip(values, lo, hi) - lo) * cells_of(column) // _width(column))


def value_at(column: QueryColumn, position: Float64) -> Float64:
    """Values at positions in cells (2.5: the middle of the third), on the grid and in bounds."""
    lo, hi = column.grid_bounds()
    steps = np.floor(position * (_width(column) / cells_of(column)))
    return np.asarray(np.clip(lo + steps, lo, hi) * column.grid)


def _width(column: QueryColumn) -> int:
    """Grid values that the cells share: where there are fewer, each has a cell of its own."""
    lo, hi = column.grid_bounds()
    return max(hi - lo + 1, cells_of(column))
