"""A space: its dimensions in order, one or two of them initial budgets."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from dpstream.accounting import limits
from dpstream.accounting.arrays import Bool, Int64
from dpstream.accounting.errors import UsageError
from dpstream.accounting.regions.dimensions import Budget, Dimension


@dataclass(frozen=True)
class Space:
    """Every point that a record can be at; public, fixed before the first record.

    Attributes:
        dimensions: of different names; of each kind of budget at most one, and one at least.

    Raises:
        UsageError: for any other.
    """

    dimensions: tuple[Dimension, ...]

    def __post_init__(self) -> None:
        for dimension in self.dimensions:
            dimension.check()
        names = [dimension.name for dimension in self.dimensions]
        if len(set(names)) < len(names) or len(names) > limits.MAX_DIMENSIONS:
            raise UsageError(
                "dimensions",
                f"must be at most {limits.MAX_DIMENSIONS} of different names",
                "leave out those that no query selects by",
            )
        kinds = [d.kind for d in self.dimensions if isinstance(d, Budget)]
        if not kinds or len(set(kinds)) < len(kinds):
            raise UsageError(
                "dimensions",
                "must have one initial budget, or one of epsilon and one of rho",
                "declare the column of initial budgets",
            )

    @cached_property
    def sizes(self) -> Int64:
        """(d,) coordinates of each dimension."""
        return np.array([d.size for d in self.dimensions], np.int64)

    @cached_property
    def values(self) -> Int64:
        """(d,) coordinates that stand for values."""
        return np.array([d.values for d in self.dimensions], np.int64)

    @cached_property
    def grids(self) -> Int64:
        """(d,) coordinates of a cell of the public grid."""
        return np.array([d.grid for d in self.dimensions], np.int64)

    @cached_property
    def everything(self) -> Int64:
        """(1, d, 2) the box of everything."""
        return np.stack([np.zeros_like(self.sizes), self.sizes], axis=1)[None]

    @cached_property
    def without_budget(self) -> Int64:
        """(1, d, 2) the box of the points without an initial budget of any kind: nobody can read
        them."""
        box = self.everything.copy()
        for place, dimension in enumerate(self.dimensions):
            if isinstance(dimension, Budget):
                box[:, place, 1] = 1
        return box

    def place(self, name: str) -> int:
        """The number of a dimension.

        Raises:
            UsageError: if there is none of that name.
        """
        for place, dimension in enumerate(self.dimensions):
            if dimension.name == name:
                return place
        raise UsageError("dimension", "is not one of the table", "use one of its dimensions")

    def budget_place(self, kind: str) -> int:
        """The number of the initial budget of a kind.

        Raises:
            UsageError: if records have none of that kind.
        """
        for place, dimension in enumerate(self.dimensions):
            if isinstance(dimension, Budget) and dimension.kind == kind:
                return place
        raise UsageError("budget", "is of a kind that records do not have", "pay with the other")

    def box(self, **ranges: tuple[Any, Any]) -> Int64:
        """(1, d, 2) the box low <= x < high in values, of all in the dimensions that are not named.

        ``None`` for low or high is no bound; without both, missing values are in the box too.

        Raises:
            UsageError: see ``Dimension.edge``, and for a name that is no dimension.
        """
        box = self.everything.copy()
        for name, (low, high) in ranges.items():
            place = self.place(name)
            dimension = self.dimensions[place]
            if low is None and high is None:
                continue
            box[0, place] = (
                0 if low is None else dimension.edge(low),
                dimension.values if high is None else dimension.edge(high),
            )
        return box

    def coordinates(self, columns: dict[str, Any]) -> tuple[Int64, Bool]:
        """(n, d) coordinates of records and (n,) which of them are usable.

        Raises:
            UsageError: if a dimension has no column, or one of the wrong type.
        """
        absent = [d.name for d in self.dimensions if d.name not in columns]
        if absent:
            raise UsageError(absent[0], "has no column", "give the table a column of that name")
        parts = [d.coordinates(columns[d.name]) for d in self.dimensions]
        usable = np.logical_and.reduce([part.usable for part in parts])
        return np.stack([part.at for part in parts], axis=1), usable
