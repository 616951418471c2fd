"""The spent amount of one kind of budget at every point of a space: disjoint boxes that fill it.

The state is a value: a charge makes a new one from it, and from the same entries in the same order
every reader makes the same one.  Epsilon and rho have one each, because a query pays one of them
and divides only its boxes.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from dpstream.accounting import limits
from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import PolicyError, UsageError, instance
from dpstream.accounting.regions.boxes import checked, disjoint, overlapped, points, stacked
from dpstream.accounting.regions.space import Budget, Space

#: What one point may have spent, beyond all budgets; sums of it stay far from 2^63.
MOST_SPENT = 1 << 61


@dataclass(frozen=True, eq=False)
class Spent:
    """The spent budget of all points; arrays are read-only.

    Attributes:
        space: of which points.
        kind: of which budget, ``epsilon`` or ``rho``.
        boxes: (n, d, 2) int64, disjoint, together the whole space.
        amounts: (n,) int64, spent by each point of a box, in millionths.
        cap: most boxes there may ever be; readers must agree on it.
    """

    space: Space
    kind: Literal["epsilon", "rho"]
    boxes: Int64
    amounts: Int64
    cap: int = limits.MAX_REGIONS

    def __post_init__(self) -> None:
        if not 1 <= self.cap <= limits.MAX_REGIONS:
            raise UsageError(
                "cap", f"must be 1 to {limits.MAX_REGIONS:,}", "choose a number in that range"
            )
        self.boxes.setflags(write=False)
        self.amounts.setflags(write=False)

    @cached_property
    def place(self) -> int:
        """The number of the dimension of initial budgets."""
        return self.space.budget_place(self.kind)

    @cached_property
    def step(self) -> int:
        """The millionths of one coordinate of it."""
        dimension = self.space.dimensions[self.place]
        return instance(dimension, Budget).step

    def most_in(self, boxes: Any) -> int:
        """Return the most that a point of the boxes has spent, in millionths.

        Raises:
            UsageError: if they are none, or no boxes of the space.
        """
        checked_boxes = checked(self.space, boxes)
        if not len(checked_boxes):
            raise UsageError("boxes", "are none", "name at least one box")
        return self.most_over(checked_boxes)

    def most_over(self, boxes: Int64) -> int:
        """Return ``most_in`` of boxes that were checked."""
        sizes = self.space.sizes
        return max(int(self.amounts[overlapped(self.boxes, b, sizes)].max()) for b in boxes)

    def least_over(self, boxes: Int64) -> int:
        """Return the least that a point of boxes that were checked has spent, in millionths."""
        sizes = self.space.sizes
        return min(int(self.amounts[overlapped(self.boxes, b, sizes)].min()) for b in boxes)

    def near(self, boxes: Int64) -> Int64:
        """Return the numbers, rising, of the regions that meet or touch one of the boxes."""
        sizes, mask = self.space.sizes, np.zeros(len(self.boxes), np.bool_)
        for low, high in boxes.transpose(0, 2, 1):
            wider = np.stack([np.maximum(low - 1, 0), np.minimum(high + 1, sizes)], axis=1)
            mask[overlapped(self.boxes, wider, sizes)] = True
        return np.flatnonzero(mask)


def untouched(
    space: Space, kind: Literal["epsilon", "rho"], cap: int = limits.MAX_REGIONS
) -> Spent:
    """Return the state in which nothing is spent anywhere.

    Raises:
        UsageError: if records have no budget of the kind, or the cap is out of range.
    """
    space.budget_place(kind)
    return Spent(space, kind, stacked([space.everything]), np.zeros(1, np.int64), cap)


def restored(
    space: Space, kind: Literal["epsilon", "rho"], boxes: Any, amounts: Any, cap: int
) -> Spent:
    """Return a state from its stored arrays.

    Raises:
        UsageError: as for ``untouched``.
        PolicyError: if the boxes do not fill the space, each point once, or an amount is negative
            or far beyond all budgets.
    """
    space.budget_place(kind)
    regions, spent = np.array(boxes), np.array(amounts)
    integral = regions.dtype == spent.dtype == np.int64
    if not integral or regions.shape != (len(spent), len(space.dimensions), 2) or len(spent) > cap:
        raise _broken("must be whole numbers for each box and dimension, no more than the cap")
    if ((spent < 0) | (spent > MOST_SPENT)).any():
        raise _broken("must have amounts of 0 or more that are not beyond all budgets")
    low, high = regions[:, :, 0], regions[:, :, 1]
    if ((low < 0) | (low >= high) | (high > space.sizes)).any():
        raise _broken("must have boxes of the space, none of them empty or inverted")
    regions = stacked([regions])
    if points(regions) != points(space.everything) or not disjoint(regions):
        raise _broken("must fill the space, each point once")
    return Spent(space, kind, regions, spent, cap)


def _broken(rule: str) -> PolicyError:
    return PolicyError("spent budget", rule, "replay the account from its first entry")
