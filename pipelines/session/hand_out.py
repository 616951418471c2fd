"""Hand out a question's ticket, from which a service without the account answers it (Dataflow).

The question follows the common sequence (`pipelines.ask.sequence`): the ticket is drawn and written
as a draft, and its name is committed as the receipt.  Only then is the draft renamed to the file
that was asked for: see `ticket`.  A question has an answer or a ticket, never both: a second
request of the other form is refused, and its draft is removed.  So every ticket file has a name in
the account: otherwise a ticket could give a second answer, from other records, for one charge.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dpstream.accounting.errors import PolicyError
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.pipelines.formats.receipt import answered_now, encoded
from dpstream.pipelines.session.ask import SessionQuestion, SessionRequest, committed, header
from dpstream.pipelines.session.open_table import OpenTable
from dpstream.pipelines.session.receipt import ticket_name
from dpstream.pipelines.session.ticket import Ticket, opened, ticket_of
from dpstream.state.disk_errors import file_error, file_errors
from dpstream.state.durable import PRIVATE, put_once
from dpstream.state.ledger.answers import Answer as Committed
from dpstream.state.ledger.answers import Decision
from dpstream.state.ledger.balances import region_of
from dpstream.state.ledger.events import Charge, ChargeKind
from dpstream.state.ledger.history import History


class TicketQuestion(NamedTuple):
    """A question whose ticket is handed out, for `ask.sequence`.

    Attributes:
        question: the question.
        out: the ticket's file.
    """

    question: SessionQuestion
    out: Path

    @property
    def kind(self) -> ChargeKind:
        """The kind of the charge; see `ask.question.Question`."""
        return self.question.kind

    @property
    def identity(self) -> Sequence[bytes]:
        """The canonical parts; with or without a ticket it is the same question."""
        return self.question.identity

    def check(self, keys: KeyRing) -> None:
        """Refuse a question that cannot be answered; see `ask.question.Question`."""
        self.question.check(keys)

    def decide(self, run_id: str, account: History) -> Decision:
        """Return the charge of the question; see `ask.question.Question`."""
        return self.question.decide(run_id, account)

    def stamp(self) -> object:
        """Return the question's stamp; see `ask.question.Question`."""
        return self.question.stamp()

    def draw(self, charge: Charge, keys: KeyRing) -> bytes:
        """Write the ticket as a draft; return its name, the receipt in place of an answer."""
        open_table, question = self.question.open_table, self.question.request.question
        parts = tuple(open_table.manifest().usable())
        read = region_of(charge, open_table.table).read
        ticket = ticket_of(open_table.table, parts, question, read, charge.run_id, keys)
        draft = _draft(self.out, charge.run_id)
        with file_errors("--ticket", "cannot be written"):
            put_once(draft, ticket.data, PRIVATE)
        written = _read(open_table, draft)  # that of somebody who was cut off here is as good
        if written is None or written[0].run_id != charge.run_id:
            raise PolicyError("--ticket", "has a draft of something else", "remove it")
        named = header(open_table, self.question.request, **answered_now(charge), ticket=written[1])
        return encoded(named)


def hand_out(open_table: OpenTable, request: SessionRequest, out: Path) -> Committed:
    """Write the ticket of a question to a new private file; it is charged as the question.

    Raises:
        PolicyError: the question was answered, its ticket is another file, or the file exists
            and is not this ticket.
        DpstreamError: see `ask.ask`.
    """
    if out.exists() and _read(open_table, out) is None:
        raise PolicyError("--ticket", "is a file of something else", "choose another name")
    answer = committed(
        open_table, TicketQuestion(SessionQuestion(open_table, request), out), request.how
    )
    name = ticket_name(answer.receipt)
    with file_errors("--ticket", "cannot be written"):
        _settled(open_table, _draft(out, answer.run_id), out, name)
    there = _read(open_table, out)
    if name is None or there is None or there[1] != name:
        raise PolicyError(
            "--ticket",
            "is not the one that this question has: it was answered, or handed out",
            "ask it here, bring that file, or ask again at a new charge with --fresh",
        )
    return answer


def _draft(out: Path, run_id: str) -> Path:
    return out.with_name(f"{out.name}.{run_id}.draft")


def _settled(open_table: OpenTable, draft: Path, out: Path, name: str | None) -> None:
    """Rename the draft to its file if it is the committed ticket, else remove it."""
    ticket = _read(open_table, draft)
    if ticket is not None and ticket[1] == name:
        put_once(out, draft.read_bytes(), PRIVATE)
    draft.unlink(missing_ok=True)


def _read(open_table: OpenTable, out: Path) -> tuple[Ticket, str] | None:
    """Return a ticket and its name from a file; ``None`` if there is none of this secret."""
    try:
        return opened(out.read_bytes(), open_table.ring)
    except (FileNotFoundError, PolicyError):
        return None
    except OSError as error:
        raise file_error("--ticket", "cannot be read", error) from None
