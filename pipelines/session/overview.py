"""The public figures of a table's account; reading them is free.

It shows what points have spent and have left, as figures and as the numbers of pictures; and the
transcript of what was asked and paid, in order.  Everything is computed from the account; no record
is looked at.

**What the map shows.**  A pixel stands for the points of some coordinates of two dimensions and of
any coordinate of the others, of ONE initial budget, which is named: points of a smaller one have
less.  It shows the least that any open point of them has left, so that none has less than is
shown: what a query over those points may ask at most.  Left out are points that were closed for
ever; a pixel of none but those is blank.
"""

from typing import Any, NamedTuple

import numpy as np

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.errors import UsageError
from dpstream.accounting.figures import second_text
from dpstream.accounting.regions.amounts import CLOSED as CLOSED_AMOUNT
from dpstream.accounting.regions.amounts import MICRO
from dpstream.accounting.regions.boxes import cut, overlapped, stacked, taken, volumes
from dpstream.accounting.regions.space import Budget, BudgetKind, Space
from dpstream.accounting.regions.spent import Spent, charge, untouched
from dpstream.accounting.sessions.table import SessionTable
from dpstream.pipelines.session import names, sentences
from dpstream.pipelines.session.conditions import nonempty
from dpstream.pipelines.session.open_table import OpenTable
from dpstream.pipelines.session.receipt import header_of, is_answer
from dpstream.pipelines.session.selection import Selection
from dpstream.state.ledger.events import RegionCharge


def overview(open_table: OpenTable, selection: Selection) -> dict[str, Any]:
    """Return the present account of some points.

    Returns:
        ``table``, ``data_set``, ``unit``, ``entries``, and for each kind of budget the most and
        least that a point has spent, what is closed for ever, how many regions the account holds,
        and the regions of most spending (``spent`` is ``None`` where it is closed).

    Raises:
        UsageError: the selection has no point.
    """
    boxes = nonempty(selection.boxes(open_table.account))
    return {
        "table": open_table.config.name,
        "digest": open_table.table.digest,
        "data_set": open_table.config.account.data_set,
        "unit": "one record",
        "entries": len(open_table.account.history()),
        "budgets": {
            kind: _budget(open_table.space, open_table.account.spent(kind), boxes)
            for kind in kinds(open_table.space)
        },
        "quotas": _quotas(open_table),
        "warnings": open_table.table.warnings,
    }


def _budget(space: Space, spent: Spent, boxes: Int64) -> dict[str, Any]:
    regions, amounts = _met(spent, boxes)
    closed = amounts >= CLOSED_AMOUNT
    counted = amounts[~closed] if not closed.all() else np.zeros(1, np.int64)
    order = np.lexsort((np.arange(len(amounts)), -amounts))[: sentences.MOST_LISTED]
    return {
        "most_spent": int(counted.max()) / MICRO,
        "least_spent": int(counted.min()) / MICRO,
        "closed_boxes": int(closed.sum()),
        "most_initial": most_initial(spent) / MICRO,
        "regions": len(spent.amounts),
        "rows": [
            {
                "where": sentences.box(space, regions[i]),
                "spent": None if closed[i] else int(amounts[i]) / MICRO,
            }
            for i in order.tolist()
        ],
    }


def most_initial(spent: Spent) -> int:
    """Return the most that a record can have of a kind of budget, in millionths."""
    return (int(spent.space.values[spent.place]) - 1) * spent.step


def _met(spent: Spent, boxes: Int64) -> tuple[Int64, Int64]:
    """Return the parts of regions in some boxes, and what their points have spent."""
    parts, amounts = list[Int64](), list[Int64]()
    for box in boxes:
        at = overlapped(spent.boxes, box)
        parts.append(cut(taken(spent.boxes, at), box))
        amounts.append(spent.amounts[at])
    return stacked(parts), np.concatenate(amounts)


def _quotas(open_table: OpenTable) -> dict[str, Any]:
    """Return the analyst's quota: the most that they may charge to one point, and have charged."""
    quotas: dict[str, Any] = {}
    for kind in kinds(open_table.space):
        quota = open_table.config.rules.quotas.of(kind, open_table.analyst)
        if quota is not None:
            mine = open_table.account.analyst_spent(kind, open_table.analyst)
            charged = mine.amounts[mine.amounts < CLOSED_AMOUNT]  # the rest is closed
            most = int(charged.max(initial=0)) / MICRO
            quotas[kind] = {
                "analyst": open_table.analyst,
                "quota": quota / MICRO,
                "most_charged": most,
            }
    return quotas


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
        at = (most_initial(spent) if initial is None else initial) // spent.step
        if not 0 <= at < space.values[place]:
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
    met &= spent.amounts < CLOSED_AMOUNT
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
    table: SessionTable, kind: BudgetKind, history: list[tuple[str, RegionCharge]]
) -> list[Moment]:
    """Return the states of the account for one kind of budget, one after each of its entries."""
    spent = untouched(table.space, kind, table.cap)
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


def kinds(space: Space) -> list[BudgetKind]:
    """Return the kinds of budget that records have."""
    return [d.kind for d in space.dimensions if isinstance(d, Budget)]


#: What an entry is.
QUESTION, PENDING, ALLOTTED, DRAWN, CLOSED = "question", "cut off", "allotment", "draw", "closed"
HANDED = "ticket"


class Line(NamedTuple):
    """An entry of the transcript.

    Attributes:
        at: when it was charged (UTC).
        run_id: the entry's run id.
        analyst: name of the analyst who asked.
        what: one of the words above; a question that was charged and not answered was
            interrupted, or is being answered now; for one that was handed out the account has the
            ticket's name.
        question: the question as text.
        kind, amount: what was paid, or used of an allotment.
        allotment: run id of the allotment that it uses; empty for none.
        name: of the allotment that it makes or uses; empty for none, or an unnamed one.
        where: the boxes that paid, as predicates; for a use of an allotment, those that it read.
        answered: when the answer was drawn; empty without one.
    """

    at: str
    run_id: str
    analyst: str
    what: str
    question: str
    kind: str
    amount: int
    allotment: str
    name: str
    where: list[str]
    answered: str

    @property
    def entry(self) -> str:
        """What the entry is, and of which allotment."""
        if self.allotment:
            return f"{self.what} on {self.name or self.allotment}"
        return f"{self.what} {self.name}".rstrip()

    def as_dict(self) -> dict[str, Any]:
        """Return the entry as values for JSON; the amount as a number."""
        return self._asdict() | {"amount": self.amount / MICRO}


def transcript(open_table: OpenTable) -> list[Line]:
    """Return all entries of the table."""
    allotments = names.read(open_table.config).allotments
    names_of = {run_id: name for name, run_id in allotments.items()}
    return [
        _line(open_table, run_id, charge, names_of.get(charge.draws_on or run_id, ""))
        for run_id, charge in open_table.account.history()
    ]


def _line(open_table: OpenTable, run_id: str, charge: RegionCharge, name: str) -> Line:
    committed = open_table.answers.read(run_id)
    answer = None if committed is None or not is_answer(committed.receipt) else committed.receipt
    header = None if answer is None else header_of(answer)
    if charge.budget == "closed":
        what = CLOSED
    elif charge.allots:
        what = ALLOTTED
    elif header is None:
        what = PENDING if committed is None else HANDED
    else:
        what = DRAWN if charge.draws_on else QUESTION
    return Line(
        at=second_text(charge.at),
        run_id=run_id,
        analyst=charge.analyst,
        what=what,
        question="" if header is None else sentences.question(header.question),
        kind="" if charge.budget == "closed" else charge.budget,
        amount=charge.amount,
        allotment=charge.draws_on,
        name=name,
        where=sentences.boxes(
            open_table.space, charge.read if charge.draws_on else charge.boxes, most=3
        ),
        answered="" if header is None else header.answered,
    )
