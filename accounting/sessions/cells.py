"""Cells: the public partition of what a batch asks, a row of the answer for each.

Cells are ranges between public edges along some dimensions, and all of them together with one
another.  They share no point, so that a record is in one cell at most: a batch of however many
cells costs a point one charge, and one record changes one cell's sums.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from dpstream.accounting import limits
from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import UsageError
from dpstream.accounting.regions.boxes import cut, overlapped, taken
from dpstream.accounting.regions.space import Category, Dimension, Space


class Axis(msgspec.Struct, frozen=True):
    """Ranges along one dimension.

    Attributes:
        name: the dimension's.
        edges: coordinates, rising; range i is ``edges[i] <= x < edges[i + 1]``.
    """

    name: str
    edges: tuple[int, ...]

    @property
    def count(self) -> int:
        """The number of ranges."""
        return len(self.edges) - 1


class Cells(msgspec.Struct, frozen=True):
    """The cells of a batch: of no axes there is one, all that is asked.

    Cell number n of axes of k1, k2, .. ranges is (.. (i1 k2 + i2) k3 ..), i the ranges it is in:
    the order of the answer's rows.

    Attributes:
        axes: of different dimensions.
    """

    axes: tuple[Axis, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of ranges along each axis."""
        return tuple(axis.count for axis in self.axes)

    @property
    def count(self) -> int:
        """The number of cells."""
        product = 1
        for axis in self.axes:
            product *= axis.count
        return product

    def check(self, space: Space) -> None:
        """Refuse what is no partition.

        Raises:
            UsageError: an axis is no dimension or there twice, its edges do not rise or leave the
                dimension, or there are too many cells.
        """
        names = [axis.name for axis in self.axes]
        if len(set(names)) < len(names):
            raise UsageError("cells", "must be along different dimensions", "name each once")
        for axis in self.axes:
            _check_axis(axis, space.dimensions[space.place(axis.name)])
        if self.count > limits.MAX_CELLS:
            raise UsageError(
                "cells", f"must be at most {limits.MAX_CELLS:,}", "use fewer or wider ranges"
            )

    def inside(self, space: Space, boxes: Int64) -> Int64:
        """Return (k, d, 2) the parts of boxes that are in a cell: what the batch reads and pays
        for.
        """
        hull = space.everything[0].copy()
        for axis in self.axes:
            hull[space.place(axis.name)] = axis.edges[0], axis.edges[-1]
        met = overlapped(boxes, hull)
        return cut(taken(boxes, met), hull)

    def ranges(self, space: Space, boxes: Int64, name: str) -> "Ranges":
        """Return the coordinates of a column in which the values of each cell are.

        Args:
            boxes: (m, d, 2) that the query reads, one or more; name: a dimension's.
        """
        place = space.place(name)
        values = space.dimensions[place].values
        low = int(boxes[:, place, 0].min(initial=values)) if len(boxes) else 0
        high = int(boxes[:, place, 1].max(initial=0)) if len(boxes) else values
        bounds = np.array([[low, high]], np.int64)
        which = np.zeros(self.count, np.int64)
        for number, axis in enumerate(self.axes):
            if axis.name == name:
                edges = np.clip(np.array(axis.edges, np.int64), low, high)
                bounds = np.stack([edges[:-1], edges[1:]], axis=1)
                after = int(np.prod(self.shape[number + 1 :], dtype=np.int64))
                which = np.arange(self.count) // after % axis.count
        # The point of missing values is no value; a cell without any has a range all the same.
        bounds = np.minimum(bounds, values)
        bounds[:, 0] = np.minimum(bounds[:, 0], values - 1)
        bounds[:, 1] = np.maximum(bounds[:, 1], bounds[:, 0] + 1)
        distinct, range_numbers = np.unique(bounds, axis=0, return_inverse=True)
        return Ranges(distinct, range_numbers.reshape(-1)[which])


def _check_axis(axis: Axis, dimension: Dimension) -> None:
    edges = np.array(axis.edges, np.int64)
    widths = np.diff(edges)
    for wrong, rule, fix in (
        (len(edges) < 2 or (widths < 1).any(), "must have 2 edges or more that rise", "sort them"),
        (
            len(edges) and (edges[0] < 0 or edges[-1] > dimension.size),
            "reaches out of its dimension",
            "stay within its range",
        ),
        (
            len(edges) > 1 and edges[-2] < dimension.values < edges[-1],
            "has missing values and others in one cell",
            "give missing values a cell of their own",
        ),
        (
            isinstance(dimension, Category) and (widths > 1).any(),
            "has more than one code in a cell",
            "give each code its own cell",
        ),
    ):
        if wrong:
            raise UsageError(f"cells.{axis.name}", rule, fix)


class Ranges(NamedTuple):
    """Ranges of one column in the cells of a batch.

    Attributes:
        bounds: (k, 2) int64, different ones: (low, high) coordinates, half-open, not empty.
        of: (cells,) int64, which one each cell has.
    """

    bounds: Int64
    of: Int64


def along(space: Space, name: str, edges: Sequence[Any] | None = None) -> Axis:
    """Return an axis from edges in values (``Dimension.edge``); the last one is excluded.

    Without edges: every value has a range, that of missing values too if there is one.  A
    category's ranges are single codes, so that it has no edges.

    Raises:
        UsageError: an edge is no value, or between two lines of the grid.
    """
    dimension = space.dimensions[space.place(name)]
    if edges is None:
        if dimension.size > limits.MAX_CELLS:
            raise UsageError(f"cells.{name}", "has too many values for a cell each", "give edges")
        return Axis(name, tuple(range(dimension.size + 1)))
    if isinstance(dimension, Category):
        raise UsageError(f"cells.{name}", "has codes, which have no order", "leave out the edges")
    return Axis(name, tuple(dimension.edge(value) for value in edges))


def evenly(space: Space, name: str, low: Any, high: Any, parts: int) -> Axis:
    """Return an axis of ``parts`` ranges with equal numbers of coordinates, or nearly, in [low,
    high).
    """
    dimension = space.dimensions[space.place(name)]
    first, last = dimension.edge(low), dimension.edge(high)
    if not 0 < parts <= last - first:
        raise UsageError(
            f"cells.{name}", "cannot be cut into so many parts", "use 1 part to one a coordinate"
        )
    return Axis(name, tuple(first + (last - first) * i // parts for i in range(parts + 1)))
