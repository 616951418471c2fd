"""Cells: a public partition of boxes by edges of dimensions, and what the records in each add up
to.

A cell is a range of coordinates in each of a few dimensions; a record is in at most one, so that
one record changes one cell of a batch.  Sums are of coordinates: integers, in any order the same.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from dpstream.accounting import limits
from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import UsageError
from dpstream.accounting.regions.space import Space


class Cells:
    """Ranges between edges of dimensions; without dimensions there is one cell, of everything.

    Cell numbers count the last dimension fastest.  A record outside of all ranges is in no cell.

    Args:
        space: whose dimensions they are.
        places: (k,) numbers of dimensions, each once.
        edges: of each, (n + 1,) int64 coordinates, strictly rising, from 0 to its size: range i is
            edges[i] <= x < edges[i + 1].

    Raises:
        UsageError: for any other, or for more cells than ``limits.MAX_HISTOGRAM_CELLS``.
    """

    def __init__(self, space: Space, places: Sequence[int] = (), edges: Sequence[Any] = ()) -> None:
        self.places = tuple(int(place) for place in places)
        self.edges = tuple(np.asarray(some) for some in edges)
        if len(set(self.places)) < len(self.places) or len(self.places) != len(self.edges):
            raise UsageError("cells", "name a dimension twice", "give edges of each once")
        for place, some in zip(self.places, self.edges, strict=True):
            name, size = space.dimensions[place].name, int(space.sizes[place])
            if some.dtype.kind not in "iu" or some.ndim != 1 or len(some) < 2:
                raise UsageError(
                    f"cells.{name}", "must have two edges or more", "give whole coordinates"
                )
            if some[0] < 0 or some[-1] > size or (some[1:] <= some[:-1]).any():
                raise UsageError(
                    f"cells.{name}", "must have edges that rise within the dimension", "sort them"
                )
        self.edges = tuple(some.astype(np.int64) for some in self.edges)
        if self.size > limits.MAX_HISTOGRAM_CELLS:
            raise UsageError(
                "cells",
                f"must be at most {limits.MAX_HISTOGRAM_CELLS:,}",
                "use fewer edges, or fewer dimensions",
            )

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Ranges of each dimension."""
        return tuple(len(some) - 1 for some in self.edges)

    @cached_property
    def size(self) -> int:
        """How many cells there are."""
        found = 1
        for count in self.shape:
            found *= count
        return found

    def box(self, space: Space) -> Int64:
        """(d, 2) the box that all cells fill together."""
        found: Int64 = space.whole[0].copy()
        for place, some in zip(self.places, self.edges, strict=True):
            found[place] = some[0], some[-1]
        return found


class Totals(NamedTuple):
    """What the records of each cell add up to; private.

    Attributes:
        counts: (cells,) int64 records.
        present: (columns, cells) int64 of these, records that have a value of a column.
        sums: (columns, cells) int64, sums of the coordinates of those.
    """

    counts: Int64
    present: Int64
    sums: Int64


def located(at: Int64, boxes: Int64, cells: Cells) -> Int64:
    """The cell of each record that is in one of some boxes; -1 of all others.

    Args:
        at: (n, d) coordinates of usable records.
        boxes: (m, d, 2), disjoint.

    Returns:
        (n,) int64.
    """
    inside = np.zeros(len(at), np.bool_)
    for box in boxes:
        inside |= ((at >= box[:, 0]) & (at < box[:, 1])).all(axis=1)
    number = np.zeros(len(at), np.int64)
    for place, some in zip(cells.places, cells.edges, strict=True):
        column = at[:, place]
        inside &= (column >= some[0]) & (column < some[-1])
        number = number * (len(some) - 1) + np.searchsorted(some, column, "right") - 1
    return np.where(inside, number, -1)


def totalled(
    at: Int64, boxes: Int64, cells: Cells, space: Space, columns: Sequence[int] = ()
) -> Totals:
    """Totals of records that are held as coordinates: what a scan of them must give.

    Args:
        at: (n, d) coordinates of usable records.
        columns: numbers of the dimensions to add up.
    """
    number = located(at, boxes, cells)
    counts = _added(number[number >= 0], None, cells.size)
    present, sums = np.zeros((2, len(columns), cells.size), np.int64)
    for row, place in enumerate(columns):
        some = (number >= 0) & (at[:, place] < space.values[place])
        present[row] = _added(number[some], None, cells.size)
        sums[row] = _added(number[some], at[some, place], cells.size)
    return Totals(counts, present, sums)


def _added(number: Int64, value: Int64 | None, size: int) -> Int64:
    found = np.zeros(size, np.int64)
    np.add.at(found, number, 1 if value is None else value)
    return found
