"""The answer of a session's question: header and table of a receipt.

The account's entry of the same run id lists what was charged and read.  An allotment has an empty
receipt; a question whose ticket was handed out has one with the ticket's name and no table.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.figures import decimal_text
from dpstream.accounting.regions.amounts import MICRO
from dpstream.accounting.sessions.aggregates import PARTS, Question
from dpstream.pipelines.formats import receipt
from dpstream.state.ledger.contract import Answer as Committed

if TYPE_CHECKING:
    import pyarrow as pa


class Header(receipt.Header, frozen=True, kw_only=True):
    """The description of an answer.

    Attributes:
        table: digest of the table's model.
        where: the predicate of the points; empty for all points.
        question: figures, cells and amount.
        drop: whether points with too little budget were left out.
        allotment: run id of the allotment that paid; empty if the points paid.
        ticket: the name of the ticket that was handed out instead of an answer; empty if none.
    """

    table: str
    where: str
    question: Question
    drop: bool = False
    allotment: str = ""
    ticket: str = ""


class Answer(NamedTuple):
    """A committed answer.

    Attributes:
        header: the question, and when it was first answered.
        table: a row for each cell: its range along each axis, and of each figure its value, the sd
            of its noise and both ends of its 95% interval.
        receipt: the committed bytes.
        digest: binds the receipt to the charge.
        charged: whether this very call was charged.
        insecure: whether a fixed test secret was used: whoever knows it can subtract the noise.
    """

    header: Header
    table: "pa.Table"
    receipt: bytes
    digest: str
    charged: bool
    insecure: bool

    def __repr__(self) -> str:
        """Return the rows as a table, and what was paid."""
        question = self.header.question
        paid = f"{question.kind} {decimal_text(question.amount / MICRO)} to every point asked"
        return f"{answer_text(self)}{paid}; run {self.header.run_id}"

    @property
    def value(self) -> float | None:
        """The figure of an answer with one cell and one figure; ``None``: too few records.

        Raises:
            UsageError: the answer has several figures or cells.
        """
        return self._figure("")

    @property
    def sd(self) -> float | None:
        """The standard deviation of the noise of the one figure; raises as ``value`` does."""
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


def check(part: Header | Question) -> None:
    """Refuse a part of a receipt that could not be written and read again, before it is charged.

    Raises:
        UsageError: a part has another type than declared, or is not valid text.
    """
    try:
        kind = type(part)
        msgspec.json.decode(msgspec.json.encode(part), type=kind)
    except (TypeError, ValueError, NotImplementedError, msgspec.MsgspecError):
        raise UsageError(
            "question",
            "has a part of another type, or a text that is none",
            "use plain texts, numbers and True or False",
        ) from None


def header_of(committed: bytes) -> Header:
    """Return the header of an answer's bytes.

    Raises:
        PolicyError: the bytes have another form.
    """
    return receipt.header_of(committed, Header)


def ticket_name(committed: bytes) -> str | None:
    """Return the name of the ticket that was handed out; ``None`` for an answer or an allotment."""
    return header_of(committed).ticket or None if committed else None


def is_answer(committed: bytes) -> bool:
    """Return whether committed bytes are an answer, not a ticket's name or an empty receipt."""
    return bool(committed) and ticket_name(committed) is None


def decoded(committed: Committed, insecure: bool) -> Answer:
    """Return the answer of committed bytes.

    Raises:
        PolicyError: the bytes have another form, or are a ticket's name.
    """
    header = header_of(committed.receipt)
    if header.ticket:
        raise PolicyError(
            "question",
            "was handed out as a ticket: its answer is where that is worked off",
            "read it there, or ask again at a new charge with --fresh",
        )
    table = receipt.table_of(committed.receipt)
    return Answer(header, table, committed.receipt, committed.digest, committed.charged, insecure)


def answer_text(answer: Answer) -> str:
    """Return the rows as an aligned table; beside a value the half width of its 95% interval."""
    from dpstream.pipelines.render.answer import rows_text  # which no plan needs

    return rows_text(*_parted(answer))


def answer_rows(answer: Answer) -> list[dict[str, Any]]:
    """Return the rows for JSON, in the form of the rows of SQL."""
    from dpstream.pipelines.render.answer import json_rows  # which no plan needs

    return json_rows(*_parted(answer))


def _parted(answer: Answer) -> tuple["pa.Table", dict[str, "pa.Table"]]:
    """Return cells and figures, and by figure its sd and the ends of its interval."""
    table, names = answer.table, [part.removeprefix("_") for part in PARTS]
    parts = {
        figure: table.select([figure + part for part in PARTS]).rename_columns(names)
        for aggregate in answer.header.question.aggregates
        for figure in aggregate.outputs
    }
    extra = [figure + part for figure in parts for part in PARTS]
    return table.drop_columns(extra), parts
