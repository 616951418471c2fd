"""Choices in the ledger: one transaction, one receipt, bound to the chain."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.accounting.gaussian import mu_of
from dpstream.state.ledger.answers import ChoiceLedger
from dpstream.state.ledger.charges import Charge

LIMIT = (4.0, 1e-6)


def charge(run: int, epsilon: float = 1.0, unit: str = "user over the whole stream") -> Charge:
    return Charge(f"{run:032x}", "question", unit, epsilon, 1e-7, mu_of(epsilon, 1e-7), 0.0)


STREAM = charge(99, 2.0)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[ChoiceLedger]:
    made = ChoiceLedger(tmp_path / "ledger.db", "flights")
    yield made
    made.close()


def test_a_choice_is_charged_once_and_each_new_one_again(ledger: ChoiceLedger) -> None:
    assert ledger.begin(charge(1), STREAM, "asked", LIMIT) == (charge(1).run_id, False)
    # Nothing was released yet: whoever asks the same goes on, at no charge.
    assert ledger.begin(charge(2), STREAM, "asked", LIMIT) == (charge(1).run_id, True)
    assert ledger.begin(charge(3), STREAM, "other", LIMIT) == (charge(3).run_id, False)
    assert ledger.commit(charge(1).run_id, "C = 8") == "C = 8"
    assert ledger.commit(charge(1).run_id, "C = 9") == "C = 8"
    assert ledger.begin(charge(4), STREAM, "asked", LIMIT) == (charge(4).run_id, False)
    assert [c.run_id for c in ledger.entries()] == [charge(i).run_id for i in (1, 3, 4)]
    ledger.resume(charge(1).run_id, "asked")
    for run, request in ((1, "other"), (5, "asked")):
        with pytest.raises(PolicyError, match="--resume"):
            ledger.resume(charge(run).run_id, request)


def test_choice_and_stream_must_fit_together(ledger: ChoiceLedger) -> None:
    with pytest.raises(PolicyError, match="choice and the stream") as caught:
        ledger.begin(charge(1, 3.9), charge(2, 3.9), "asked", LIMIT)
    assert caught.value.field == "ledger.limit"
    assert ledger.entries() == []
    with pytest.raises(PolicyError, match="another privacy unit"):
        ledger.charge(charge(1), *LIMIT)
        ledger.begin(charge(2, unit="other"), STREAM, "asked", LIMIT)
    # A refused charge leaves no row: the next begin is a fresh one.
    assert ledger.begin(charge(3), STREAM, "asked", LIMIT) == (charge(3).run_id, False)


@pytest.mark.parametrize(
    "edit",
    [
        "UPDATE choices SET receipt = 'C = 80'",
        "UPDATE choices SET digest = 'x'",
        "DELETE FROM entries",
        "UPDATE entries SET digest = 'x'",
    ],
)
def test_an_edited_receipt_is_noticed(ledger: ChoiceLedger, tmp_path: Path, edit: str) -> None:
    ledger.begin(charge(1), STREAM, "asked", LIMIT)
    ledger.commit(charge(1).run_id, "C = 8")
    found = ledger.receipt(charge(1).run_id)
    assert found is not None and found[0] == "C = 8"
    with sqlite3.connect(tmp_path / "ledger.db") as other:
        other.execute(edit)
    with pytest.raises(PolicyError):
        ledger.receipt(charge(1).run_id)


def test_unknown_runs_have_no_receipt(ledger: ChoiceLedger, tmp_path: Path) -> None:
    assert ledger.receipt("ff" * 16) is None
    ledger.begin(charge(1), STREAM, "asked", LIMIT)
    assert ledger.receipt(charge(1).run_id) is None
    other = ChoiceLedger(tmp_path / "ledger.db", "weather")
    assert other.receipt(charge(1).run_id) is None
    other.close()


def test_a_file_that_is_no_ledger(tmp_path: Path) -> None:
    (tmp_path / "x.db").write_text("not a database, for sure" * 100)
    with pytest.raises(PolicyError, match="no ledger"):
        ChoiceLedger(tmp_path / "x.db", "flights")
