"""A ticket: a batch that was paid, written down for workers that reach neither ledger nor analyst.

A service (Dataflow) works while nobody waits, and no ledger is on its machines.  So the batch is
charged first, where the ledger is, and what is handed over is the ticket: run id, question, boxes
of the charge, and the table's parts by their digests.  All that the answer depends on is in it,
but the secret: whoever works it off, and however often, gets the same bytes.  That is why its
name is committed as the request's receipt BEFORE it is handed over (``state.ledger.answers``): to
commit what fixes the answer is to commit the answer.  A second ticket of one run id, of other
records, would be the same noise on other sums; the name that stands first is the only one.

The name is a MAC of the ticket under the secret.  Nobody else can write one, so that none is
worked off that was not paid; and it says nothing of records: no two run ids have one name.

PRIVATE: digests and sizes of parts are functions of the records, without noise.  A ticket lies
where the table lies; the ledger and the output have its name alone.
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
from dpstream.state.ledger.region_charge import packed, unpacked


class Ticket(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What fixes the bytes of an answer, with the secret.

    Attributes:
        table: its model; parts: the records, by digest.
        question: that was paid; read: the boxes of its charge, packed.
        run_id: of the charge; key: fingerprint of the secret.
        form: of this file.
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
        """(m, d, 2) that are read."""
        return unpacked(self.read)


class Sealed(NamedTuple):
    """A ticket as it is kept, private, and its name, public: the receipt of its charge."""

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
    """The ticket of a charge; its name is to be committed as the receipt before it is handed over.

    Args:
        parts: usable ones of the table's manifest; read: (m, d, 2) boxes of the charge.
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
    """A ticket of its bytes, and its name.

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
