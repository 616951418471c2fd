"""The committed bytes of an answer: a small public header (JSON), then its table as Arrow IPC.

What was charged and read stands in the ledger's entry of the same run id.
"""

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.sessions.aggregates import PARTS, Question
from dpstream.state.ledger.answers import Answer as Committed

if TYPE_CHECKING:
    import pyarrow as pa

#: Of an answer, and of the name of a ticket that was handed out instead.
_MAGIC, _TICKET = b"dpses\x01", b"dptic\x01"


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an answer says of itself.

    Attributes:
        run_id: of its charge; table: digest of the table's model.
        answered: when it was drawn (UTC, to the second).
        where: the predicate that was asked; empty for everything.
        question: what was asked of which cells, and the amount.
        drop: points with too little budget were left out.
        allotment: run id of the allotment that paid, empty if the points did.
    """

    run_id: str
    table: str
    answered: str
    where: str
    question: Question
    drop: bool = False
    allotment: str = ""


class Answer(NamedTuple):
    """An answer, as it was committed.

    Attributes:
        header: what was asked, and when it was first answered.
        table: a row for each cell: its range along each axis, and of each figure its value, the sd
            of its noise and both ends of its 95% interval.
        receipt: the committed bytes; digest: binds them to the charge.
        charged: this very call was charged for it.
        insecure: a fixed test key was used: its noise can be subtracted by whoever knows it.
    """

    header: Header
    table: "pa.Table"
    receipt: bytes
    digest: str
    charged: bool
    insecure: bool

    @property
    def value(self) -> float | None:
        """The figure of an answer of one cell and one figure; ``None``: too few records.

        Raises:
            UsageError: it has several.
        """
        return self._figure("")

    @property
    def sd(self) -> float | None:
        """Of the noise of the one figure; raises as ``value`` does."""
        return self._figure(PARTS[0])

    @property
    def interval(self) -> tuple[float | None, float | None]:
        """The 95% interval of the one figure; raises as ``value`` does."""
        return self._figure(PARTS[1]), self._figure(PARTS[2])

    def _figure(self, part: str) -> float | None:
        names = [name for a in self.header.question.aggregates for name in a.outputs]
        if len(names) != 1 or self.table.num_rows != 1:
            raise UsageError("answer", "has several figures", "read its table")
        value = self.table[names[0] + part][0].as_py()
        return None if value is None else float(value)


def check(header: Header) -> None:
    """Refuse what could not be written down and read again, so that nobody pays for it.

    Raises:
        UsageError: a part is of another type than it says, or no text.
    """
    try:
        msgspec.json.decode(msgspec.json.encode(header), type=Header)
    except (TypeError, ValueError, NotImplementedError, msgspec.MsgspecError):
        found = UsageError(
            "question",
            "has a part of another type, or a text that is none",
            "use plain texts, numbers and True or False",
        )
    else:
        return
    raise found from None


def encoded(header: Header, rows: "pa.Table") -> bytes:
    """The bytes of an answer."""
    from dpstream.dp_transforms.session import encoded as table_bytes  # loads the noise

    head = msgspec.json.encode(header, order="sorted")
    return _MAGIC + len(head).to_bytes(4, "little") + head + table_bytes(rows)


def ticket_receipt(name: str) -> bytes:
    """What is committed of a question whose ticket is handed out."""
    return _TICKET + name.encode()


def ticket_name(receipt: bytes) -> str | None:
    """The name of the ticket that was handed out; ``None``: it is an answer."""
    return receipt[len(_TICKET) :].decode() if receipt.startswith(_TICKET) else None


def is_answer(receipt: bytes) -> bool:
    """Whether committed bytes are an answer: neither a ticket's name nor those of an allotment,
    which are empty."""
    return bool(receipt) and ticket_name(receipt) is None


def header_of(receipt: bytes) -> Header:
    """The header of an answer's bytes.

    Raises:
        PolicyError: they are of another form.
    """
    return _split(receipt)[0]


def decoded(committed: Committed, insecure: bool) -> Answer:
    """The answer of committed bytes.

    Raises:
        PolicyError: they are of another form, or a ticket's name.
    """
    if ticket_name(committed.receipt) is not None:
        raise PolicyError(
            "question",
            "was handed out as a ticket: its answer is where that is worked off",
            "read it there, or ask anew with --fresh",
        )
    import pyarrow as pa

    header, body = _split(committed.receipt)
    try:
        rows = pa.ipc.open_stream(pa.py_buffer(body)).read_all()
    except (OSError, pa.ArrowException):
        raise _foreign() from None
    return Answer(header, rows, committed.receipt, committed.digest, committed.charged, insecure)


def _split(receipt: bytes) -> tuple[Header, bytes]:
    size = len(_MAGIC)
    end = size + 4 + int.from_bytes(receipt[size : size + 4], "little")
    try:
        if receipt[:size] != _MAGIC:
            raise ValueError
        return msgspec.json.decode(receipt[size + 4 : end], type=Header), receipt[end:]
    except (ValueError, msgspec.MsgspecError):
        raise _foreign() from None


def _foreign() -> PolicyError:
    return PolicyError(
        "ledger.path", "holds an answer of another form", "use the program that wrote it"
    )
