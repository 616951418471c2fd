"""Ask a question: charge, read, draw, commit, and only then see the answer.

The order is the guarantee:

1. *pay*: decision, charge and request are one transaction, durable before a record is read.
   Predicates on consumption are resolved in it.  Nothing before it, and nothing in it, looks at
   records, so that refusals and ledger are the same on all data.
2. *read*: one scan of the boxes that the entry says may be read.
3. *draw*: noise named by the run id of that entry.
4. *commit*, then read back what stands.

Whoever is killed behind 1 has paid and seen nothing: the same question goes on under its run id at
no charge.  Behind 4 the same question is a re-read of the old bytes, with their date, whatever was
added or deleted since: whether it is the same is decided by the question, the boxes and the ledger,
never by the records.  ``fresh`` asks anew, at a new charge.
"""

import secrets
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import InvariantError, RunError
from dpstream.accounting.sessions.aggregates import Question, canonical
from dpstream.accounting.sessions.calibration import calibrated
from dpstream.pipelines.session.desk import Desk
from dpstream.pipelines.session.receipt import Answer, Header, decoded, encoded
from dpstream.pipelines.session.receipt import check as check_header
from dpstream.pipelines.session.selection import Selection, common
from dpstream.state.ledger.orders import Order, Paid, Views

if TYPE_CHECKING:
    import pyarrow as pa


class Wish(NamedTuple):
    """What is to be asked.

    Attributes:
        question: and its amount; selection: of which points.
        drop: leave out points with too little budget instead of refusing.
        cover: dimensions that are charged over their whole range, so that regions merge.
        fresh: ask anew what was answered, at a new charge.
        allotment: run id of one that pays, empty: the points do.
        tick: tells askings apart that are the same question otherwise.
        window: the part of the selection that is asked, chosen as the account stands then
            (`standing`); ``None``: all of it.
    """

    question: Question
    selection: Selection
    drop: bool = False
    cover: tuple[str, ...] = ()
    fresh: bool = False
    allotment: str = ""
    tick: str = ""
    window: Callable[[Views], Int64] | None = None


def ask(desk: Desk, wish: Wish) -> Answer:
    """The private answer of a question.

    Raises:
        SessionRefusedError: points lack budget; its ``decision`` says which, and is public.
        DpstreamError: the question has no meaning, there is no key or table, or the ledger is not
            this table's.
    """
    check(desk, wish)
    paid = pay(desk, wish)
    committed = desk.register.finish(paid.run_id, lambda run_id: drawn(desk, wish, paid))
    return decoded(committed._replace(charged=paid.charged), desk.insecure)


def check(desk: Desk, wish: Wish) -> None:
    """Refuse what could not be answered, so that nobody pays for it; looks at no record."""
    wish.question.check(desk.space)
    check_header(_header(desk, wish, ""))
    if desk.runner is not None:
        from dpstream.pipelines.session.batch import check as usable

        usable(desk.runner)
    if not (desk.config.folder / "manifest.json").exists():
        raise RunError("table.folder", "holds no table", "make it with `dpstream session init`")
    if not desk.ring:
        raise InvariantError("desk.ring")


def request_of(desk: Desk, wish: Wish) -> str:
    """Keyed fingerprint of a question: of what is asked and of nothing in the records."""
    nothing = np.zeros((0, len(desk.space.dimensions), 2), np.int64)
    parts = [
        b"session", desk.table.digest.encode(), canonical(wish.question, nothing),
        wish.selection.identity, b"drop" if wish.drop else b"", wish.allotment.encode(),
        wish.tick.encode(),
    ]  # fmt: skip
    return desk.ring.source_fingerprint(parts)


def allotment_request(desk: Desk, name: str, order: Order, selection: Selection) -> str:
    """Keyed fingerprint of an allotment that has a name: of all that it is, and of no record."""
    parts = [
        b"allotment", desk.table.digest.encode(), name.encode(), desk.analyst.encode(),
        f"{order.kind} {order.amount}".encode(), selection.identity,
        "\0".join(order.cover).encode(),
    ]  # fmt: skip
    return desk.ring.source_fingerprint(parts)


def pay(desk: Desk, wish: Wish) -> Paid:
    """Decide and charge, or find what was charged before."""
    request = request_of(desk, wish)
    question = wish.question
    if wish.allotment:
        return desk.account.draw(
            request, wish.allotment, question.kind, question.amount, desk.analyst,
            within_of(desk, wish), wish.fresh,
        )  # fmt: skip
    order = order_of(desk, wish)
    return desk.account.pay(request, order, wish.fresh)


def within_of(desk: Desk, wish: Wish) -> Callable[[Views, Int64], Int64]:
    """What a draw reads of the boxes that its allotment may read."""

    def within(views: Views, allotted: Int64) -> Int64:
        return _resolved(desk, wish, common(wish.selection.boxes(views), allotted))

    return within


def order_of(desk: Desk, wish: Wish) -> Order:
    """What the account is asked."""

    def resolve(views: Views) -> Int64:
        chosen = wish.window or wish.selection.boxes
        return _resolved(desk, wish, chosen(views))

    question = wish.question
    return Order(question.kind, question.amount, desk.analyst, resolve, wish.drop, wish.cover)


def _resolved(desk: Desk, wish: Wish, boxes: Int64) -> Int64:
    """The parts in a cell, if their noise can be drawn."""
    asked = wish.question.cells.inside(desk.space, boxes)
    if len(asked):
        calibrated(desk.space, wish.question, asked)
    return asked


def drawn(desk: Desk, wish: Wish, paid: Paid) -> bytes:
    """Read and draw under a run id that is charged: the receipt."""
    table = _read_and_drawn(desk, wish, paid)
    return encoded(_header(desk, wish, paid.run_id), table)


def _header(desk: Desk, wish: Wish, run_id: str) -> Header:
    return Header(
        run_id=run_id,
        table=desk.table.digest,
        answered=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        where=wish.selection.text,
        question=wish.question,
        drop=wish.drop,
        allotment=wish.allotment,
    )


def _read_and_drawn(desk: Desk, wish: Wish, paid: Paid) -> "pa.Table":
    """In this process, or by the workers of a runner: the same bytes."""
    from dpstream.dp_transforms.session import answered  # loads the noise, which no plan needs

    question, read = wish.question, paid.region.read
    if desk.runner is None:
        totals = desk.scan().totals(read, question.cells, question.needs(desk.space, read))
        return answered(desk.space, question, read, totals, desk.ring, paid.run_id)
    from dpstream.pipelines.session.batch import spread

    config = desk.config
    keys = config.key_source().of_run(paid.run_id, desk.ring.fingerprint)
    return spread(
        desk.runner, config.base, config.folder, desk.table, question, read, keys, paid.run_id
    )


def nonce() -> str:
    """Tells a request from all others."""
    return secrets.token_hex(16)
