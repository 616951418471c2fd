"""Ask a question of a session: once, or as a standing query over records that keep arriving.

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
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import msgspec
import numpy as np

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.regions.boxes import cut, overlapped, taken
from dpstream.accounting.regions.space import Integer, Real, Space, Timestamp
from dpstream.accounting.regions.spent import Own, decide
from dpstream.accounting.sessions.aggregates import Question, canonical
from dpstream.accounting.sessions.calibration import calibrated
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.pipelines.ask import sequence
from dpstream.pipelines.ask.question import ONCE, Asking
from dpstream.pipelines.ask.question import Question as Asked
from dpstream.pipelines.formats.receipt import answered_now, encoded
from dpstream.pipelines.session.open_table import OpenTable
from dpstream.pipelines.session.receipt import Answer, Header, decoded
from dpstream.pipelines.session.receipt import check as check_part
from dpstream.pipelines.session.selection import Selection, common
from dpstream.state.ledger.balances import region_of
from dpstream.state.ledger.contract import Answer as Committed
from dpstream.state.ledger.contract import Decision
from dpstream.state.ledger.events import Charge, ChargeKind
from dpstream.state.ledger.history import History
from dpstream.state.ledger.orders import Order, Views

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
    """A question of a session, for `ask.sequence`."""

    open_table: OpenTable
    request: SessionRequest
    kind: ClassVar[ChargeKind] = "session"

    @property
    def identity(self) -> Sequence[bytes]:
        """The canonical parts of the question; see `ask.question.Question`."""
        open_table, request = self.open_table, self.request
        _check_meaning(open_table, request)  # what no receipt can hold has no canonical form either
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
        table = _read_and_drawn(self.open_table, self.request, charge, ring)
        return encoded(header(self.open_table, self.request, **answered_now(charge)), table)


@dataclasses.dataclass(frozen=True)
class AllotmentQuestion:
    """Budget that points pay at once, for later questions: it is charged, and no noise is drawn.

    Attributes:
        order: what is charged.
        name: an allotment with the same order and name is charged only once.
    """

    open_table: OpenTable
    order: Order
    selection: Selection
    name: str
    kind: ClassVar[ChargeKind] = "session"

    @property
    def identity(self) -> Sequence[bytes]:
        """The canonical parts of the allotment; see `ask.question.Question`."""
        open_table, order = self.open_table, self.order
        return [
            b"allotment",
            open_table.table.digest.encode(),
            self.name.encode(),
            open_table.analyst.encode(),
            f"{order.kind} {order.amount}".encode(),
            self.selection.identity,
            "\0".join(sorted(set(order.cover))).encode(),
        ]

    def check(self, ring: KeyRing) -> None:
        """Do nothing: `decide` checks the order."""

    def decide(self, run_id: str, account: History) -> Decision:
        """Return the charge with an empty receipt, which is committed together with it."""
        return Decision(self.open_table.account.decide(self.order, run_id), b"")

    def stamp(self) -> object:
        """Return ``None``: no record is read."""
        return None

    def draw(self, charge: Charge, ring: KeyRing) -> bytes:
        """Return nothing: the receipt is committed with the charge."""
        return b""


def ask(
    open_table: OpenTable,
    request: SessionRequest,
    deliver: Callable[[Answer], object] = lambda _: None,
) -> Answer:
    """Return the private answer of a question.

    Args:
        deliver: shows the answer; if it fails, asking ``fresh`` again continues this answer.

    Raises:
        SessionRefusedError: points lack budget; its ``decision`` lists them, and is public.
        DpstreamError: the question has no meaning, the secret or table is missing, or the account
            is another table's.
    """
    answers = list[Answer]()

    def present(committed_answer: Committed) -> None:
        from dpstream.dp_transforms.session import presented  # loads the noise, which no plan needs

        answer = decoded(committed_answer, open_table.insecure)
        header = msgspec.structs.replace(
            answer.header, question=request.question, where=request.selection.text
        )
        table = presented(open_table.space, request.question, answer.table)
        answers.append(answer._replace(header=header, table=table))
        deliver(answers[0])

    committed(open_table, SessionQuestion(open_table, request), request.how, present)
    return answers[0]


def committed(
    open_table: OpenTable,
    question: Asked,
    how: Asking = ONCE,
    deliver: Callable[[Committed], object] = lambda _: None,
) -> Committed:
    """Return the committed answer of a question.

    Args:
        deliver: writes what the command makes of the answer.
    """

    def refreshed(answer: Committed) -> None:
        open_table.account.refresh()
        deliver(answer)

    open_table.account.refresh()  # before others are kept waiting
    return sequence.ask(question, open_table.ledger, open_table.ring, how, deliver=refreshed)


def check(open_table: OpenTable, request: SessionRequest) -> None:
    """Refuse a question that cannot be answered, before it is charged; read no record."""
    _check_meaning(open_table, request)
    open_table.manifest()
    if open_table.runner is not None:
        open_table.runner.check()
    _ = open_table.ring  # refuses a secret that cannot be read


def _check_meaning(open_table: OpenTable, request: SessionRequest) -> None:
    """Refuse a question that has no meaning, or whose answer no receipt can hold."""
    request.question.check(open_table.space)
    check_part(request.question)  # first: its canonical form relies on the types
    check_part(header(open_table, request, run_id="", plan_hash=""))


def request_of(open_table: OpenTable, request: SessionRequest) -> str:
    """Return the keyed digest by which the account recognises a question."""
    question = SessionQuestion(open_table, request)
    return sequence.request_of(question.kind, question.identity, open_table.ring, request.as_of)


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


def header(open_table: OpenTable, request: SessionRequest, **more: Any) -> Header:
    """Return the header of a question's receipt, with the question in its canonical form.

    Args:
        more: the header's other fields.
    """
    return Header(
        table=open_table.table.digest,
        where=request.selection.text,
        question=request.question.canonical,
        drop=request.drop,
        allotment=request.allotment,
        **more,
    )


def _read_and_drawn(
    open_table: OpenTable, request: SessionRequest, charge: Charge, ring: KeyRing
) -> "pa.Table":
    """Read and draw in this process, or on the workers of a runner; both give the same bytes."""
    from dpstream.dp_transforms.session import answered  # loads the noise, which no plan needs

    question, read = request.question.canonical, region_of(charge, open_table.table).read
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
    place, ordered = space.place(name), (Timestamp, Integer, Real)
    if not isinstance(space.dimensions[place], ordered):
        names = ", ".join(d.name for d in space.dimensions if isinstance(d, ordered))
        raise UsageError(
            "--arrival", f"{name!r} holds neither instants nor numbers", f"use {names}"
        )
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
        kind, analyst = question.kind, open_table.analyst
        quota = open_table.config.rules.quotas.of(kind, analyst)
        own = None if quota is None else Own(open_table.account.analyst_spent(kind, analyst), quota)
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
