"""The charge that a session asks of its table's account, and the decision on it.

**Everything that is read has paid.**  A query reads the boxes that it asks about (with ``drop`` cut
to the kept ones), and these lie in what is charged: dimensions of ``cover`` are widened, then boxes
are snapped outward, and dropping cuts both by the same boxes.

**Points without a budget are not asked about.**  A point without an initial budget of the kind that
pays can never be read by that kind: every amount is above 0.  So no query includes it, by a rule of
the space alone; otherwise a query of everything would always be refused, whatever was spent.

**A decision reveals nothing.**  It is a function of the entries, the order, the steward's public
rules, and the instant that the entry names, never of data.  So a refusal may name the boxes that
lack budget, and the largest amount that would be accepted.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.figures import down
from dpstream.accounting.limits import MAX_QUERY_BOXES
from dpstream.accounting.regions.amounts import MICRO
from dpstream.accounting.regions.boxes import (
    checked,
    club,
    cut,
    overlapped,
    points,
    stacked,
    taken,
    union,
)
from dpstream.accounting.regions.space import Budget, BudgetKind, Space
from dpstream.accounting.regions.spent import Decision, Own, Spent, decide
from dpstream.accounting.sessions.table import Rules, SessionTable
from dpstream.state.ledger.balances import Balances

_ANALYST = 200


class Views:
    """The state of consumption in the transaction that charges, for predicates.

    Attributes:
        usable: millionths of every initial budget that may be used.
    """

    def __init__(self, state: Balances, usable: int) -> None:
        self._state, self.usable = state, usable

    def spent(self, kind: BudgetKind) -> Spent:
        """Return the spent budget of a kind at every point.

        Raises:
            UsageError: records have no budget of that kind.
        """
        self._state.table.space.budget_place(kind)
        return self._state.spent[kind]


class Order(NamedTuple):
    """The charge that a query asks of the account.

    Attributes:
        kind: kind of the budget it pays with.
        amount: in millionths.
        analyst: name of the analyst who asks.
        resolve: returns (m, d, 2) the boxes that it asks about, disjoint, not snapped; called in
            the transaction, and again if that is repeated.
        drop: leave out points with too little budget.
        cover: dimensions charged over their whole range, so that boxes merge; the query still
            reads only what it asks about.
        allot: pay for later draws, instead of a question (`allotments`).
    """

    kind: BudgetKind
    amount: int
    analyst: str
    resolve: Callable[[Views], Any]
    drop: bool = False
    cover: tuple[str, ...] = ()
    allot: bool = False


class Planned(NamedTuple):
    """The decision that a query would get now.

    ``read``: (m, d, 2) the boxes it would read, none if refused.
    """

    decision: Decision
    read: Int64


_NOTHING_LEFT = "ask other points: SELECT * FROM dpstream.budget shows which have budget left"


_DROP = "leave those points out (drop = TRUE)"


class SessionRefusedError(PolicyError):
    """Signals that a query is refused because points lack budget.

    Attributes:
        decision: which boxes lack how much, and the largest amount that would be accepted; public.
        figures: of the decision, for machines.

    Args:
        enough: a condition on initial budgets; empty if there is none.
        allot: of an allotment, which leaves no points out, the condition on what points have left
            under which it would be accepted; empty for a question.
    """

    def __init__(self, decision: Decision, enough: str = "", allot: str = "") -> None:
        self.decision, self.enough, self.allot = decision, enough, allot
        if len(decision.boxes):
            boxes = f"{len(decision.lacking)} box{'es' * (len(decision.lacking) != 1)}"
            rule = f"points that the query asks, in {boxes}, have too little left"
            ways = [
                f"ask for at most {down(decision.largest / MICRO, 10)}" * (decision.largest > 0),
                f"ask only points with enough (WHERE {enough}, and what else is asked)"
                * bool(enough),
                (
                    f"allot points that have it (WHERE {allot}, and what else is asked)"
                    if allot
                    else _DROP
                )
                * (points(decision.lacking) < points(decision.boxes)),
            ]
            fix = ", or ".join(way for way in ways if way) or _NOTHING_LEFT
        else:
            rule, fix = "no point of the table is asked", "ask a range that holds points"
        super().__init__("budget", rule, fix)
        self.figures: dict[str, Any] = {}

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), (self.decision, self.enough, self.allot)

    def as_dict(self) -> dict[str, Any]:
        """Return the error with the figures of the decision."""
        return super().as_dict() | self.figures


def enough_of(space: Space, kind: BudgetKind, decision: Decision) -> str:
    """Return the condition on initial budgets under which no point of a refused query lacks budget.

    It is empty if there is none.
    """
    if not len(decision.lacking):
        return ""
    place = space.budget_place(kind)
    dimension, least = space.dimensions[place], int(decision.lacking[:, place, 1].max())
    if not isinstance(dimension, Budget) or least >= decision.boxes[:, place, 1].max():
        return ""
    return f"{dimension.name} >= {down(least * dimension.step / MICRO, 10)}"


def refusal_of(
    space: Space, kind: BudgetKind, decision: Decision, allotted: int = 0
) -> SessionRefusedError | None:
    """Return the error of a refused query, asked or planned; ``None``: it is accepted.

    Args:
        allotted: of an allotment its millionths for each point; 0 for a question.
    """
    if decision.accepted:
        return None
    allot = f"remaining_{kind} >= {down(allotted / MICRO, 10)}" if allotted else ""
    return SessionRefusedError(decision, enough_of(space, kind, decision), allot)


def planned(order: Order, state: Balances, rules: Rules, at: int) -> Planned:
    """Return the decision on an order at an instant.

    Args:
        state: of all entries before it, with the analyst's own charges if there is a quota.

    Raises:
        UsageError: its boxes cannot be used, or dropping leaves too many of them.
    """
    usable, kind = rules.usable(at), order.kind
    space = state.table.space
    boxes = _with_budget(space, kind, checked(space, order.resolve(Views(state, usable))))
    if not len(boxes):
        return Planned(Decision(False, boxes, boxes, boxes, np.zeros(0, np.int64), 0), boxes)
    quota = rules.quotas.of(kind, order.analyst)
    own = None if quota is None else Own(state.own[kind, order.analyst], quota)
    wide = _covered(state.table, order.cover, boxes)
    decision = decide(state.spent[kind], wide, order.amount, order.drop, usable, own)
    none = boxes[:0]
    if not decision.accepted:
        return Planned(decision, none)
    read = boxes if not len(decision.lacking) else _common(boxes, decision.charged)
    if not len(read):  # only points beside the asked ones have enough
        return Planned(decision._replace(accepted=False, charged=none), none)
    if max(len(read), len(decision.charged)) > MAX_QUERY_BOXES:
        raise UsageError(
            "drop", f"leaves more than {MAX_QUERY_BOXES:,} boxes", "ask for a smaller range"
        )
    return Planned(decision, read)


def _with_budget(space: Space, kind: BudgetKind, boxes: Int64) -> Int64:
    """Return the points that have an initial budget of a kind."""
    place = space.budget_place(kind)
    if not len(boxes) or boxes[:, place, 0].min() > 0:
        return boxes
    above = stacked([boxes])
    np.maximum(above[:, place, 0], 1, out=above[:, place, 0])
    return taken(above, above[:, place, 0] < above[:, place, 1])


def _covered(table: SessionTable, names: tuple[str, ...], boxes: Int64) -> Int64:
    """Return boxes widened to the whole of some dimensions, disjoint."""
    if not names:
        return boxes
    wide = stacked([boxes])
    for name in names:
        place = table.space.place(name)
        wide[:, place] = 0, table.space.sizes[place]
    return union(wide)


def _common(boxes: Int64, others: Int64) -> Int64:
    """Return the points that are in both of two lists of disjoint boxes."""
    parts = [cut(taken(boxes, overlapped(boxes, other)), other) for other in others]
    overlap = stacked([boxes[:0], *parts])
    return club(overlap, np.zeros(len(overlap), np.int64))[0]


def check_analyst(name: str) -> None:
    """Refuse a text that cannot be an analyst's name.

    Raises:
        UsageError: it cannot be a name.
    """
    if not 0 < len(name) <= _ANALYST or not name.isprintable():
        raise UsageError("analyst", f"must be 1 to {_ANALYST} printable characters", "shorten it")
