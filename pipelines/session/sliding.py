"""Standing queries over records that keep arriving, and ranges of arrival that are closed.

A standing query asks the same question again and again, about a window of arrival.  As long as
every point of the window has enough budget the window stays; when its budget is used up the window
slides to the earliest later window that has enough.  The account alone determines that window, in
the transaction that charges, so that programs that run the same standing query share its windows
and never overspend them.

**Ticks.**  Each question is named by a public tick, for instance the instant at which it is due:
the
same tick asked twice is answered once, the next tick is a new charge.  Windows end at or before
``until``: a window over future arrivals would pay for records that do not exist yet.
"""

from typing import Any, NamedTuple

import numpy as np

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.regions.boxes import cut, overlapped, taken
from dpstream.accounting.regions.decision import Own, decide
from dpstream.accounting.regions.space import Integer, Real, Space, Timestamp
from dpstream.accounting.sessions.aggregates import Question
from dpstream.pipelines.session.ask import SessionRequest, ask
from dpstream.pipelines.session.open_table import OpenTable
from dpstream.pipelines.session.receipt import Answer
from dpstream.pipelines.session.selection import Selection
from dpstream.state.ledger.orders import Views

#: Characters of a tick's name.
MAX_TICK = 200


class SlidingQuestion(NamedTuple):
    """A standing query.

    Attributes:
        question: the question with its amount.
        selection: the points, of any arrival.
        arrival: the dimension of arrival.
        width: width of a window, in whole cells of the dimension's grid.
        start: coordinate at which the first window may begin.
    """

    question: Question
    selection: Selection
    arrival: str
    width: int
    start: int = 0


def arrival_of(space: Space, name: str) -> int:
    """Return the number of a dimension that can be the dimension of arrival.

    Raises:
        UsageError: its values have no order.
    """
    place = space.place(name)
    if not isinstance(space.dimensions[place], Timestamp | Integer | Real):
        raise UsageError("--arrival", "must be a dimension of instants or numbers", "name another")
    return place


def cells_wide(space: Space, name: str, coordinates: int) -> int:
    """Check that a width in coordinates is whole cells of the dimension's grid; return it.

    Raises:
        UsageError: it is not; such a window would also charge points outside it.
    """
    grid = int(space.grids[arrival_of(space, name)])
    if coordinates < 1 or coordinates % grid:
        raise UsageError("--width", "must be whole cells of the grid", "use a multiple of the grid")
    return coordinates


def tick(open_table: OpenTable, query: SlidingQuestion, until: int, name: str) -> Answer:
    """Ask one tick of a standing query.

    Args:
        until: coordinate at or before which windows end: the arrivals so far.
        name: the tick's name; the same tick is answered once.

    Raises:
        PolicyError: no window has enough budget; later arrivals may.
        DpstreamError: see `ask.ask`.
    """
    if not name or not name.isprintable() or len(name) > MAX_TICK:
        raise UsageError("--tick", "must be a short printable name", "name when it is due")
    question = query.question

    def window(views: Views) -> Int64:
        own = None
        quota = open_table.config.rules.quotas.of(question.kind, open_table.analyst)
        if quota is not None:
            own = Own(open_table.account.analyst_spent(question.kind, open_table.analyst), quota)
        return first_window(open_table.space, query, views, until, own)

    # What makes the request: the query without the window that is chosen, and the tick.
    sliding = f"{query.arrival} {query.start} {query.width}"
    request = SessionRequest(question, query.selection, as_of=name, window=window, sliding=sliding)
    return ask(open_table, request)


def first_window(
    space: Space, query: SlidingQuestion, views: Views, until: int, own: Own | None = None
) -> Int64:
    """Return (m, d, 2) the points of the earliest window whose points all have enough.

    Raises:
        PolicyError: no window has enough.
    """
    place = arrival_of(space, query.arrival)
    width, grid = query.width, int(space.grids[place])
    begin = -(-query.start // grid) * grid
    end = min(until, int(space.values[place]))
    frame = space.everything[0].copy()
    frame[place] = begin, max(end, begin)
    boxes = query.selection.boxes(views)
    points = cut(taken(boxes, at), frame) if len(at := overlapped(boxes, frame)) else boxes[:0]
    if begin + width <= end and len(points):
        kind = query.question.kind
        decision = decide(
            views.spent(kind), points, query.question.amount, False, views.usable, own
        )
        low = _gap(decision.lacking[:, place], begin, end, width, grid)
        if low is not None:
            frame[place] = low, low + width
            return cut(taken(points, overlapped(points, frame)), frame)
    raise PolicyError(
        "arrival",
        "has no window whose points all have enough budget",
        "wait for newer arrivals, or ask with a smaller budget",
    )


def _gap(taken_up: Int64, begin: int, end: int, width: int, grid: int) -> int | None:
    """Return the first line of the grid from which ``width`` coordinates are in no range."""
    low = begin
    for first, last in taken_up[np.argsort(taken_up[:, 0], kind="stable")].tolist():
        if low + width <= first:
            break
        low = max(low, -(-last // grid) * grid)
    return low if low + width <= end else None


def close_before(open_table: OpenTable, arrival: str, before: Any) -> bool:
    """Close all arrivals before a value for ever; return whether they were open.

    Args:
        before: a value of the dimension, on its grid.

    Raises:
        UsageError: it is not a value of the dimension, or lies between two lines of the grid.
    """
    place = arrival_of(open_table.space, arrival)
    edge = open_table.space.dimensions[place].edge(before)
    if not edge:
        raise UsageError("--before", "is before all arrivals", "name a later one")
    box = open_table.space.everything.copy()
    box[0, place] = 0, edge
    return open_table.account.close_for_ever(box, open_table.analyst)
