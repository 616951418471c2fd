"""The transcript of a table: what was asked and paid, in order, from the account; all public."""

from typing import Any, NamedTuple

from dpstream.accounting.regions.amounts import MICRO
from dpstream.accounting.regions.space import Space
from dpstream.pipelines.session import sentences
from dpstream.pipelines.session.open_table import OpenTable
from dpstream.pipelines.session.receipt import header_of, is_answer
from dpstream.state.ledger.events import RegionCharge

#: What an entry is.
QUESTION, PENDING, ALLOTTED, DRAWN, CLOSED = "question", "cut off", "allotment", "draw", "closed"
HANDED = "ticket"


class Line(NamedTuple):
    """An entry of the transcript.

    Attributes:
        at: when it was charged (UTC).
        run_id: the entry's run id.
        analyst: who asked.
        what: one of the words above; a question that was charged and not answered was
            interrupted, or is being answered now; for one that was handed out the account has the
            ticket's name.
        question: the question as text.
        kind, amount: what was paid, or used of an allotment.
        allotment: run id of the allotment that it uses; empty for none.
        where: the boxes that paid, as predicates; for a use of an allotment, those that it read.
        answered: when the answer was drawn; empty without one.
    """

    at: str
    run_id: str
    analyst: str
    what: str
    question: str
    kind: str
    amount: int
    allotment: str
    where: list[str]
    answered: str

    def as_dict(self) -> dict[str, Any]:
        """Return the entry as values for JSON; the amount as a number."""
        return self._asdict() | {"amount": self.amount / MICRO}


def transcript(open_table: OpenTable) -> list[Line]:
    """Return all entries of the table."""
    return [_line(open_table, run_id, charge) for run_id, charge in open_table.account.history()]


def _line(open_table: OpenTable, run_id: str, charge: RegionCharge) -> Line:
    committed = open_table.answers.read(run_id)
    answer = None if committed is None or not is_answer(committed.receipt) else committed.receipt
    header = None if answer is None else header_of(answer)
    if charge.budget == "closed":
        what = CLOSED
    elif charge.allots:
        what = ALLOTTED
    elif header is None:
        what = PENDING if committed is None else HANDED
    else:
        what = DRAWN if charge.draws_on else QUESTION
    return Line(
        at=sentences.instant(charge.at - charge.at % MICRO),
        run_id=run_id,
        analyst=charge.analyst,
        what=what,
        question="" if header is None else sentences.question(header.question),
        kind="" if charge.budget == "closed" else charge.budget,
        amount=charge.amount,
        allotment=charge.draws_on,
        where=_where(open_table.space, charge),
        answered="" if header is None else header.answered,
    )


def _where(space: Space, charge: RegionCharge) -> list[str]:
    return sentences.boxes(space, charge.read if charge.draws_on else charge.boxes, 3)
