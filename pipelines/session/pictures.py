"""What pictures of an account show, as numbers: a map of remaining budget, and budget over time.

Everything is computed from the public account; no record is looked at.

**What the map shows.**  A pixel stands for the points of some coordinates of two dimensions and of
any coordinate of the others, of ONE initial budget, which is named: points of a smaller one have
less.  It shows the least that any open point of them has left, so that none has less than is
shown: what a query over those points may ask at most.  Left out are points that were closed for
ever, and those that have spent the most that any budget can be (`amounts.MOST`): neither has
anything left, and the account does not tell them apart.  A pixel of none but those is blank.
"""

from typing import NamedTuple

import numpy as np

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.errors import InvariantError, UsageError, instance
from dpstream.accounting.regions.amounts import MICRO, MOST
from dpstream.accounting.regions.boxes import volumes
from dpstream.accounting.regions.charging import charge
from dpstream.accounting.regions.space import Budget, Space
from dpstream.accounting.regions.spent import Spent, untouched
from dpstream.accounting.sessions.table import SessionTable
from dpstream.state.ledger.region_charge import RegionCharge

#: Pixels along one dimension.
PIXELS = 240


class HeatMap(NamedTuple):
    """Remaining budget over two dimensions.

    Attributes:
        across, up: numbers of the dimensions.
        columns, rows: edges of the pixels, in coordinates.
        left: (rows, columns) the least that is left, as a budget; NaN where all is closed.
        initial: the initial budget of the points; ``None`` if it is one of the dimensions.
    """

    across: int
    up: int
    columns: Int64
    rows: Int64
    left: Float64
    initial: float | None


def heat_map(
    spent: Spent, across: str, up: str, initial: int | None = None, within: Int64 | None = None
) -> HeatMap:
    """Return the least that is left of an initial budget, over all other dimensions.

    Args:
        across, up: two dimensions.
        initial: in millionths, by default the most that a record can have.
        within: (d, 2) a box to show, by default the whole space.

    Raises:
        UsageError: the dimensions are equal or absent, or no record can have that budget.
    """
    space, place = spent.space, spent.place
    x, y = space.place(across), space.place(up)
    if x == y:
        raise UsageError("--by", "must be two dimensions", "name another one")
    frame = space.everything[0].copy() if within is None else np.array(within, np.int64)
    columns, rows = _edges(frame[x]), _edges(frame[y])
    at = None
    if place not in (x, y):
        dimension = space.dimensions[place]
        dimension = instance(dimension, Budget)
        top = (dimension.values - 1) * dimension.step
        at = (top if initial is None else initial) // dimension.step
        if not 0 <= at < dimension.values:
            raise UsageError("--epsilon", "is no initial budget of the table", "use a smaller one")
        frame[place] = at, at + 1
    highest = _highest(spent, frame, (x, columns), (y, rows))
    if at is not None:
        own = np.full((1, 1), at * spent.step)
    else:
        own = (columns[None, :-1] if x == place else rows[:-1, None]) * spent.step
    left = np.where(highest < 0, np.nan, np.maximum(own - highest, 0) / MICRO)
    return HeatMap(x, y, columns, rows, left, None if at is None else at * spent.step / MICRO)


def _edges(side: Int64) -> Int64:
    """Edges of pixels of a range, each a whole number of coordinates."""
    low, high = (int(edge) for edge in side)
    pixels = min(high - low, PIXELS)
    return np.array([low + (high - low) * i // pixels for i in range(pixels + 1)], np.int64)


def _highest(spent: Spent, frame: Int64, across: tuple[int, Int64], up: tuple[int, Int64]) -> Int64:
    """Return (rows, columns) the most that an open point of a pixel has spent; -1 without one."""
    met = ((spent.boxes[:, :, 0] < frame[:, 1]) & (spent.boxes[:, :, 1] > frame[:, 0])).all(axis=1)
    met &= spent.amounts < MOST
    boxes, amounts = spent.boxes[met], spent.amounts[met]
    (x, columns), (y, rows) = across, up
    spans = np.stack(
        [
            np.searchsorted(columns, boxes[:, x, 0], side="right") - 1,
            np.searchsorted(columns, boxes[:, x, 1], side="left"),
            np.searchsorted(rows, boxes[:, y, 0], side="right") - 1,
            np.searchsorted(rows, boxes[:, y, 1], side="left"),
        ],
        axis=1,
    )
    spans[:, ::2] = np.maximum(spans[:, ::2], 0)
    order = np.lexsort((*spans.T[::-1], amounts))
    spans, amounts = spans[order], amounts[order]
    # Regions that differ in other dimensions alone are one rectangle, at the largest amount.
    distinct, last = np.unique(spans[::-1], axis=0, return_index=True)
    largest = amounts[::-1][last]
    highest = np.full((len(rows) - 1, len(columns) - 1), -1, np.int64)
    rising = np.argsort(largest, kind="stable")
    for (left, right, low, high), amount in zip(
        distinct[rising].tolist(), largest[rising].tolist(), strict=True
    ):
        highest[low:high, left:right] = amount
    return highest


class Moment(NamedTuple):
    """The state of the account after one entry.

    Attributes:
        at: microseconds since 1970.
        most, mean: spent by a point, at most and on average over the space, as budgets.
        regions: number of boxes in the account.
    """

    at: int
    most: float
    mean: float
    regions: int


def over_time(
    table: SessionTable, kind: str, history: list[tuple[str, RegionCharge]]
) -> list[Moment]:
    """Return the states of the account for one kind of budget, one after each of its entries."""
    if kind not in ("epsilon", "rho"):
        raise InvariantError("kind in ('epsilon', 'rho')")
    spent = untouched(table.space, kind, table.cap)  # type: ignore[arg-type]
    volume = float(volumes(table.space.everything)[0])
    moments = list[Moment]()
    for _, entry in history:
        if entry.budget != kind or not len(entry.boxes):
            continue
        spent = charge(spent, entry.boxes, entry.amount)
        mean = float((volumes(spent.boxes) / volume) @ (spent.amounts / MICRO))
        most = int(spent.amounts.max()) / MICRO
        moments.append(Moment(entry.at, most, mean, len(spent.amounts)))
    return moments


def kinds(space: Space) -> list[str]:
    """Return the kinds of budget that records have."""
    return [d.kind for d in space.dimensions if isinstance(d, Budget)]
