"""A ticket: a charged batch of questions in a file, for workers that cannot reach the account.

A service (Dataflow) computes later, on machines that cannot reach the account.  So the batch is
charged first, where the account is, and the ticket is handed over: run id, question, boxes of the
charge, and the table's parts by their digests.  The ticket and the secret fix the answer: every
computation from it, however often, gives the same bytes.  That is why its name is committed as the
request's receipt BEFORE it is handed over (``state.ledger.contract``): to commit what fixes the
answer is to commit the answer.  A second ticket of one run id, of other records, would be the same
noise on other sums; only the ticket whose name is committed first is valid.

The name is a MAC of the ticket under the secret.  So nobody without the secret can write a valid
ticket that was not charged; and the name reveals nothing about records: no two run ids have the
same name.

PRIVATE: digests and sizes of parts are functions of the records, without noise.  Store a ticket
where the table is stored; the account and the output have only its name.

**Handing out.**  The question follows the common sequence (`pipelines.ask.sequence`): the ticket is
drawn and written as a draft, and its name is committed as the receipt.  Only then is the draft
renamed to the file that was asked for.  A question has an answer or a ticket, never both: a second
request of the other form is refused, and its draft is removed.  So every ticket file has a name in
the account: otherwise a ticket could give a second answer, from other records, for one charge.
"""

import dataclasses
import hmac
from collections.abc import Callable
from pathlib import Path

import msgspec

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import DpstreamError, PolicyError, UsageError
from dpstream.accounting.sessions.aggregates import Question
from dpstream.accounting.sessions.table import SessionTable
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.pipelines.formats.receipt import answered_now, encoded
from dpstream.pipelines.session.ask import SessionQuestion, SessionRequest, committed, header
from dpstream.pipelines.session.open_table import OpenTable
from dpstream.pipelines.session.receipt import ticket_name
from dpstream.pipelines.session.records.manifest import Part
from dpstream.state.disk_errors import file_error, file_errors
from dpstream.state.durable import PRIVATE, put_once
from dpstream.state.ledger.balances import region_of
from dpstream.state.ledger.contract import Answer as Committed
from dpstream.state.ledger.events import Charge, packed, unpacked


class Ticket(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The parameters that, with the secret, fix the bytes of an answer.

    Attributes:
        table: the table's public model.
        parts: the files of the records, by digest.
        question: the question that was charged, as its answer is to be presented.
        read: the boxes of its charge, packed.
        run_id: the charge's run id.
        key: fingerprint of the secret.
        form: version of this file's format.
    """

    table: SessionTable
    parts: tuple[Part, ...]
    question: Question
    read: str
    run_id: str
    key: str
    form: int = 1

    @property
    def boxes(self) -> Int64:
        """Return (m, d, 2) the boxes that may be read."""
        return unpacked(self.read)


def ticket_of(
    table: SessionTable,
    parts: tuple[Part, ...],
    question: Question,
    read: Int64,
    run_id: str,
    ring: KeyRing,
) -> tuple[bytes, str]:
    """Return a charge's private ticket as it is stored, and its public name.

    Commit the name as the receipt before handing the ticket over.

    Args:
        parts: the usable parts of the table's manifest.
        read: (m, d, 2) boxes of the charge.
    """
    ticket = Ticket(
        table=table,
        parts=parts,
        question=question,
        read=packed(read),
        run_id=run_id,
        key=ring.fingerprint,
    )
    text = msgspec.json.encode(ticket)
    name = _mac(text, ring)
    return text + b"\n" + name.encode() + b"\n", name


def opened(data: bytes, ring: KeyRing) -> tuple[Ticket, str]:
    """Return a ticket and its name from its bytes.

    Raises:
        PolicyError: it was not written with this secret, or was changed since.
    """
    text, _, mac = data.removesuffix(b"\n").rpartition(b"\n")
    if hmac.compare_digest(mac, _mac(text, ring).encode()):
        try:
            return msgspec.json.decode(text, type=Ticket), mac.decode()
        except (msgspec.MsgspecError, UnicodeError, DpstreamError):
            pass
    raise PolicyError(
        "ticket", "was not written with this secret", "use the ticket and the secret of one table"
    )


def _mac(text: bytes, ring: KeyRing) -> str:
    return ring.source_fingerprint([b"session ticket", text])


@dataclasses.dataclass(frozen=True)
class TicketQuestion(SessionQuestion):
    """A question whose ticket is handed out; with or without a ticket it is the same question.

    Attributes:
        out: the ticket's file.
    """

    out: Path

    def draw(self, charge: Charge, ring: KeyRing) -> bytes:
        """Write the ticket as a draft; return its name, the receipt in place of an answer."""
        open_table, question = self.open_table, self.request.question
        parts = tuple(open_table.manifest().usable())
        read = region_of(charge, open_table.table).read
        data, _ = ticket_of(open_table.table, parts, question, read, charge.run_id, ring)
        draft = _draft(self.out, charge.run_id)
        with file_errors("--ticket", "cannot be written"):
            put_once(draft, data, PRIVATE)
        written = _read(open_table, draft)  # that of somebody who was cut off here is as good
        if written is None or written[0].run_id != charge.run_id:
            raise PolicyError("--ticket", "has a draft of something else", "remove it")
        named = header(open_table, self.request, **answered_now(charge), ticket=written[1])
        return encoded(named)


def hand_out(
    open_table: OpenTable,
    request: SessionRequest,
    out: Path,
    show: Callable[[Committed], object] = lambda _: None,
) -> Committed:
    """Write the ticket of a question to a new private file; it is charged as the question.

    Args:
        show: shows what was written; if it fails, asking ``fresh`` again continues this answer.

    Raises:
        PolicyError: the question was answered, or its ticket is another file.
        UsageError: the file exists and is no ticket.
        DpstreamError: see `ask.ask`.
    """
    if out.exists() and _read(open_table, out) is None:
        raise UsageError("--ticket", "is a file of something else", "choose another name")

    def handed_out(answer: Committed) -> bool:
        name, there = ticket_name(answer.receipt), _read(open_table, out)
        return name is not None and there is not None and there[1] == name

    def deliver(answer: Committed) -> None:
        with file_errors("--ticket", "cannot be written"):
            _settled(open_table, _draft(out, answer.run_id), out, ticket_name(answer.receipt))
        if handed_out(answer):
            show(answer)

    question = TicketQuestion(open_table, request, out)
    answer = committed(open_table, question, request.how, deliver)
    if not handed_out(answer):  # it counts as delivered, so that `fresh` is a new charge
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
