"""The ledger in Spanner: what every ledger must pass, lost answers, kills, damage."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from dpstream.accounting.composition import within
from dpstream.accounting.errors import PolicyError, RunError, UsageError
from dpstream.state.ledger import contract
from dpstream.state.ledger.answers import Register
from dpstream.state.ledger.contract import LedgerMovedError
from dpstream.state.ledger.lineage import begun_epoch, promise
from dpstream.state.ledger.open import create_ledger, ledger_exists, open_ledger, read_ledger
from dpstream.state.ledger.spanner import SpannerLedger, commit
from dpstream.state.spanner.client import connect
from tests import emulator
from tests.faults.unsure import Network
from tests.state.ledger.conformance import LIMIT, SCENARIOS, Open, charge, rows
from tests.state.ledger.test_sqlite import DELTA, EPSILON, most
from tests.state.ledger.test_sqlite import charge as gaussian

WIDE = (99.0, 1e-3)


@pytest.fixture(scope="module", autouse=True)
def running() -> Iterator[None]:
    with emulator.running():
        yield


@pytest.fixture
def url() -> Iterator[str]:
    made = emulator.fresh_url()
    create_ledger(made)
    yield made
    emulator.drop(made)


@pytest.fixture
def again(url: str) -> Open:
    return lambda: open_ledger(url, "flights")


@pytest.fixture
def ledger(url: str) -> SpannerLedger:
    return SpannerLedger(url, "flights")


# --- what every ledger must pass -----------------------------------------------------------------


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_register(again: Open, scenario: Callable[[Open, type[Register]], None]) -> None:
    scenario(again, Register)


def test_rows(again: Open) -> None:
    rows(again)


def test_two_that_decide_at_once(again: Open) -> None:
    """The second is told, writes nothing, and decides again on what the first has left."""
    one, two = again(), again()
    with pytest.raises(LedgerMovedError), one.transaction():
        assert one.charge_within(charge(1, 3.5), *LIMIT)
        assert two.charge(charge(2, 3.5), *LIMIT)
    assert one.entries() == two.entries() == [charge(2, 3.5)]
    with pytest.raises(LedgerMovedError), one.transaction():
        one.tokens("run")  # it changes nothing, and was decided on what is no more
        two.charge(charge(3, 0.1), *LIMIT)
    tried = list[int]()

    def overtaken() -> bool:
        tried.append(len(one.book().charges))
        if len(tried) == 1:
            two.charge(charge(4, 0.1), *LIMIT)
        return one.charge_within(charge(4, 0.1), *LIMIT)

    assert one.transact(overtaken) is False and tried == [2, 3]


def test_without_the_fence_they_overspend(again: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotaged: whoever is told that another was first goes on with a number of its own."""
    one, two = again(), again()
    real, numbers = commit, iter(range(100, 200))

    class Unfenced:
        def __init__(self, batch: Any) -> None:
            self._batch = batch

        def insert(self, table: str, columns: Any, some: Any) -> None:
            if table in ("LedgerCommits", "LedgerEntries"):
                some = [(next(numbers), *row[1:]) for row in some]
            self._batch.insert(table, columns, some)

    monkeypatch.setattr(
        "dpstream.state.ledger.spanner.commit",
        lambda database, fill: real(database, lambda batch: fill(Unfenced(batch))),
    )
    with one.transaction():
        assert one.charge_within(charge(1, 3.5), *LIMIT)
        assert two.charge(charge(2, 3.5), *LIMIT)
    with connect(emulator.url(one._db.database_id)).snapshot() as look:  # type: ignore[attr-defined]
        [[charges]] = look.execute_sql("SELECT COUNT(*) FROM LedgerEntries")
    assert charges == 2 and not within([charge(1, 3.5), charge(2, 3.5)], *LIMIT)


def test_one_that_is_always_overtaken_says_so(again: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "BUSY_SECONDS", 0.0)
    one, two = again(), again()

    def overtaken() -> None:
        two.charge(charge(1 + len(two.entries()), 0.01), *WIDE)

    with pytest.raises(RunError, match="others? processes were faster|busy"):
        one.transact(overtaken)


def test_only_what_is_new_is_read(again: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = again(), again()
    for run in range(5):
        one.charge(charge(run, 0.1), *WIDE)
    two.entries()
    seen = list[int]()
    from dpstream.state.ledger.replica import Replica

    real = Replica.add_entry

    def noted(self: Replica, *row: Any) -> Any:
        seen.append(row[0])
        return real(self, *row)

    monkeypatch.setattr(Replica, "add_entry", noted)
    promise(one, charge(7, 0.1), *WIDE)
    Register(one, "sql").answered(charge(8, 0.1), "asked", WIDE, lambda _: b"rows")
    assert seen == [6, 7]
    assert begun_epoch(two, charge(7).run_id) == -1 and seen == [6, 7, 6, 7]
    answer = Register(two, "sql").read(charge(8).run_id)
    assert answer is not None and answer.receipt == b"rows" and len(seen) == 4


def test_data_sets_are_apart(again: Open, url: str) -> None:
    first, other = again(), open_ledger(url, "weather")
    assert first.charge(charge(1, 3.5), *LIMIT) and other.charge(charge(2, 3.5), *LIMIT)
    assert other.charge(charge(1, 0.1), *LIMIT)  # the same run on other data
    Register(first, "sql").answered(charge(4, 0.01), "asked", LIMIT, lambda _: b"1")
    assert Register(other, "sql").find("asked") is None
    assert [entry.data_set for entry in read_ledger(url)] == [
        "flights", "weather", "weather", "flights",
    ]  # fmt: skip
    with pytest.raises(UsageError, match="printable"):
        open_ledger(url, "a\nb")


def test_large_receipts_lie_in_pieces(again: Open, url: str) -> None:
    large = bytes(range(256)) * (9 << 12)  # more than two cells
    for run, receipt in ((1, large), (2, b"")):
        done = Register(again(), "sql").answered(
            charge(run), str(run), WIDE, lambda _, r=receipt: r
        )
        assert done.receipt == receipt
        assert Register(again(), "sql").read(charge(run).run_id) == done._replace(charged=False)
    with connect(url).snapshot() as look:
        [[pieces]] = look.execute_sql("SELECT COUNT(*) FROM LedgerReceipts")
    assert pieces == 3 + 1


# --- made, and refused ---------------------------------------------------------------------------


def test_a_ledger_is_made_once_and_alone() -> None:
    made = emulator.fresh_url()
    assert not ledger_exists(made)
    with pytest.raises(UsageError, match=r"ledger\.path: no such .*dpstream ledger init"):
        open_ledger(made, "flights")
    assert create_ledger(made) and ledger_exists(made) and read_ledger(made) == []
    open_ledger(made, "flights").charge(charge(1), *LIMIT)
    assert not create_ledger(made) and len(read_ledger(made)) == 1
    from dpstream.state.spanner.schema import create_tables

    with pytest.raises(PolicyError, match="give the store a database of its own"):
        create_tables(connect(made))
    emulator.drop(made)
    create_tables(connect(made))
    with pytest.raises(PolicyError, match=r"ledger\.path.*give the ledger a database of its own"):
        create_ledger(made)
    with pytest.raises(UsageError, match="no such"):
        open_ledger(made, "flights")
    emulator.drop(made)


# --- answers that are lost -----------------------------------------------------------------------


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries without their pauses."""
    from dpstream.state.spanner import client

    monkeypatch.setattr(client, "_RETRY", client._RETRY.with_delay(initial=0.001, maximum=0.01))


@pytest.mark.parametrize("seed", range(3))
def test_charges_whose_outcome_is_unknown(
    again: Open, url: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is made once, says so to the one who made it, and late commits change nothing."""
    quick(monkeypatch)
    one, two, network = again(), again(), Network(seed, aborted=0.2, unknown=0.5)
    with network.between(connect(url)):
        told = [book.charge(gaussian(run), EPSILON, 1.0) for run in range(6) for book in (one, two)]
        answers = [
            Register(book, "sql").answered(
                charge(50 + n, 0.1), "asked", (99.0, 1.0), lambda run_id: run_id.encode()
            )
            for n, book in enumerate((one, two))
        ]
    assert told == [True, False] * 6
    assert network.faults["answer lost"] and network.faults["delayed"]
    assert [a.charged for a in answers] == [True, False]
    assert answers[0].receipt == answers[1].receipt
    expected = [*(gaussian(run) for run in range(6)), charge(50, 0.1)]
    assert [e.charge for e in read_ledger(url)] == expected == one.entries()


def test_an_attempt_that_lands_when_nobody_waits(
    again: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller saw an error; the charge stands, is found by its name, and is not made twice."""
    one, real = again(), commit

    def lost(database: Any, fill: Any) -> None:
        real(database, fill)
        raise RunError("state.store", "the database does not answer", "run again")

    monkeypatch.setattr("dpstream.state.ledger.spanner.commit", lost)
    with pytest.raises(RunError, match=r"ledger\.path: the database does not answer"):
        one.charge(charge(1), *LIMIT)
    monkeypatch.undo()
    assert one.charge(charge(1), *LIMIT) is False and again().entries() == [charge(1)]


# --- many processes, and killed ones -------------------------------------------------------------

SCRIPT = """
import sys
from dpstream.accounting.errors import PolicyError
from dpstream.state.ledger.open import open_ledger
from tests.state.ledger.test_sqlite import DELTA, EPSILON, charge

ledger, done, first = open_ledger(sys.argv[1], "flights"), 0, int(sys.argv[2])
for run in range(first, first + 5):
    try:
        done += ledger.charge(charge(run // 2), EPSILON, DELTA)
    except PolicyError:
        pass
print(done)
"""


def started(script: str, *args: object) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": ":".join(p for p in sys.path if p)}
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, args)],
        env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.parametrize("processes", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_processes_never_overspend(url: str, processes: int) -> None:
    """Several at once, each run asked for by two of them."""
    step = 5 if processes == 8 else 4
    running = [started(SCRIPT, url, step * n) for n in range(processes)]
    done = [process.communicate(timeout=300) for process in running]
    assert [process.returncode for process in running] == [0] * processes, done
    entries = [entry.charge for entry in read_ledger(url)]
    assert len(entries) == sum(int(out) for out, _ in done)
    assert len(entries) == min(most(), len({r // 2 for n in range(processes)
                                           for r in range(step * n, step * n + 5)}))  # fmt: skip
    assert within(entries, EPSILON, DELTA)
    assert len({e.run_id for e in entries}) == len(entries)


KILLED = """
import os, signal, sys
from dpstream.state.ledger import spanner
from dpstream.state.ledger.answers import Register
from dpstream.state.ledger.open import open_ledger
from tests.state.ledger.conformance import charge

url, request, run, point = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
name, _, when = point.partition(" ")
commits, real = [], spanner.commit

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def commit(database, fill):
    commits.append(1)
    mine = len(commits) == {"charge": 1, "receipt": 2}.get(name)
    if mine and when == "before":
        die()
    real(database, fill)
    if mine and when == "behind":
        die()

def draw(run_id):
    if name == "draw":
        die()
    return ("first " + run_id).encode()

spanner.commit = commit
ledger = open_ledger(url, "flights")
print(Register(ledger, "sql").answered(charge(run), request, (99.0, 1e-3), draw).receipt)
"""
KILLS = ("charge before", "charge behind", "draw", "receipt before", "receipt behind")


@pytest.mark.parametrize(
    "point",
    [p if p in KILLS[1:4:2] else pytest.param(p, marks=pytest.mark.slow) for p in KILLS],
)
def test_kill_minus_nine(again: Open, url: str, point: str) -> None:
    """What was charged is charged once, and goes on under its run id, with the same noise."""
    process = started(KILLED, url, "asked", 1, point)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL, errors
    paid = [entry.charge for entry in read_ledger(url)]
    assert paid == ([] if point == "charge before" else [charge(1)])
    done = Register(again(), "sql").answered(charge(2), "asked", WIDE, lambda r: b"second")
    assert done.charged is (point == "charge before")
    assert done.run_id == charge(2 if done.charged else 1).run_id
    assert done.receipt == (
        f"first {done.run_id}".encode() if point == "receipt behind" else b"second"
    )
    assert len(read_ledger(url)) == 1


# --- damage --------------------------------------------------------------------------------------


def filled(url: str) -> None:
    with contextlib.closing(open_ledger(url, "flights")) as ledger:
        for run in range(3):
            ledger.charge(charge(run, 0.1), *WIDE)
        promise(ledger, charge(7, 0.1), *WIDE)
        register = Register(ledger, "sql")
        register.answered(charge(8, 0.1), "asked", WIDE, lambda _: b"rows")
        register.begin(charge(9, 0.1), "cut off", WIDE)


DAMAGE = {
    "an edited entry": "UPDATE LedgerEntries SET Entry = REPLACE(Entry, '0.1', '0.0') WHERE Seq = 2",
    "another data set": "UPDATE LedgerEntries SET DataSet = 'weather' WHERE Seq = 2",
    "another name": "UPDATE LedgerEntries SET RunId = 'x' WHERE Seq = 2",
    "another digest": "UPDATE LedgerEntries SET Digest = 'x' WHERE Seq = 6",
    "a removed entry": "DELETE FROM LedgerEntries WHERE Seq = 2",
    "a removed last entry": "DELETE FROM LedgerEntries WHERE Seq = 6",
    "a removed commit": "DELETE FROM LedgerCommits WHERE Number = 2",
    "a removed last commit": "DELETE FROM LedgerCommits WHERE Number = 7",
    "no commits": "DELETE FROM LedgerCommits WHERE Number >= 0",
    "an edited commit": "UPDATE LedgerCommits SET Sealed = REPLACE(Sealed, 'digest', 'digits') "
    "WHERE Number = 4",
    "another writer": "UPDATE LedgerCommits SET Writer = 'x' WHERE Number = 4",
    "a removed token": "DELETE FROM LedgerTokens WHERE Token = '0'",
    "an edited token": "UPDATE LedgerTokens SET Previous = 'x' WHERE Token = '0'",
    "a token more": "INSERT INTO LedgerTokens (RunId, Token) VALUES ('x', 'y')",
    "an edited receipt": "UPDATE LedgerReceipts SET Bytes = b'raws' WHERE Piece = 0",
    "a removed receipt": "DELETE FROM LedgerReceipts WHERE Piece = 0",
    "a receipt of nobody": "INSERT INTO LedgerReceipts (RunId, Piece, Bytes) "
    "VALUES ('x', 0, b'rows')",
    "another question": "UPDATE LedgerAnswers SET Request = 'x' WHERE Digest IS NULL",
    "a removed question": "DELETE FROM LedgerAnswers WHERE Digest IS NULL",
}


def edit(url: str, statement: str) -> None:
    connect(url).run_in_transaction(lambda change: change.execute_update(statement))


def test_damage_is_refused(url: str) -> None:
    """Each by whoever opens the ledger next; put back, it is as it was."""
    filled(url)
    tables = ("LedgerCommits", "LedgerEntries", "LedgerTokens", "LedgerAnswers", "LedgerReceipts")
    good = contents(url, tables)
    for name, statement in DAMAGE.items():
        edit(url, statement)
        assert contents(url, tables) != good, name
        for attempt in (lambda: open_ledger(url, "flights"), lambda: read_ledger(url)):
            with pytest.raises(PolicyError) as caught:
                attempt()
            assert caught.value.field == "ledger.path", name
            assert caught.value.rule in ("is damaged", "its hash chain is broken"), name
        restore(url, good)
    assert len(read_ledger(url)) == 6


Contents = dict[str, tuple[list[str], list[Any]]]


def contents(url: str, tables: tuple[str, ...]) -> Contents:
    found: Contents = {}
    for table in tables:
        with connect(url).snapshot() as look:
            answer = look.execute_sql(f"SELECT * FROM {table}")
            rows = sorted(list(answer), key=repr)
            found[table] = [field.name for field in answer.fields], rows
    return found


def restore(url: str, good: Contents) -> None:
    with connect(url).batch() as batch:
        for table, (columns, some) in good.items():
            from google.cloud import spanner

            batch.delete(table, spanner.KeySet(all_=True))
            batch.insert(table, columns, some)


def test_damage_below_an_open_ledger(url: str) -> None:
    """It decides by what it has checked; what it reads anew is checked."""
    filled(url)
    ledger = open_ledger(url, "flights")
    edit(url, DAMAGE["an edited receipt"])
    with pytest.raises(PolicyError, match="is damaged"):
        Register(ledger, "sql").read(charge(8).run_id)
    edit(url, DAMAGE["a removed last commit"])
    with pytest.raises(PolicyError, match="is damaged"):
        ledger.charge(charge(20, 0.1), *WIDE)


def test_a_ledger_of_a_newer_program_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpstream.state.ledger.tables.SCHEMA_VERSION", 2)
    with pytest.raises(PolicyError, match="schema version is beyond 2"):
        open_ledger(url, "flights")


def test_an_older_copy_is_noticed_by_who_saw_the_end(url: str, again: Open) -> None:
    ledger = again()
    ledger.charge(charge(1), *LIMIT)
    tables = ("LedgerCommits", "LedgerEntries")
    before = contents(url, tables)
    ledger.charge(charge(2), *LIMIT)
    seen = ledger.head()
    restore(url, before)
    older = again()
    assert len(older.entries()) == 1
    with pytest.raises(PolicyError, match="older or replaced ledger"):
        older.refuse_older(seen)
    with pytest.raises(PolicyError, match="is damaged"):
        ledger.entries()  # it remembers the end itself
    assert msgspec.structs.replace(seen, seq=0) != seen
