"""Rows in memory: the sums of what is there, whatever came, was kept or taken back."""

import random

import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.state.ledger.charges import chained
from dpstream.state.ledger.contract import Asked
from dpstream.state.ledger.replica import AnswerRow, Replica
from tests.state.ledger.conformance import charge


def add(rows: Replica, run: int, data_set: str = "flights") -> None:
    one = charge(run)
    digest = chained(rows.digests[-1] if rows.digests else "", data_set, one.text)
    rows.add_entry(len(rows.digests) + 1, data_set, one.name, one.text, digest)


def told(rows: Replica) -> object:
    """All that a replica says."""
    runs = [charge(run).run_id for run in range(40)]
    return (
        dict(rows.sums), list(rows.digests), list(rows.book.charges), rows.requests,
        [rows.digest_of(run) for run in runs], [rows.tokens(str(run)) for run in range(5)],
        [rows.answer_row(run) for run in runs], [rows.alike(str(n)) for n in range(3)],
        rows.book.account.within([], 1e9, 0.5),
    )  # fmt: skip


def step(rows: Replica, draw: random.Random) -> None:
    """One change of any kind."""
    what, run = draw.randrange(4), f"{len(rows.digests):032x}"
    if what == 0:
        add(rows, len(rows.digests), draw.choice(["flights", "weather"]))
    elif what == 1:
        tokens = {str(draw.randrange(4)): draw.choice([None, "a"]) for _ in range(3)}
        rows.put_tokens(str(draw.randrange(5)), tokens)
    elif rows.answer_row(run) is None and what == 2:
        data_set, request = draw.choice(["flights", "weather"]), str(draw.randrange(3))
        if run not in (known := rows._answers):
            rows.put_answer(AnswerRow(run, data_set, request, None, None, len(known)))
    elif (found := rows.answer_row(run)) is not None and found[1] is None:
        rows.put_answer(AnswerRow(run, "flights", found[0], b"rows", "digest", found[2]))


@pytest.mark.parametrize("seed", range(4))
def test_what_is_taken_back_was_never_there(seed: int) -> None:
    """Against a replica that has seen only what was kept."""
    draw, rows, kept = random.Random(seed), Replica("flights"), list[int]()
    for turn in range(40):
        keep, mark = draw.random() < 0.5, draw.randrange(2**32)
        again = random.Random(mark)
        for _ in range(again.randrange(1, 6)):
            step(rows, again)
        if keep:
            rows.keep()
            kept.append(mark)
        else:
            rows.take_back()
        if turn % 8 == 7:
            only = Replica("flights")
            for each in kept:
                again = random.Random(each)
                for _ in range(again.randrange(1, 6)):
                    step(only, again)
            assert told(only) == told(rows)
    assert len(rows.digests) > 5 and rows.requests > 3 and any(rows.alike(str(n)) for n in range(3))


def test_an_entry_continues_the_chain() -> None:
    rows, one = Replica("flights"), charge(1)
    digest = chained("", "flights", one.text)
    for bad in (
        (2, "flights", one.name, one.text, digest),
        (1, "weather", one.name, one.text, digest),
        (1, "flights", one.name, one.text + " ", digest),
        (1, "flights", one.name, one.text, "00"),
    ):
        with pytest.raises(PolicyError, match="chain is broken"):
            rows.add_entry(*bad)
    rows.add_entry(1, "flights", one.name, one.text, digest)
    with pytest.raises(PolicyError, match="chain is broken"):
        rows.add_entry(2, "flights", one.name, one.text, digest)


def test_a_request_is_answered_once_and_stays_what_it_is() -> None:
    rows = Replica("flights")
    first = AnswerRow("r", "flights", "asked", None, None, 0)
    with pytest.raises(PolicyError, match="is damaged"):
        rows.put_answer(first._replace(number=1))
    rows.put_answer(first)
    done = first._replace(receipt=b"rows", digest="d")
    for bad in ({"request": "other"}, {"data_set": "weather"}, {"number": 1}):
        with pytest.raises(PolicyError, match="is damaged"):
            rows.put_answer(done._replace(**bad))  # type: ignore[arg-type]
    rows.put_answer(done)
    rows.put_answer(done)  # as it is read again
    for changed in (done._replace(receipt=b"raws"), done._replace(digest="e"), first):
        with pytest.raises(PolicyError, match="is damaged"):
            rows.put_answer(changed)
        with pytest.raises(PolicyError, match="is damaged"):
            rows.check_answer(changed)
    assert rows.check_answer(done) == Asked("r", "asked", b"rows", "d")
