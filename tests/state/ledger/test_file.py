"""An account's file: made once, opened, and refused where it is another program's or older."""

from pathlib import Path

import pytest

from dpstream.accounting.errors import PolicyError, RunError, UsageError
from dpstream.state.ledger.contract import Ledger
from dpstream.state.ledger.events import Created
from dpstream.state.ledger.open import make, open_path, read_ledger
from dpstream.state.sqlite import database
from dpstream.state.sqlite.database import sqlite3
from tests import accounts
from tests.state.ledger.conformance import charge

CREATED = Created(accounts.ID, "flights", "user", "string", accounts.LIMIT)


def test_a_file_is_made_once_for_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "data" / "account.db"
    make(path, CREATED)
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    before = path.read_bytes()
    with pytest.raises(UsageError, match="is there already"):
        make(path, CREATED)
    assert path.read_bytes() == before
    assert [entry.event for entry in read_ledger(path)] == [CREATED]


def test_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ledger.db").write_bytes(b"not a database" * 100)
    with pytest.raises(PolicyError, match="is damaged"):
        open_path(tmp_path / "ledger.db")


#: A ledger as programs wrote it before there were accounts.
OLDER = """
CREATE TABLE entries (
  seq INTEGER PRIMARY KEY, data_set TEXT NOT NULL, run_id TEXT NOT NULL,
  entry TEXT NOT NULL, digest TEXT NOT NULL, UNIQUE (data_set, run_id));
CREATE TABLE ledger_meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
INSERT INTO ledger_meta VALUES('schema_version','4');
"""


def test_older_newer_and_other_files_are_refused_and_stay_as_they_are(tmp_path: Path) -> None:
    cases = {
        "older": (OLDER, "older program"),
        "other": ("CREATE TABLE accounts (x)", "another program"),
    }
    for name, (script, words) in cases.items():
        path = tmp_path / f"{name}.db"
        with sqlite3.connect(path) as db:
            db.executescript(script)
        db.close()
        before = path.read_bytes()
        for attempt in (lambda path=path: open_path(path), lambda path=path: read_ledger(path)):
            with pytest.raises(PolicyError, match=words):
                attempt()
        with pytest.raises(UsageError, match="is there already"):
            make(path, CREATED)
        assert path.read_bytes() == before
    make(tmp_path / "newer.db", CREATED)
    with sqlite3.connect(tmp_path / "newer.db") as db:
        db.execute("UPDATE account_meta SET value = '2' WHERE name = 'version'")
    db.close()
    for reader in (open_path, read_ledger):
        with pytest.raises(PolicyError, match="version is not 1"):
            reader(tmp_path / "newer.db")


def test_an_absent_or_empty_account_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.db").touch()
    for attempt in (open_path, read_ledger):
        with pytest.raises(PolicyError, match="is an empty file"):
            attempt(tmp_path / "empty.db")
        with pytest.raises(UsageError, match="no account is there") as caught:
            attempt(tmp_path / "none.db")
        assert caught.value.field == "account.path"
    assert not (tmp_path / "none.db").exists()
    # A process that was stopped before its first commit leaves an empty file.
    make(tmp_path / "empty.db", CREATED)
    assert accounts.charges(tmp_path / "empty.db") == []


def test_a_busy_account_says_so(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.05)
    other = open_path(tmp_path / "data" / "ledger.db")
    with (
        ledger.transaction(),
        pytest.raises(RunError, match=r"busy: another process has held it for 0\.05 s"),
    ):
        other.charge(charge(1))
    assert other.charge(charge(1)) is True
    other.close()
