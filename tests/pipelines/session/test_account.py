"""The account of a session table: made once, and named in the table's file."""

from pathlib import Path

import pytest

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.drafting.ask import Person
from dpstream.pipelines.session.account import with_account
from dpstream.pipelines.session.config import load_config
from dpstream.state.ledger.open import read_book
from tests import accounts
from tests.pipelines.session.small import TABLE
from tests.state.ledger.conformance import charge

NOBODY = Person(None, lambda _: None)


def table(folder: Path, text: str = TABLE) -> Path:
    path = folder / "small.toml"
    path.write_text(text.format(key="22" * 32, more=""))
    return path


def test_the_id_is_written_into_the_file(tmp_path: Path) -> None:
    path = table(tmp_path)
    before = path.read_text().splitlines()
    with pytest.raises(UsageError, match="session init") as caught:
        load_config(path)
    assert caught.value.field == "account.id"
    config, made = with_account(path, NOBODY, None, False)
    assert made and read_book(config.account).created.unit == "record"
    new = [line for line in path.read_text().splitlines() if line not in before]
    assert new == [f'id = "{config.account.id}"']
    again, made = with_account(path, NOBODY, None, False)
    assert not made and again.account == config.account == load_config(path).account


def test_an_account_without_its_name_is_taken_up(tmp_path: Path) -> None:
    """As a process that was stopped between the two leaves it; of a used one somebody must say
    whether the table is a part of it."""
    path = table(tmp_path)
    accounts.of_records(tmp_path / "ledger.db", "small").close()
    config, _ = with_account(path, NOBODY, None, False)
    assert config.account.id == accounts.ID
    table(tmp_path)
    ledger = accounts.opened(tmp_path / "ledger.db")
    ledger.charge(charge(1, kind="session"))
    ledger.close()
    for new in (False, True):
        with pytest.raises(UsageError):
            with_account(path, NOBODY, None, new)
    config, _ = with_account(path, NOBODY, str(tmp_path / "ledger.db"), False)
    assert config.account.id == accounts.ID


def test_accounts_that_are_there_are_listed(tmp_path: Path) -> None:
    """As `dpstream init` does: in the folder and above, up to the repository's root."""
    (tmp_path / ".git").mkdir()
    (tmp_path / "more").mkdir()
    path = table(tmp_path / "more")
    accounts.create(tmp_path / "shop.db", "shop")
    accounts.of_records(tmp_path / "rides.db", "rides").close()
    with pytest.raises(UsageError) as caught:
        with_account(path, NOBODY, None, False)
    assert caught.value.field == "--account"
    assert "shop.db" in caught.value.rule and "rides.db" in caught.value.rule
    assert not (tmp_path / "more" / "ledger.db").exists()
    # The account of persons is refused, and the one of records is named from the file's folder.
    typed, lines = iter(["2", "1"]), list[str]()
    person = Person(lambda *_: next(typed), lines.append)
    with pytest.raises(UsageError, match="user"):
        with_account(path, person, None, False)
    config, made = with_account(path, person, None, False)
    assert made and "shop.db" in lines[0] and "rides.db" in lines[0]
    assert Path(config.account.path).resolve() == tmp_path / "rides.db"
    assert (config.account.data_set, config.account.id) == ("rides", accounts.ID)
    assert 'path = "../rides.db"' in path.read_text()


def test_a_new_account_beside_others(tmp_path: Path) -> None:
    path = table(tmp_path)
    accounts.create(tmp_path / "shop.db", "shop")
    config, made = with_account(path, NOBODY, None, True)
    assert made and Path(config.account.path) == tmp_path / "ledger.db"
    # The file names one by now: the same flags are as good, until something was charged.
    own = str(tmp_path / "ledger.db")
    assert with_account(path, NOBODY, None, True) == (config, False)
    with pytest.raises(UsageError):
        with_account(path, NOBODY, str(tmp_path / "shop.db"), False)
    ledger = accounts.opened(own)
    ledger.charge(charge(1, kind="session"))
    ledger.close()
    assert with_account(path, NOBODY, own, False) == (config, False)
    with pytest.raises(UsageError):
        with_account(path, NOBODY, None, True)


def test_a_form_that_takes_no_line_says_what_to_add(tmp_path: Path) -> None:
    head, rest = TABLE.split("[privacy]", 1)
    assert head.strip().startswith("[ledger]")
    inline = 'ledger = { path = "ledger.db", data_set = "small" }\n[privacy]' + rest
    path = table(tmp_path, inline.replace("{ path", "{{ path").replace('"small" }', '"small" }}'))
    with pytest.raises(UsageError) as caught:
        with_account(path, NOBODY, None, False)
    assert caught.value.field == "ledger" and accounts.ID not in caught.value.fix
    assert f'id = "{accounts.events(tmp_path / "ledger.db")[0].id}"' in caught.value.fix
