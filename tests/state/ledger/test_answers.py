"""The register of answers: charged, drawn, committed, seen, in this order and once."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.state.ledger.answers import Answer, AnswerLog, Begun, Decision
from dpstream.state.ledger.contract import Ledger
from dpstream.state.ledger.events import Charge
from dpstream.state.ledger.history import History
from tests import accounts
from tests.state.ledger.conformance import (
    Asker,
    Draw,
    Open,
    asked_again,
    charge,
    in_a_fork,
    killed,
    two_at_once,
)


@pytest.fixture
def again(tmp_path: Path) -> Open:
    accounts.create(tmp_path / "ledger.db", "flights")
    return lambda: accounts.opened(tmp_path / "ledger.db")


@pytest.fixture
def ledger(again: Open) -> Iterator[Ledger]:
    with contextlib.closing(again()) as made:
        yield made


def test_a_process_that_is_gone_at_any_point(again: Open) -> None:
    killed(again, Asker, in_a_fork)


class ReadsFirst(Asker):
    """Charges when the answer is known."""

    def answered(self, charge: Charge, request: str, draw: Draw, fresh: bool = False) -> Answer:
        receipt = draw(charge.run_id)
        return super().answered(charge, request, lambda _: receipt)


class ShowsFirst(Asker):
    """Shows what it has drawn, and commits it then."""

    def finish(self, run_id: str, draw: Draw) -> Answer:
        answer = self.read(run_id)
        if answer is not None:
            return answer
        receipt = draw(run_id)
        with contextlib.suppress(BaseException):
            self.commit(run_id, receipt)
        return Answer(run_id, receipt, "", False)


class ShowsItsOwn(Asker):
    """Commits first, and shows what it has drawn rather than what stands."""

    def finish(self, run_id: str, draw: Draw) -> Answer:
        drawn = list[bytes]()

        def draw_once(run_id: str) -> bytes:
            drawn.append(draw(run_id))
            return drawn[-1]

        answer = super().finish(run_id, draw_once)
        return answer._replace(receipt=drawn[0]) if drawn else answer


class ChargesAgain(Asker):
    """Does not look for an answer that was paid for."""

    def find(self, request: str) -> str | None:
        return None


class ForgetsTheKilled(Asker):
    """Looks for answers, not for requests that have none yet."""

    def find(self, request: str) -> str | None:
        run_id = super().find(request)
        return run_id if run_id is not None and self.read(run_id) is not None else None


class TwoTransactions(Asker):
    """Charges and keeps the request one after the other."""

    def begin(
        self,
        request: str,
        decide: Callable[[str, History], Decision],
        fresh: bool = False,
    ) -> Begun:
        if self.find(request) is not None:
            return super().begin(request, decide, fresh)
        charge = decide("", History()).charge
        self._ledger.charge(charge)
        with self._ledger.transaction():
            self._ledger.add_request(charge.run_id, request)
        return Begun(charge.run_id, charge, True, None)


class DrawsAgain(Asker):
    """Commits over what stands."""

    def finish(self, run_id: str, draw: Draw) -> Answer:
        receipt = draw(run_id)
        return super().finish(run_id, draw)._replace(receipt=receipt)


@pytest.mark.parametrize(
    ("sabotaged", "scenario"),
    [
        (ReadsFirst, asked_again),
        (ShowsFirst, killed),
        (ShowsItsOwn, two_at_once),
        (ChargesAgain, asked_again),
        (ForgetsTheKilled, killed),
        (TwoTransactions, killed),
        (DrawsAgain, asked_again),
    ],
)
def test_a_sabotaged_register_is_caught(
    again: Open, sabotaged: type[Asker], scenario: Callable[[Open, type[Asker]], None]
) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        scenario(again, sabotaged)


def test_kinds_are_apart(ledger: Ledger) -> None:
    sql, table = Asker(ledger, "sql"), Asker(ledger, "table")
    first = sql.answered(charge(1), "asked", lambda _: b"rows")
    assert table.find("asked") is None and table.read(first.run_id) is None
    second = table.answered(charge(2, kind="table"), "asked", lambda _: b"cells")
    assert (second.charged, second.receipt) == (True, b"cells")
    assert sql.find("asked") == first.run_id and table.find("asked") == second.run_id
    with pytest.raises(AssertionError, match="question's kind"):
        sql.begin("other", lambda _, __: Decision(charge(3, kind="table")))


def test_the_first_receipt_stays(ledger: Ledger) -> None:
    register = AnswerLog(ledger, "sql")
    begun = register.begin("asked", lambda _, __: Decision(charge(1)))
    assert begun.charged and register.read(begun.run_id) is None
    register.commit(begun.run_id, b"8")
    register.commit(begun.run_id, b"9")
    answer = register.read(begun.run_id)
    assert answer is not None and answer.receipt == b"8"
    again = register.begin("asked", lambda _, __: Decision(charge(2)))
    assert again == begun._replace(charged=False, receipt=b"8")
    with pytest.raises(PolicyError, match="without a charge"):
        register.commit(charge(7).run_id, b"8")
    assert [c.run_id for c in ledger.entries()] == [begun.run_id]


def test_a_receipt_without_a_draw_is_committed_with_its_charge(ledger: Ledger) -> None:
    register = AnswerLog(ledger, "sql")
    begun = register.begin("asked", lambda _, __: Decision(charge(1), b""))
    assert begun.receipt == b"" and register.read(begun.run_id) is not None
    assert register.begin("asked", lambda _, __: Decision(charge(2), b""), True).charged


def test_a_receipt_of_another_charge_is_noticed(again: Open) -> None:
    """By the digest that binds it to its charge, whatever the log holds."""
    with contextlib.closing(again()) as ledger:
        register = Asker(ledger, "sql")
        first = register.answered(charge(1), "asked", lambda _: b"C = 8")
        register.charged(charge(2), "other")
        with ledger.transaction():
            ledger.add_receipt(charge(2).run_id, first.receipt, first.digest)
    with contextlib.closing(again()) as ledger:
        assert Asker(ledger, "sql").read(charge(1).run_id) is not None
        with pytest.raises(PolicyError, match="damaged receipt"):
            Asker(ledger, "sql").read(charge(2).run_id)


def test_only_bytes_that_stand_in_the_ledger_are_large(ledger: Ledger) -> None:
    """A megabyte of rows is an answer like any other, byte for byte."""
    rows = bytes(range(256)) * 4096
    register = Asker(ledger, "sql")
    assert register.answered(charge(1), "asked", lambda _: rows).receipt == rows
    assert register.answered(charge(2), "asked", lambda _: b"").receipt == rows
