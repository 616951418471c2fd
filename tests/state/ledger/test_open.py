"""A job's ledger is opened, or made where none is."""

from pathlib import Path

from dpstream.state.ledger.contract import Ledger
from dpstream.state.ledger.open import open_ledger, read_ledger
from tests.state.ledger.conformance import LIMIT, charge


def test_made_and_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "ledger.db"
    ledger = open_ledger(path, "flights")
    assert isinstance(ledger, Ledger) and ledger.data_set == "flights"
    assert read_ledger(path) == []
    ledger.charge(charge(1), *LIMIT)
    ledger.close()
    again = open_ledger(str(path), "flights")
    assert again.entries() == [charge(1)] == [entry.charge for entry in read_ledger(path)]
    again.close()
