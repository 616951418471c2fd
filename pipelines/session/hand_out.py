"""Hand out a question's ticket, to be worked off where the ledger is not (Dataflow).

Pay as for any question, then write the ticket as a draft, commit its name as the receipt, and only
then give it the name that was asked for: see `ticket`.  A question has an answer or a ticket, never
both: whoever comes second is told so, and the draft goes.  So no file of a ticket is to be had
whose name does not stand in the ledger: worked off beside an answer of other records it would be
the same noise on other sums.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from dpstream.accounting.errors import PolicyError
from dpstream.pipelines.session.ask import Wish, check, pay
from dpstream.pipelines.session.desk import Desk
from dpstream.pipelines.session.parts import read_manifest
from dpstream.pipelines.session.receipt import ticket_name, ticket_receipt
from dpstream.pipelines.session.ticket import Ticket, opened, ticket_of
from dpstream.state.disk_errors import file_error
from dpstream.state.durable import PRIVATE, put_once
from dpstream.state.ledger.orders import Paid


def hand_out(desk: Desk, wish: Wish, out: Path) -> Paid:
    """Write the ticket of a question to a new file, private; charged as the question.

    Raises:
        PolicyError: it was answered, or its ticket is another file; the file is another's.
        DpstreamError: see `ask.ask`.
    """
    check(desk, wish)
    if out.exists() and _read(desk, out) is None:
        raise PolicyError("--ticket", "is a file of something else", "choose another name")
    paid = pay(desk, wish)
    draft = out.with_name(f"{out.name}.{paid.run_id}.draft")
    if desk.register.read(paid.run_id) is None:
        parts = tuple(read_manifest(desk.config.folder, desk.table).usable())
        ticket = ticket_of(
            desk.table, parts, wish.question, paid.region.read, paid.run_id, desk.ring
        )
        with _written():
            put_once(draft, ticket.data, PRIVATE)
        written = _read(desk, draft)  # that of somebody who was cut off here is as good
        if written is not None and written[0].run_id == paid.run_id:
            desk.register.commit(paid.run_id, ticket_receipt(written[1]))
    standing = desk.register.read(paid.run_id)
    name = None if standing is None else ticket_name(standing.receipt)
    with _written():
        _settled(desk, draft, out, name)
    there = _read(desk, out)
    if name is None or there is None or there[1] != name:
        raise PolicyError(
            "--ticket", "is not the one that this question has: it was answered, or handed out",
            "ask it here, bring that file, or ask anew with --fresh",
        )  # fmt: skip
    return paid


def _settled(desk: Desk, draft: Path, out: Path, name: str | None) -> None:
    """The draft gets its file's name if it is the ticket that stands, else it goes."""
    found = _read(desk, draft)
    if found is not None and found[1] == name:
        put_once(out, draft.read_bytes(), PRIVATE)
    draft.unlink(missing_ok=True)


@contextlib.contextmanager
def _written() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise file_error("--ticket", "cannot be written", error) from None


def _read(desk: Desk, out: Path) -> tuple[Ticket, str] | None:
    """A ticket's file and its name, ``None`` if it is none of this key, or not there."""
    try:
        return opened(out.read_bytes(), desk.ring)
    except (FileNotFoundError, PolicyError):
        return None
    except OSError as error:
        raise file_error("--ticket", "cannot be read", error) from None
