"""The account of a session table: made once, and named in the table's file."""

from pathlib import Path

import pytest

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.pipelines.session.account import with_account
from dpstream.pipelines.session.config import load_config
from dpstream.state.ledger.open import read_book
from tests import accounts
from tests.pipelines.session.small import TABLE
from tests.state.ledger.conformance import charge


def table(folder: Path, text: str = TABLE) -> Path:
    path = folder / "small.toml"
    path.write_text(text.format(key="22" * 32, more=""))
    return path


def test_the_id_is_written_into_the_file(tmp_path: Path) -> None:
    path = table(tmp_path)
    before = path.read_text().splitlines()
    with pytest.raises(UsageError, match="session init") as caught:
        load_config(path)
    assert caught.value.field == "ledger.id"
    config, made = with_account(path)
    assert made and read_book(config.account).created.unit == "record"
    new = [line for line in path.read_text().splitlines() if line not in before]
    assert new == [f'id = "{config.account.id}"']
    again, made = with_account(path)
    assert not made and again.account == config.account == load_config(path).account


def test_an_account_without_its_name_is_taken_up(tmp_path: Path) -> None:
    """As a process that was stopped between the two leaves it; a used one is another matter."""
    path = table(tmp_path)
    accounts.of_records(tmp_path / "ledger.db", "small").close()
    config, _ = with_account(path)
    assert config.account.id == accounts.ID
    table(tmp_path)
    ledger = accounts.opened(tmp_path / "ledger.db")
    ledger.charge(charge(1, kind="session"))
    ledger.close()
    with pytest.raises(PolicyError, match=accounts.ID):
        with_account(path)


def test_a_form_that_takes_no_line_says_what_to_add(tmp_path: Path) -> None:
    head, rest = TABLE.split("[privacy]", 1)
    assert head.strip().startswith("[ledger]")
    inline = 'ledger = { path = "ledger.db", data_set = "small" }\n[privacy]' + rest
    path = table(tmp_path, inline.replace("{ path", "{{ path").replace('"small" }', '"small" }}'))
    with pytest.raises(UsageError, match="add id = "):
        with_account(path)
