"""Ask a question of points: once, or at each tick of a stream of records.

It follows the common sequence of charge and answer (`pipelines.ask`).  Decision, charge and boxes
are one transaction, in which predicates on consumption are resolved.  Neither the transaction nor
anything before it reads records, so that refusals and the account are the same for all data.  Then
one scan reads the boxes that the account's entry allows.

**Standing queries** ask the same question again and again, about a window of arrival.  As long as
every point of the window has enough budget the window stays; when its budget is used up the window
slides to the earliest later window that has enough.  The account alone determines that window, in
the transaction that charges, so that programs that run the same standing query share its windows
and never overspend them.

Each question is named by a public tick, for instance the instant at which it is due: the same tick
asked twice is answered once, the next tick is a new charge.  Windows end at or before ``until``: a
window over future arrivals would pay for records that do not exist yet.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import msgspec
import numpy as np

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import InvariantError, PolicyError, UsageError
from dpstream.accounting.regions.boxes import cut, overlapped, taken
from dpstream.accounting.regions.space import Dimension, Integer, Real, Space, Timestamp
from dpstream.accounting.regions.spent import Own, decide
from dpstream.accounting.sessions.aggregates import Question, canonical
from dpstream.accounting.sessions.calibration import calibrated
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.pipelines.ask import sequence
from dpstream.pipelines.ask.question import ONCE, Asking, Covering
from dpstream.pipelines.ask.question import Question as Asked
from dpstream.pipelines.formats.receipt import answered_now, encoded
from dpstream.pipelines.project.text import instant_micros
from dpstream.pipelines.session.open_table import OpenTable
from dpstream.pipelines.session.selection import Selection, common, same_boxes
from dpstream.pipelines.sql.receipt import Header, Points
from dpstream.state.ledger.balances import region_of
from dpstream.state.ledger.contract import Answer as Committed
from dpstream.state.ledger.contract import Decision
from dpstream.state.ledger.events import Charge, ChargeKind, RegionCharge
from dpstream.state.ledger.history import History
from dpstream.state.ledger.orders import Order, Views
from dpstream.state.ledger.regions import stated_cost

if TYPE_CHECKING:
    import pyarrow as pa


class SessionRequest(NamedTuple):
    """A question, its points, and how it is asked.

    Attributes:
        question: the question with its amount.
        selection: the points that it is about.
        drop: leave out points with too little budget instead of refusing.
        cover: dimensions that are charged over their whole range, so that regions merge.
        fresh: ask again, at a new charge, a question that was answered before.
        allotment: run id of the allotment that pays; empty if the points pay.
        as_of: public label, which distinguishes otherwise equal questions.
        window: chooses the part of the selection that is asked, by the state of the account in
            the transaction (`tick`); ``None``: all of it.
        sliding: the rule of ``window`` as text; empty without one.
    """

    question: Question
    selection: Selection
    drop: bool = False
    cover: tuple[str, ...] = ()
    fresh: bool = False
    allotment: str = ""
    as_of: str = ""
    window: Callable[[Views], Int64] | None = None
    sliding: str = ""

    @property
    def how(self) -> Asking:
        """Return whether to ask again at a new charge, and the label."""
        return Asking(self.fresh, self.as_of)


@dataclasses.dataclass(frozen=True)
class SessionQuestion:
    """A question of points, for `ask.sequence`."""

    open_table: OpenTable
    request: SessionRequest
    kind: ClassVar[ChargeKind] = "session"

    @functools.cached_property
    def identity(self) -> Sequence[bytes]:
        """The canonical parts of the question; see `ask.question.Question`."""
        open_table, request = self.open_table, self.request
        request.question.check(open_table.space)  # without a meaning there is no canonical form
        nothing = open_table.space.everything[:0]
        return [
            b"question",
            open_table.table.digest.encode(),
            canonical(request.question.canonical, nothing),
            request.selection.identity,
            b"drop" if request.drop else b"",
            request.allotment.encode(),
            request.sliding.encode(),
        ]

    @functools.cached_property
    def families(self) -> Sequence[Sequence[bytes]]:
        """The figures and the points, whatever is paid; see `ask.question.Covering`."""
        open_table, request = self.open_table, self.request
        question = msgspec.structs.replace(request.question.canonical, amount=0)
        figures = canonical(question, open_table.space.everything[:0])
        digest = open_table.table.digest.encode()
        return [[b"figures", digest, figures, request.selection.identity]]

    def covers(self, charge: Charge, receipt: bytes) -> bool:
        """Return whether an answer of the same figures read the same points for no less.

        Which points a question reads must be known before its charge: one that leaves points out,
        slides, draws on an allotment or compares budgets is never covered.
        """
        request, paid = self.request, charge.regions
        decided = request.drop or request.sliding or request.allotment or request.selection.moves
        if decided or isinstance(paid, msgspec.UnsetType):
            return False
        boxes = request.question.cells.inside(self.open_table.space, request.selection.boxes())
        read = region_of(charge, self.open_table.table).read
        return paid.amount >= request.question.amount and same_boxes(read, boxes)

    def check(self, ring: KeyRing) -> None:
        """Refuse a question that cannot be answered; see `ask.question.Question`."""
        check(self.open_table, self.request)

    def decide(self, run_id: str, account: History) -> Decision:
        """Return the charge; the state of the regions follows from the charges of ``account``."""
        open_table, request, question = self.open_table, self.request, self.request.question
        if not request.allotment:
            return Decision(open_table.account.decide(order_of(open_table, request), run_id))

        terms = (request.allotment, question.kind, question.amount, open_table.analyst)
        return Decision(
            open_table.account.decide_draw(*terms, within_of(open_table, request), run_id)
        )

    def stamp(self) -> object:
        """Return ``None``: a scan reads the parts of one manifest, which do not change."""
        return None

    def draw(self, charge: Charge, ring: KeyRing) -> bytes:
        """Read the records, draw the noise and return the receipt; see `ask.question.Question`."""
        request, question = self.request, self.request.question.canonical
        points = Points(self.open_table.table.digest, question, request.drop, request.allotment)
        table = _read_and_drawn(self.open_table, question, charge, ring)
        return encoded(_header(charge, points), table)


@dataclasses.dataclass(frozen=True)
class AllotmentQuestion:
    """Budget that points pay at once, for later questions: it is charged, and no noise is drawn.

    Attributes:
        order: what is charged.
        name: the analyst's name of it; with the same order and name it is charged only once.
        earlier: how many allotments of this name the analyst has given up before.
    """

    open_table: OpenTable
    order: Order
    selection: Selection
    name: str
    earlier: int
    kind: ClassVar[ChargeKind] = "session"

    @property
    def identity(self) -> Sequence[bytes]:
        """The canonical parts of the allotment; see `ask.question.Question`."""
        open_table, order = self.open_table, self.order
        return [
            b"allotment",
            open_table.table.digest.encode(),
            f"{self.name}\0{self.earlier}".encode(),
            open_table.analyst.encode(),
            f"{order.kind} {order.amount}".encode(),
            self.selection.identity,
            "\0".join(sorted(set(order.cover))).encode(),
        ]

    def check(self, ring: KeyRing) -> None:
        """Refuse a name that another allotment of the analyst has.

        Raises:
            PolicyError: it is taken.
        """
        if self.name in self.open_table.allotments():
            raise PolicyError(
                "allotment",
                f"{self.name!r} is there already, of other points or another amount",
                f"choose another name, or write DROP ALLOTMENT {self.name} ON "
                f"{self.open_table.config.name} first",
            )

    def decide(self, run_id: str, account: History) -> Decision:
        """Return the charge with its receipt, which is committed together with it."""
        charge = self.open_table.account.decide(self.order, run_id)
        return Decision(charge, _named(self.open_table, charge, self.order, self.name))

    def stamp(self) -> object:
        """Return ``None``: no record is read."""
        return None

    def draw(self, charge: Charge, ring: KeyRing) -> bytes:
        """Refuse: the receipt is committed with the charge."""
        raise InvariantError("an allotment has its receipt")


@dataclasses.dataclass(frozen=True)
class DroppedAllotment:
    """The end of an allotment: what is left of it is drawn, and answers nothing.

    Attributes:
        name: the analyst's name of the allotment; run_id: its run id.
    """

    open_table: OpenTable
    name: str
    run_id: str
    paid: RegionCharge
    kind: ClassVar[ChargeKind] = "session"

    @property
    def identity(self) -> Sequence[bytes]:
        """The canonical parts; see `ask.question.Question`."""
        return [b"dropped", self.open_table.table.digest.encode(), self.run_id.encode()]

    def check(self, ring: KeyRing) -> None:
        """Do nothing: `decide` checks what is left."""

    def decide(self, run_id: str, account: History) -> Decision:
        """Return the draw with its receipt."""
        region, analyst = self.open_table.account, self.open_table.analyst
        remaining = region.left_of(self.run_id)
        terms = (self.run_id, self.paid.budget, remaining, analyst, lambda _, read: read, run_id)
        charge = region.decide_draw(*terms)  # type: ignore[arg-type]
        order = Order(self.paid.budget, remaining, analyst, lambda _: self.paid.read)  # type: ignore[arg-type]
        return Decision(charge, _named(self.open_table, charge, order, self.name, self.run_id))

    def stamp(self) -> object:
        """Return ``None``: no record is read."""
        return None

    def draw(self, charge: Charge, ring: KeyRing) -> bytes:
        """Refuse: the receipt is committed with the charge."""
        raise InvariantError("the end of an allotment has its receipt")


def _named(
    open_table: OpenTable, charge: Charge, order: Order, name: str, allotment: str = ""
) -> bytes:
    question = Question(kind=order.kind, amount=order.amount)
    points = Points(open_table.table.digest, question, allotment=allotment, name=name)
    return encoded(_header(charge, points))


def _header(charge: Charge, points: Points) -> Header:
    """Return the header of a receipt: what the question costs a record, whoever paid before."""
    epsilon, delta, _ = stated_cost(points.question.kind, points.question.amount)
    cost = {"epsilon": epsilon, "delta": delta, "mu": None, "threshold_delta": 0.0}
    return Header(**answered_now(charge), **cost, points=points)  # type: ignore[arg-type]


def committed(
    open_table: OpenTable,
    question: Asked,
    how: Asking = ONCE,
    deliver: Callable[[Committed], object] = lambda _: None,
    covering: Covering | None = None,
) -> Committed:
    """Return the committed answer of a question.

    Args:
        covering: decides which other answers have its figures.
        deliver: writes what the command makes of the answer.

    Raises:
        SessionRefusedError: points lack budget; its ``decision`` lists them, and is public.
        DpstreamError: the question has no meaning, the secret or table is missing, or the account
            is another table's.
    """

    def refreshed(answer: Committed) -> None:
        open_table.account.refresh()
        deliver(answer)

    open_table.account.refresh()  # before others are kept waiting
    ledger, ring = open_table.ledger, open_table.ring
    return sequence.ask(question, ledger, ring, how, refreshed, covering)


def check(open_table: OpenTable, request: SessionRequest) -> None:
    """Refuse a question that cannot be answered, before it is charged; read no record."""
    request.question.check(open_table.space)
    open_table.manifest()
    if open_table.runner is not None:
        open_table.runner.check()
    _ = open_table.ring  # refuses a secret that cannot be read


def free_run(open_table: OpenTable, request: SessionRequest) -> str | None:
    """Return the run id whose answer the account gives at no charge; ``None``: it is charged."""
    question = SessionQuestion(open_table, request)
    keys = sequence.keys_of(
        question.kind, question.identity, open_table.ring, request.as_of, question
    )
    return sequence.free_run(open_table.answers, keys, request.fresh, question)


def within_of(open_table: OpenTable, request: SessionRequest) -> Callable[[Views, Int64], Int64]:
    """Return a function that limits a draw's boxes to those that its allotment may read."""

    def within(views: Views, allotted: Int64) -> Int64:
        return _resolved(open_table, request, common(request.selection.boxes(views), allotted))

    return within


def order_of(open_table: OpenTable, request: SessionRequest) -> Order:
    """Return the order that the account decides on."""

    def resolve(views: Views) -> Int64:
        chosen = request.window or request.selection.boxes
        return _resolved(open_table, request, chosen(views))

    question = request.question
    return Order(
        question.kind, question.amount, open_table.analyst, resolve, request.drop, request.cover
    )


def _resolved(open_table: OpenTable, request: SessionRequest, boxes: Int64) -> Int64:
    """Return the parts of the boxes that lie in a cell, if their noise can be drawn."""
    parts = request.question.cells.inside(open_table.space, boxes)
    if len(parts):
        calibrated(open_table.space, request.question, parts)
    return parts


def _read_and_drawn(
    open_table: OpenTable, question: Question, charge: Charge, ring: KeyRing
) -> "pa.Table":
    """Read and draw in this process, or on the workers of a runner; both give the same bytes."""
    from dpstream.dp_transforms.session import answered  # loads the noise, which no plan needs

    read = region_of(charge, open_table.table).read
    if open_table.runner is None:
        totals = open_table.scan().totals(
            read, question.cells, question.needs(open_table.space, read)
        )
        return answered(open_table.space, question, read, totals, ring, charge.run_id)
    from dpstream.pipelines.session.records.flow import spread

    config, run_id = open_table.config, charge.run_id
    source = config.secret_source().of_run(run_id, ring.fingerprint)
    return spread(
        open_table.runner,
        config.base,
        config.folder,
        open_table.table,
        question,
        read,
        source,
        run_id,
    )


#: Characters of a tick's name.
MAX_TICK = 200


class SlidingQuestion(NamedTuple):
    """A question that is asked at each tick.

    Attributes:
        question: the question with its amount.
        selection: the points, of any arrival.
        place: number of the dimension of arrival.
        width: width of a window, in whole cells of the dimension's grid.
    """

    question: Question
    selection: Selection
    place: int
    width: int


def sliding_window(
    open_table: OpenTable, request: SessionRequest, arrival: int, width: int, until: int
) -> SessionRequest:
    """Return a question of the earliest window of arrivals that has enough budget.

    Args:
        request: its label is the tick's name: the same tick is answered once.
        arrival: number of the dimension of arrival.
        width: of a window, in coordinates.
        until: coordinate at or before which windows end: the arrivals so far.

    Raises:
        UsageError: the dimension has no order, the width is not whole cells of its grid (such a
            window would also charge points outside it), or the tick has no name.
    """
    space, name = open_table.space, request.as_of
    dimension, grid = _ordered(space, arrival), int(space.grids[arrival])
    for wrong, field, rule, fix in (
        (
            width < 1 or width % grid,
            "width",
            "must be whole cells of the grid",
            f"use a multiple of {grid}",
        ),
        (
            not name or not name.isprintable() or len(name) > MAX_TICK,
            "as_of",
            "must be a short printable name of the tick",
            "name when it is due: --as-of 2024-01-09",
        ),
    ):
        if wrong:
            raise UsageError(field, rule, fix)
    query = SlidingQuestion(request.question, request.selection, arrival, width)

    def window(views: Views) -> Int64:
        kind, analyst = query.question.kind, open_table.analyst
        quota = open_table.config.rules.quotas.of(kind, analyst)
        own = None if quota is None else Own(open_table.account.analyst_spent(kind, analyst), quota)
        return first_window(space, query, views, until, own)

    # What makes the request: the query without the window that is chosen, and the tick.
    return request._replace(window=window, sliding=f"{dimension.name} 0 {width}")


def _ordered(space: Space, place: int) -> Dimension:
    """Return a dimension whose values have an order."""
    dimension = space.dimensions[place]
    if not isinstance(dimension, Timestamp | Integer | Real):
        rule = f"{dimension.name!r} holds neither instants nor numbers"
        raise UsageError("arrival", rule, "name a dimension that does")
    return dimension


def first_window(
    space: Space, query: SlidingQuestion, views: Views, until: int, own: Own | None = None
) -> Int64:
    """Return (m, d, 2) the points of the earliest window whose points all have enough.

    Raises:
        PolicyError: no window has enough.
    """
    place, width, grid = query.place, query.width, int(space.grids[query.place])
    begin, end = 0, min(until, int(space.values[place]))
    frame = space.everything[0].copy()
    frame[place] = begin, max(end, begin)
    boxes = query.selection.boxes(views)
    points = cut(taken(boxes, at), frame) if len(at := overlapped(boxes, frame)) else boxes[:0]
    if begin + width <= end and len(points):
        kind = query.question.kind
        decision = decide(
            views.spent(kind), points, query.question.amount, False, views.usable, own
        )
        low = first_gap(decision.lacking[:, place], begin, end, width, grid)
        if low is not None:
            frame[place] = low, low + width
            return cut(taken(points, overlapped(points, frame)), frame)
    raise PolicyError(
        "arrival",
        "has no window whose points all have enough budget",
        "wait for newer arrivals, or ask with a smaller budget",
    )


def first_gap(taken_up: Int64, begin: int, end: int, width: int, grid: int) -> int | None:
    """Return the first line of the grid from which ``width`` coordinates are in no range."""
    low = begin
    for first, last in taken_up[np.argsort(taken_up[:, 0], kind="stable")].tolist():
        if low + width <= first:
            break
        low = max(low, -(-last // grid) * grid)
    return low if low + width <= end else None


def close_before(open_table: OpenTable, arrival: str, before: str) -> bool:
    """Close all arrivals before a value for ever; return whether they were open.

    Args:
        before: a value of the dimension, on its grid, as text.

    Raises:
        UsageError: it is not a value of the dimension, or lies between two lines of the grid.
    """
    place = open_table.space.place(arrival)
    dimension = _ordered(open_table.space, place)
    instant = isinstance(dimension, Timestamp)
    edge = dimension.edge(instant_micros("--before", before) if instant else before)
    if not edge:
        raise UsageError("--before", "is before all arrivals", "name a later one")
    box = open_table.space.everything.copy()
    box[0, place] = 0, edge
    return open_table.account.close_for_ever(box, open_table.analyst)
