"""A ticket: a charged batch of questions, written to a file for workers without access to the
account.

A service (Dataflow) computes later, on machines that cannot reach the account.  So the batch is
charged first, where the account is, and the ticket is handed over: run id, question, boxes of the
charge, and the table's parts by their digests.  The ticket and the secret fix the answer: every
computation from it, however often, gives the same bytes.  That is why its name is committed as the
request's receipt BEFORE it is handed over (``state.ledger.answers``): to commit what fixes the
answer is to commit the answer.  A second ticket of one run id, of other records, would be the same
noise on other sums; only the ticket whose name is committed first is valid.

The name is a MAC of the ticket under the secret.  So nobody without the secret can write a valid
ticket that was not charged; and the name reveals nothing about records: no two run ids have the
same name.

PRIVATE: digests and sizes of parts are functions of the records, without noise.  Store a ticket
where the table is stored; the account and the output have only its name.
"""

import hmac
from typing import NamedTuple

import msgspec

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import DpstreamError, PolicyError
from dpstream.accounting.sessions.aggregates import Question
from dpstream.accounting.sessions.table import SessionTable
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.pipelines.session.records.manifest import Part
from dpstream.state.ledger.events import packed, unpacked


class Ticket(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What fixes the bytes of an answer, together with the secret.

    Attributes:
        table: its model.
        parts: the files of the records, by digest.
        question: the question that was charged.
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


class Sealed(NamedTuple):
    """A private ticket as it is stored, and its public name: the receipt of its charge."""

    data: bytes
    name: str


def ticket_of(
    table: SessionTable,
    parts: tuple[Part, ...],
    question: Question,
    read: Int64,
    run_id: str,
    keys: KeyRing,
) -> Sealed:
    """Return the ticket of a charge; commit its name as the receipt before handing it over.

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
        key=keys.fingerprint,
    )
    text = msgspec.json.encode(ticket)
    name = _mac(text, keys)
    return Sealed(text + b"\n" + name.encode() + b"\n", name)


def opened(data: bytes, keys: KeyRing) -> tuple[Ticket, str]:
    """Return a ticket and its name from its bytes.

    Raises:
        PolicyError: it was not written with this secret, or was changed since.
    """
    text, _, mac = data.removesuffix(b"\n").rpartition(b"\n")
    if hmac.compare_digest(mac, _mac(text, keys).encode()):
        try:
            return msgspec.json.decode(text, type=Ticket), mac.decode()
        except (msgspec.MsgspecError, UnicodeError, DpstreamError):
            pass
    raise PolicyError(
        "ticket", "was not written with this secret", "use the ticket and the secret of one table"
    )


def _mac(text: bytes, keys: KeyRing) -> str:
    return keys.source_fingerprint([b"session ticket", text])
