"""Rows in memory: the sums of what is there, whatever came, was kept or taken back."""

import random
from typing import Any

import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.state.ledger.events import Created, Event, chained, name_of, text_of
from dpstream.state.ledger.replica import AnswerRow, Replica
from tests import accounts
from tests.state.ledger.conformance import charge

CREATED = Created(accounts.ID, "flights", "user", "string", (1e9, 0.5))


def row_of(rows: Replica, event: Event) -> tuple[int, str | None, str, str]:
    (number, last), text = rows.end, text_of(event)
    return number + 1, name_of(event), text, chained(last, text)


def created() -> Replica:
    rows = Replica()
    rows.add_entry(*row_of(rows, CREATED))
    rows.keep()
    return rows


def contents(rows: Replica) -> object:
    """All that a replica says."""
    runs = [charge(run).run_id for run in range(40)]
    return (
        dict(rows.sums), rows.end, list(rows.history.charges), rows.requests,
        [rows.history.digest_of(run) for run in runs], [rows.tokens(str(run)) for run in range(5)],
        [rows.has(run) for run in runs], [rows.alike(str(n)) for n in range(3)],
        rows.history.within([]),
    )  # fmt: skip


def step(rows: Replica, answers: dict[str, AnswerRow], draw: random.Random) -> None:
    """One change of any kind."""
    what, number = draw.randrange(4), rows.end[0]
    run = f"{number:032x}"
    if what == 0:
        rows.add_entry(*row_of(rows, charge(number)))
    elif what == 1:
        tokens = {str(draw.randrange(4)): draw.choice([None, "a"]) for _ in range(3)}
        rows.put_tokens(str(draw.randrange(5)), tokens)
    elif not rows.has(run):
        first = AnswerRow(run, str(draw.randrange(3)), b"g", None, None, None, None, rows.requests)
        rows.put_answer(first)
        answers[run] = first
    else:
        row = answers[run]
        if row.receipt is None:
            answers[run] = row._replace(receipt=b"rows", digest="digest")
        elif row.view is None:
            answers[run] = row._replace(view=b"", view_digest="of the view")
        rows.put_answer(answers[run])


@pytest.mark.parametrize("seed", range(4))
def test_what_is_taken_back_was_never_there(seed: int) -> None:
    """Against a replica that has seen only what was kept."""
    draw, rows, marks, answers = random.Random(seed), created(), list[int](), dict[str, Any]()
    for turn in range(40):
        keep, mark = draw.random() < 0.5, draw.randrange(2**32)
        again, before = random.Random(mark), dict(answers)
        for _ in range(again.randrange(1, 6)):
            step(rows, answers, again)
        if keep:
            rows.keep()
            marks.append(mark)
        else:
            rows.take_back()
            answers = before
        if turn % 8 == 7:
            only, its = created(), dict[str, AnswerRow]()
            for each in marks:
                again = random.Random(each)
                for _ in range(again.randrange(1, 6)):
                    step(only, its, again)
            assert contents(only) == contents(rows)
    assert rows.end[0] > 5 and rows.requests > 3 and any(rows.alike(str(n)) for n in range(3))


def test_an_entry_continues_the_chain() -> None:
    rows = created()
    seq, name, text, digest = row_of(rows, charge(1))
    for bad in ((3, name, text, digest), (2, name, text + " ", digest), (2, name, text, "00")):
        with pytest.raises(PolicyError, match="chain is broken"):
            rows.add_entry(*bad)
    with pytest.raises(PolicyError, match="is damaged"):
        rows.add_entry(seq, "other", text, digest)
    rows.add_entry(seq, name, text, digest)
    with pytest.raises(PolicyError, match="chain is broken"):
        rows.add_entry(3, name, text, digest)


def test_a_request_is_answered_once_and_stays_what_it_is() -> None:
    rows = created()
    first = AnswerRow("r", "asked", b"grant", None, None, None, None, 0)
    with pytest.raises(PolicyError, match="is damaged"):
        rows.put_answer(first._replace(number=1))
    rows.put_answer(first)
    done = first._replace(receipt=b"rows", digest="d")
    for bad in ({"request": "other"}, {"number": 1}, {"grant": b"more"}):
        with pytest.raises(PolicyError, match="is damaged"):
            rows.put_answer(done._replace(**bad))  # type: ignore[arg-type]
    rows.put_answer(done)
    rows.put_answer(done)  # as it is read again
    seen = done._replace(view=b"view", view_digest="v")
    for changed in (
        done._replace(receipt=b"raws"), done._replace(digest="e"), first,
        seen._replace(receipt=b"raws"),
    ):  # fmt: skip
        with pytest.raises(PolicyError, match="is damaged"):
            rows.put_answer(changed)
        with pytest.raises(PolicyError, match="is damaged"):
            rows.check_answer(changed)
    assert rows.check_answer(done) == done
    rows.put_answer(seen)
    assert rows.check_answer(seen).stored == seen[:-1]
    with pytest.raises(PolicyError, match="is damaged"):
        rows.put_answer(done)
