"""A ledger's tables in Spanner: made once, and every damage to a row of them is refused."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.cloud import spanner

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.state.ledger.lineage import promise
from dpstream.state.ledger.open import create_account, ledger_exists, open_path, read_ledger
from dpstream.state.ledger.tables import COLUMNS_OF, DDL, answers_of, pieces_of
from dpstream.state.spanner.client import connect
from dpstream.state.spanner.schema import create_tables
from tests import accounts, emulator
from tests.state.ledger.conformance import Asker, charge


def test_the_schema_file_is_the_schema() -> None:
    text = (Path(__file__).parents[3] / "deploy" / "spanner" / "ledger.sql").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("--")]
    assert "\n".join(lines).strip() == DDL.strip()


def test_a_ledger_is_made_once_and_alone(running: None) -> None:
    made = emulator.fresh_url()
    assert not ledger_exists(made)
    with pytest.raises(UsageError, match=r"account\.path: no such .*dpstream account create"):
        open_path(made)
    accounts.create(made, "flights")
    assert ledger_exists(made) and len(read_ledger(made)) == 1
    open_path(made).charge(charge(1))
    with pytest.raises(UsageError, match="is there already"):
        create_account(made, "flights", "user", "string", accounts.LIMIT)
    assert accounts.charges(made) == [charge(1)]
    with pytest.raises(PolicyError, match="give the store a database of its own"):
        create_tables(connect(made))
    emulator.drop(made)
    create_tables(connect(made))
    with pytest.raises(PolicyError, match=r"account\.path.*give the account a database of its own"):
        create_account(made, "flights", "user", "string", accounts.LIMIT)
    with pytest.raises(UsageError, match="no such"):
        open_path(made)
    emulator.drop(made)


# --- damage --------------------------------------------------------------------------------------


def filled(url: str) -> None:
    with contextlib.closing(open_path(url)) as ledger:
        for run in range(3):
            ledger.charge(charge(run, 0.1))
        promise(ledger, charge(7, 0.1))
        register = Asker(ledger, "sql")
        register.answered(charge(8, 0.1), "asked", lambda _: b"rows")
        register.charged(charge(9, 0.1), "cut off")
        with ledger.transaction():
            ledger.put_view(charge(8).run_id, b"view", "of the view")


DAMAGE = {
    "an edited entry": "UPDATE LedgerEntries SET Entry = REPLACE(Entry, '0.1', '0.0') "
    "WHERE Seq = 2",
    "another name": "UPDATE LedgerEntries SET Name = 'x' WHERE Seq = 2",
    "no name": "UPDATE LedgerEntries SET Name = NULL WHERE Seq = 2",
    "another digest": "UPDATE LedgerEntries SET Digest = 'x' WHERE Seq = 8",
    "a removed entry": "DELETE FROM LedgerEntries WHERE Seq = 2",
    "a removed last entry": "DELETE FROM LedgerEntries WHERE Seq = 8",
    "a removed commit": "DELETE FROM LedgerCommits WHERE Number = 2",
    "a removed last commit": "DELETE FROM LedgerCommits WHERE Number = 8",
    "no commits": "DELETE FROM LedgerCommits WHERE Number >= 0",
    "an edited commit": "UPDATE LedgerCommits SET Sealed = REPLACE(Sealed, 'digest', 'digits') "
    "WHERE Number = 4",
    "another writer": "UPDATE LedgerCommits SET Writer = 'x' WHERE Number = 4",
    "a removed token": "DELETE FROM LedgerTokens WHERE Token = '0'",
    "an edited token": "UPDATE LedgerTokens SET Previous = 'x' WHERE Token = '0'",
    "a token more": "INSERT INTO LedgerTokens (RunId, Token) VALUES ('x', 'y')",
    "an edited receipt": "UPDATE LedgerBlobs SET Bytes = b'raws' WHERE Kind = 'receipt'",
    "a removed receipt": "DELETE FROM LedgerBlobs WHERE Kind = 'receipt'",
    "an edited grant": "UPDATE LedgerBlobs SET Bytes = b'more' WHERE Kind = 'grant'",
    "a removed grant": "DELETE FROM LedgerBlobs WHERE Kind = 'grant'",
    "an edited view": "UPDATE LedgerBlobs SET Bytes = b'news' WHERE Kind = 'view'",
    "a removed view": "DELETE FROM LedgerBlobs WHERE Kind = 'view'",
    "a receipt of nobody": "INSERT INTO LedgerBlobs (RunId, Kind, Piece, Bytes) "
    "VALUES ('x', 'receipt', 0, b'rows')",
    "another question": "UPDATE LedgerRequests SET Request = 'x' WHERE Digest IS NULL",
    "a removed question": "DELETE FROM LedgerRequests WHERE Digest IS NULL",
}


def edit(url: str, statement: str) -> None:
    connect(url).run_in_transaction(lambda change: change.execute_update(statement))


def test_damage_is_refused(url: str) -> None:
    """Each by whoever opens the ledger next; put back, it is as it was."""
    filled(url)
    good = contents(url)
    for name, statement in DAMAGE.items():
        edit(url, statement)
        assert contents(url) != good, name
        for attempt in (lambda: open_path(url), lambda: read_ledger(url)):
            with pytest.raises(PolicyError) as caught:
                attempt()
            assert caught.value.field == "account.path", name
            assert caught.value.rule in ("is damaged", "its hash chain is broken"), name
        restore(url, good)
    assert len(read_ledger(url)) == 8


Contents = dict[str, tuple[list[str], list[Any]]]


def contents(url: str) -> Contents:
    table_rows: Contents = {}
    for table in COLUMNS_OF:
        with connect(url).snapshot() as look:
            answer = look.execute_sql(f"SELECT * FROM {table}")
            rows = sorted(list(answer), key=repr)
            table_rows[table] = [field.name for field in answer.fields], rows
    return table_rows


def restore(url: str, good: Contents) -> None:
    with connect(url).batch() as batch:
        for table, (columns, rows) in good.items():
            batch.delete(table, spanner.KeySet(all_=True))
            if rows:
                batch.insert(table, columns, rows)


def test_damage_below_an_open_ledger(url: str) -> None:
    """It decides by what it has checked; what it reads anew is checked."""
    filled(url)
    ledger = open_path(url)
    edit(url, DAMAGE["an edited receipt"])
    with pytest.raises(PolicyError, match="is damaged"):
        Asker(ledger, "sql").read(charge(8).run_id)
    edit(url, DAMAGE["a removed last commit"])
    with pytest.raises(PolicyError, match="is damaged"):
        ledger.charge(charge(20, 0.1))


def test_a_ledger_of_a_newer_program_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpstream.state.ledger.tables.SCHEMA_VERSION", 2)
    with pytest.raises(PolicyError, match="version is not 1"):
        open_path(url)


def test_an_older_copy_is_noticed_by_who_saw_the_end(url: str) -> None:
    ledger = open_path(url)
    ledger.charge(charge(1))
    before = contents(url)
    ledger.charge(charge(2))
    seen = ledger.head()
    restore(url, before)
    older = open_path(url)
    assert len(older.entries()) == 1
    with pytest.raises(PolicyError, match="older or replaced account"):
        older.refuse_older(seen)
    with pytest.raises(PolicyError, match="is damaged"):
        ledger.entries()  # it remembers the end itself


WITHOUT: dict[str, tuple[str, Callable[..., Any]]] = {
    "sums": ("dpstream.state.ledger.tables.Commit.seals", lambda *_: None),
    "chain": (
        "dpstream.state.ledger.replica.chained",
        lambda previous, text: Anything(),
    ),
}


class Anything(str):
    """Equals whatever it is held against."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


def test_without_the_checks_nobody_notices(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotaged: an edited entry spends what it says now."""
    filled(url)
    edit(url, DAMAGE["an edited entry"])
    for place, instead in WITHOUT.values():
        monkeypatch.setattr(place, instead)
    assert open_path(url).entries()[0].epsilon == 0.0


def test_pieces_of_a_receipt(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, whole, and at least one: no receipt is not an empty one."""
    monkeypatch.setattr("dpstream.state.ledger.tables.CELL_BYTES", 3)
    assert pieces_of("r", "view", b"") == [("r", "view", 0, "")]
    assert [row[2] for row in pieces_of("r", "view", b"12345678")] == [0, 1, 2]
    ledger = open_path(url)
    Asker(ledger, "sql").answered(charge(1, 0.1), "asked", lambda _: b"12345678")
    [row] = answers_of(connect(url), None)
    assert row.receipt == b"12345678"
    edit(url, "DELETE FROM LedgerBlobs WHERE Piece = 1")
    with pytest.raises(PolicyError, match="is damaged"):
        list(answers_of(connect(url), [row.run_id]))
