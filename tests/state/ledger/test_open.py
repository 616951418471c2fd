"""A job's ledger is opened, or made where none is."""

from pathlib import Path

import pytest

from dpstream.accounting.errors import UsageError
from dpstream.state.ledger.contract import Ledger
from dpstream.state.ledger.open import (
    create_ledger,
    file_of,
    ledger_exists,
    open_ledger,
    place_below,
    read_ledger,
)
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


def test_files_and_urls(tmp_path: Path) -> None:
    assert file_of("ledger.db") == Path("ledger.db") and file_of(tmp_path) == tmp_path
    assert place_below(tmp_path, "data/l.db") == str(tmp_path / "data" / "l.db")
    for url in ("spanner://p/i/d", "spanner:p", "mysql://h/d"):
        assert file_of(url) is None
    assert place_below(tmp_path, "spanner://p/i/d") == "spanner://p/i/d"
    for url, words in (("spanner:p", "PROJECT/INSTANCE"), ("mysql://h/d", "known kind")):
        with pytest.raises(UsageError, match=words) as caught:
            place_below(tmp_path, url)
        assert caught.value.field == "ledger.path" and url not in str(caught.value)


def test_a_file_is_made_once(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    assert not ledger_exists(path)
    assert create_ledger(path) and not create_ledger(path)
    assert ledger_exists(path) and read_ledger(path) == []
