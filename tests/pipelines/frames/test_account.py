"""Where a question is charged: an account with a key, or nowhere."""

from pathlib import Path
from typing import Any

import pytest

import dpstream
from dpstream.accounting.errors import UsageError
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.pipelines.ask.question import ONCE, Asking
from dpstream.pipelines.frames.account import account_of
from tests import accounts
from tests.pipelines.frames.visits import KEY


def ledger_account(folder: Path) -> dpstream.LedgerAccount:
    return dpstream.LedgerAccount(folder / "ledger.db", "visits", id=accounts.ID)


def test_an_account_needs_a_key_and_makes_no_file(tmp_path: Path) -> None:
    account = account_of(ledger_account(tmp_path), "file:noise.secret", ONCE)
    assert account is not None and account.ledger.data_set == "visits"
    assert account.secret.reference == "file:noise.secret"
    source = SecretSource(None, KEY)
    given = account_of(ledger_account(tmp_path), source, ONCE)
    assert given is not None and given.secret is source
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key", [None, b"7"])
def test_a_key_that_is_none_is_refused(key: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        account_of(ledger_account(tmp_path), key, ONCE)
    assert error.value.field == "secret"


@pytest.mark.parametrize(
    ("account", "key", "how", "field"),
    [
        ("l.db", "file:k", ONCE, "account"), (None, "file:k", ONCE, "secret"),
        (None, None, Asking(fresh=True), "fresh"), (None, None, Asking(as_of="May"), "as_of"),
    ],
)  # fmt: skip
def test_what_means_nothing_without_an_account_is_refused(
    account: Any, key: str | None, how: Asking, field: str
) -> None:
    with pytest.raises(UsageError) as error:
        account_of(account, key, how)
    assert error.value.field == field
    assert account_of(None, None, ONCE) is None
