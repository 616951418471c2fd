"""An account is made by one function, and opened by the name that a file has for it."""

from pathlib import Path

import pytest

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.state.ledger.contract import Ledger
from dpstream.state.ledger.events import Head, is_id
from dpstream.state.ledger.open import (
    AccountPlace,
    check_names,
    file_of,
    ledger_exists,
    limit_of,
    open_ledger,
    place_below,
    read_history,
    read_ledger,
)
from tests import accounts
from tests.state.ledger.conformance import charge


def test_made_and_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "ledger.db"
    assert not ledger_exists(path)
    path.parent.mkdir(mode=0o700, parents=True)
    path.touch()  # as a creation that was cut off leaves it
    assert not ledger_exists(path)
    made = accounts.created(path)
    assert ledger_exists(path) and is_id(made.id)
    place = AccountPlace(str(path), "flights", made.id)
    ledger = open_ledger(place)
    assert isinstance(ledger, Ledger) and (ledger.id, ledger.data_set) == (made.id, "flights")
    ledger.charge(charge(1))
    ledger.close()
    again = open_ledger(place)
    assert again.entries() == accounts.charges(path) == read_history(place).charges
    assert accounts.undated(again.entries()) == [charge(1)]
    again.close()


def test_ids_are_drawn(tmp_path: Path) -> None:
    made = [accounts.created(tmp_path / f"{n}.db") for n in range(3)]
    assert len({each.id for each in made}) == 3


def test_only_the_named_account_is_opened(tmp_path: Path) -> None:
    """Absent, of another id, of another data set: refused by who charges and by who plans."""
    path = str(tmp_path / "ledger.db")
    accounts.create(path, "flights")
    for place, field in (
        (AccountPlace(path, "flights", "f" * 16), "account.id"),
        (AccountPlace(path, "weather", accounts.ID), "data_set"),
        (AccountPlace(str(tmp_path / "none.db"), "flights", accounts.ID), "account.path"),
    ):
        for attempt in (open_ledger, read_history):
            with pytest.raises((PolicyError, UsageError)) as caught:
                attempt(place)
            assert caught.value.field == field
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ledger.db"]
    assert len(read_ledger(path)) == 1


def test_an_account_without_an_entry_that_was_seen_is_refused(tmp_path: Path) -> None:
    place = accounts.create(tmp_path / "ledger.db", "flights")
    with_one = accounts.opened(place.path)
    with_one.charge(charge(1))
    head = with_one.head()
    with_one.close()
    read_history(place, head)
    for seen in (Head(head.id, 3, head.digest), Head(head.id, 1, head.digest)):
        with pytest.raises(PolicyError, match="older or replaced"):
            read_history(place, seen)


def test_files_and_urls(tmp_path: Path) -> None:
    assert file_of("ledger.db") == Path("ledger.db") and file_of(tmp_path) == tmp_path
    assert place_below(tmp_path, "data/l.db") == str(tmp_path / "data" / "l.db")
    for url in ("spanner://p/i/d", "spanner:p", "mysql://h/d"):
        assert file_of(url) is None
    assert place_below(tmp_path, "spanner://p/i/d") == "spanner://p/i/d"
    for url, words in (("spanner:p", "PROJECT/INSTANCE"), ("mysql://h/d", "known kind")):
        with pytest.raises(UsageError, match=words) as caught:
            place_below(tmp_path, url)
        assert caught.value.field == "account.path" and url not in str(caught.value)


def test_names_and_limits() -> None:
    check_names("flights", None)
    for data_set, id_, field in (
        ("", None, "data_set"), ("a\nb", None, "data_set"),
        ("x" * 1001, None, "data_set"), ("flights", "7", "account.id"),
    ):  # fmt: skip
        with pytest.raises(UsageError) as caught:
            check_names(data_set, id_)
        assert caught.value.field == field
    assert limit_of(1, 1e-6) == (1.0, 1e-6)
    for pair in ((0, 1e-6), (-1, 1e-6), (1, 0), (1, 1), (float("inf"), 0.1), (float("nan"), 0.1)):
        with pytest.raises(UsageError) as caught:
            limit_of(*pair)
        assert caught.value.field == ("--delta" if pair[0] == 1 else "--epsilon")
