"""Hand out a question's ticket, to be worked off where the ledger is not (Dataflow).

Pay as for any question, then write the ticket, commit its name as the receipt, and only then let go
of it: see `ticket`.  A question has an answer or a ticket, never both: whoever comes second is
told so.
"""

from pathlib import Path

from dpstream.accounting.errors import PolicyError, RunError
from dpstream.pipelines.session.ask import Wish, check, pay
from dpstream.pipelines.session.desk import Desk
from dpstream.pipelines.session.parts import read_manifest
from dpstream.pipelines.session.receipt import ticket_name, ticket_receipt
from dpstream.pipelines.session.ticket import Ticket, opened, ticket_of
from dpstream.state.durable import put_once
from dpstream.state.ledger.orders import Paid

_MODE = 0o600


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
    standing = desk.register.read(paid.run_id)
    if standing is None:
        parts = tuple(read_manifest(desk.config.folder, desk.table).usable())
        ticket = ticket_of(
            desk.table, parts, wish.question, paid.region.read, paid.run_id, desk.ring
        )
        try:
            put_once(out, ticket.data, _MODE)
        except OSError:
            raise RunError("--ticket", "cannot be written", "check the folder") from None
        written = _read(desk, out)  # that of somebody who was cut off here is as good
        if written is not None and written[0].run_id == paid.run_id:
            desk.register.commit(paid.run_id, ticket_receipt(written[1]))
        standing = desk.register.read(paid.run_id)
    name, there = None if standing is None else ticket_name(standing.receipt), _read(desk, out)
    if name is None or there is None or there[1] != name:
        raise PolicyError(
            "--ticket", "is not the one that this question has: it was answered, or handed out",
            "ask it here, bring that file, or ask anew with --fresh",
        )  # fmt: skip
    return paid


def _read(desk: Desk, out: Path) -> tuple[Ticket, str] | None:
    """A ticket's file and its name, ``None`` if it is none of this key, or not there."""
    try:
        return opened(out.read_bytes(), desk.ring)
    except (FileNotFoundError, PolicyError):
        return None
    except OSError:
        raise RunError("--ticket", "cannot be read", "check the file") from None
