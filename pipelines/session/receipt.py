"""The answer of a session's question: header and table of a receipt.

What was charged and read stands in the ledger's entry of the same run id.  An allotment has an
empty receipt, and a question whose ticket was handed out one with the ticket's name and no table.
"""

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.sessions.aggregates import PARTS, Question
from dpstream.pipelines.formats import receipt
from dpstream.state.ledger.answers import Answer as Committed

if TYPE_CHECKING:
    import pyarrow as pa


class Header(receipt.Header, frozen=True, kw_only=True):
    """What an answer says of itself.

    Attributes:
        table: digest of the table's model.
        where: the predicate that was asked; empty for everything.
        question: what was asked of which cells, and the amount.
        drop: points with too little budget were left out.
        allotment: run id of the allotment that paid, empty if the points did.
        ticket: the name of the ticket that was handed out instead of an answer; empty: none was.
    """

    table: str
    where: str
    question: Question
    drop: bool = False
    allotment: str = ""
    ticket: str = ""


class Answer(NamedTuple):
    """An answer, as it was committed.

    Attributes:
        header: what was asked, and when it was first answered.
        table: a row for each cell: its range along each axis, and of each figure its value, the sd
            of its noise and both ends of its 95% interval.
        receipt: the committed bytes; digest: binds them to the charge.
        charged: this very call was charged for it.
        insecure: a fixed test secret was used: its noise can be subtracted by whoever knows it.
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
        failure = UsageError(
            "question",
            "has a part of another type, or a text that is none",
            "use plain texts, numbers and True or False",
        )
    else:
        return
    raise failure from None


def header_of(committed: bytes) -> Header:
    """The header of an answer's bytes.

    Raises:
        PolicyError: they are of another form.
    """
    return receipt.header_of(committed, Header)


def ticket_name(committed: bytes) -> str | None:
    """The name of the ticket that was handed out; ``None``: it is an answer, or an allotment."""
    return header_of(committed).ticket or None if committed else None


def is_answer(committed: bytes) -> bool:
    """Whether committed bytes are an answer: neither a ticket's name nor those of an allotment,
    which are empty."""
    return bool(committed) and ticket_name(committed) is None


def decoded(committed: Committed, insecure: bool) -> Answer:
    """The answer of committed bytes.

    Raises:
        PolicyError: they are of another form, or a ticket's name.
    """
    header = header_of(committed.receipt)
    if header.ticket:
        raise PolicyError(
            "question",
            "was handed out as a ticket: its answer is where that is worked off",
            "read it there, or ask anew with --fresh",
        )
    table = receipt.table_of(committed.receipt)
    return Answer(header, table, committed.receipt, committed.digest, committed.charged, insecure)
