"""A ledger's tables in Spanner: made once, and every damage to a row of them is refused.

Rows in memory: the sums of what is there, whatever came, was kept or taken back.
"""

import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.cloud import spanner

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.state.ledger.events import Created, Event, chained, name_of, text_of
from dpstream.state.ledger.lineage import promise
from dpstream.state.ledger.open import create_account, ledger_exists, open_path, read_ledger
from dpstream.state.ledger.tables import COLUMNS_OF, DDL, AnswerRow, Replica, answers_of, pieces_of
from dpstream.state.spanner.client import connect
from dpstream.state.spanner.schema import create_tables
from tests import accounts, emulator
from tests.state.ledger.conformance import Asker, charge

CREATED = Created(accounts.ID, "flights", "user", "string", (1e9, 0.5))


def row_of(rows: Replica, event: Event) -> tuple[int, str | None, str, str]:
    (number, last), text = rows.end, text_of(event)
    return number + 1, name_of(event), text, chained(last, text)


def created() -> Replica:
    rows = Replica()
    rows.add_entry(*row_of(rows, CREATED))
    rows.keep()
    return rows


def state_of(rows: Replica) -> object:
    """All that a replica says."""
    runs = [charge(run).run_id for run in range(40)]
    return (
        dict(rows.sums), rows.end, list(rows.history.charges), rows.requests,
        [rows.history.digest_of(run) for run in runs], [rows.tokens(str(run)) for run in range(5)],
        [rows.has(run) for run in runs], [rows.alike(str(n)) for n in range(3)],
        rows.history.within([]),
    )  # fmt: skip


def step(rows: Replica, answers: dict[str, AnswerRow], draw: random.Random) -> None:
    """One change of any kind."""
    what, number = draw.randrange(4), rows.end[0]
    run = f"{number:032x}"
    if what == 0:
        rows.add_entry(*row_of(rows, charge(number)))
    elif what == 1:
        tokens = {str(draw.randrange(4)): draw.choice([None, "a"]) for _ in range(3)}
        rows.put_tokens(str(draw.randrange(5)), tokens)
    elif not rows.has(run):
        first = AnswerRow(run, str(draw.randrange(3)), b"g", None, None, None, None, rows.requests)
        rows.put_answer(first)
        answers[run] = first
    else:
        row = answers[run]
        if row.receipt is None:
            answers[run] = row._replace(receipt=b"rows", digest="digest")
        elif row.view is None:
            answers[run] = row._replace(view=b"", view_digest="of the view")
        rows.put_answer(answers[run])


@pytest.mark.parametrize("seed", range(4))
def test_what_is_taken_back_was_never_there(seed: int) -> None:
    """Against a replica that has seen only what was kept."""
    draw, rows, marks, answers = random.Random(seed), created(), list[int](), dict[str, Any]()
    for turn in range(40):
        keep, mark = draw.random() < 0.5, draw.randrange(2**32)
        again, before = random.Random(mark), dict(answers)
        for _ in range(again.randrange(1, 6)):
            step(rows, answers, again)
        if keep:
            rows.keep()
            marks.append(mark)
        else:
            rows.take_back()
            answers = before
        if turn % 8 == 7:
            only, its = created(), dict[str, AnswerRow]()
            for each in marks:
                again = random.Random(each)
                for _ in range(again.randrange(1, 6)):
                    step(only, its, again)
            assert state_of(only) == state_of(rows)
    assert rows.end[0] > 5 and rows.requests > 3 and any(rows.alike(str(n)) for n in range(3))


def test_an_entry_continues_the_chain() -> None:
    rows = created()
    seq, name, text, digest = row_of(rows, charge(1))
    for bad in ((3, name, text, digest), (2, name, text + " ", digest), (2, name, text, "00")):
        with pytest.raises(PolicyError, match="chain is broken"):
            rows.add_entry(*bad)
    with pytest.raises(PolicyError, match="is damaged"):
        rows.add_entry(seq, "other", text, digest)
    rows.add_entry(seq, name, text, digest)
    with pytest.raises(PolicyError, match="chain is broken"):
        rows.add_entry(3, name, text, digest)


def test_a_request_is_answered_once_and_stays_what_it_is() -> None:
    rows = created()
    first = AnswerRow("r", "asked", b"grant", None, None, None, None, 0)
    with pytest.raises(PolicyError, match="is damaged"):
        rows.put_answer(first._replace(number=1))
    rows.put_answer(first)
    done = first._replace(receipt=b"rows", digest="d")
    for bad in ({"request": "other"}, {"number": 1}, {"grant": b"more"}):
        with pytest.raises(PolicyError, match="is damaged"):
            rows.put_answer(done._replace(**bad))  # type: ignore[arg-type]
    rows.put_answer(done)
    rows.put_answer(done)  # as it is read again
    seen = done._replace(view=b"view", view_digest="v")
    for changed in (
        done._replace(receipt=b"raws"), done._replace(digest="e"), first,
        seen._replace(receipt=b"raws"),
    ):  # fmt: skip
        with pytest.raises(PolicyError, match="is damaged"):
            rows.put_answer(changed)
        with pytest.raises(PolicyError, match="is damaged"):
            rows.check_answer(changed)
    assert rows.check_answer(done) == done
    rows.put_answer(seen)
    assert rows.check_answer(seen).stored == seen[:-1]
    with pytest.raises(PolicyError, match="is damaged"):
        rows.put_answer(done)


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
    assert accounts.undated(accounts.charges(made)) == [charge(1)]
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
        "dpstream.state.ledger.tables.chained",
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
