"""The ledger in Spanner: what every ledger must pass, lost answers, kills, damage."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpstream.accounting.composition import within
from dpstream.accounting.errors import PolicyError, RunError
from dpstream.state.ledger import contract
from dpstream.state.ledger.contract import LedgerMovedError
from dpstream.state.ledger.lineage import begun_epoch, enter, promise
from dpstream.state.ledger.open import open_path
from dpstream.state.ledger.tables import Replica
from dpstream.state.spanner import client
from dpstream.state.spanner.client import commit, connect
from dpstream.state.sqlite.file import create_store
from dpstream.state.sqlite.store import SqliteStore
from tests import accounts, emulator
from tests.faults.unsure import Network
from tests.lanes import few_first
from tests.state.conformance import IDENTITY, KEY_SCHEMA, STREAMS
from tests.state.ledger.conformance import SCENARIOS, Asker, Open, charge, limits, rows
from tests.state.ledger.starters import CHARGE
from tests.state.ledger.test_sqlite import DELTA, EPSILON, most
from tests.state.ledger.test_sqlite import charge as gaussian


@pytest.fixture
def again(url: str) -> Open:
    return lambda: open_path(url)


# --- what every ledger must pass -----------------------------------------------------------------


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_register(again: Open, scenario: Callable[[Open, type[Asker]], None]) -> None:
    scenario(again, Asker)


def test_rows(again: Open) -> None:
    rows(again)


def test_limits(again: Open) -> None:
    limits(again)


def test_two_that_decide_at_once(again: Open) -> None:
    """The second is told, writes nothing, and decides again on what the first has left."""
    one, two = again(), again()
    with pytest.raises(LedgerMovedError), one.transaction():
        assert one.charge_within(charge(1, 3.5))
        assert two.charge(charge(2, 3.5))
    assert one.entries() == two.entries()
    assert accounts.undated(one.entries()) == [charge(2, 3.5)]
    with pytest.raises(LedgerMovedError), one.transaction():
        one.tokens("run")  # it changes nothing, and was decided on what is no more
        two.charge(charge(3, 0.1))
    tried = list[int]()

    def overtaken() -> bool:
        tried.append(len(one.history().charges))
        if len(tried) == 1:
            two.charge(charge(4, 0.1))
        return one.charge_within(charge(4, 0.1))

    assert one.transact(overtaken) is False and tried == [2, 3]


def test_without_the_fence_they_overspend(again: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotaged: whoever is told that another was first goes on with a number of its own."""
    one, two = again(), again()
    real, numbers = commit, iter(range(100, 200))

    class Unfenced:
        def __init__(self, batch: Any) -> None:
            self._batch = batch

        def insert(self, table: str, columns: Any, row_values: Any) -> None:
            if table in ("LedgerCommits", "LedgerEntries"):
                row_values = [(next(numbers), *row[1:]) for row in row_values]
            self._batch.insert(table, columns, row_values)

    monkeypatch.setattr(
        "dpstream.state.ledger.spanner.commit",
        lambda database, fill: real(database, lambda batch: fill(Unfenced(batch))),
    )
    with one.transaction():
        assert one.charge_within(charge(1, 3.5))
        assert two.charge(charge(2, 3.5))
    with connect(emulator.url(one._db.database_id)).snapshot() as look:  # type: ignore[attr-defined]
        [[charges]] = look.execute_sql("SELECT COUNT(Name) FROM LedgerEntries")
    assert charges == 2 and not within([charge(1, 3.5), charge(2, 3.5)], *accounts.LIMIT)


def test_one_that_is_always_overtaken_says_so(again: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "BUSY_SECONDS", 0.0)
    one, two = again(), again()

    def overtaken() -> None:
        two.charge(charge(1 + len(two.entries()), 0.01))

    with pytest.raises(RunError, match="busy: other processes were faster"):
        one.transact(overtaken)


def test_only_what_is_new_is_read(again: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = again(), again()
    for run in range(5):
        one.charge(charge(run, 0.1))
    two.entries()
    seen = list[int]()
    real = Replica.add_entry

    def noted(self: Replica, *row: Any) -> Any:
        seen.append(row[0])
        return real(self, *row)

    monkeypatch.setattr(Replica, "add_entry", noted)
    promise(one, charge(7, 0.1))
    Asker(one, "sql").answered(charge(8, 0.1), "asked", lambda _: b"rows")
    assert seen == [7, 8, 9]
    assert begun_epoch(two, charge(7).run_id) == -1 and seen == [7, 8, 9, 7, 8, 9]
    answer = Asker(two, "sql").read(charge(8).run_id)
    assert answer is not None and answer.receipt == b"rows" and len(seen) == 6


def test_large_receipts_lie_in_pieces(again: Open, url: str) -> None:
    large = bytes(range(256)) * (9 << 12)  # more than two cells
    for run, receipt in ((1, large), (2, b"")):
        register = Asker(again(), "sql")
        begun = register.charged(charge(run), str(run))
        run_id, charged = begun.run_id, begun.charged
        register.commit(run_id, receipt)
        done = register.read(run_id)
        assert charged and done is not None and done.receipt == receipt
        assert Asker(again(), "sql").read(run_id) == done
    with connect(url).snapshot() as look:
        [[pieces]] = look.execute_sql("SELECT COUNT(*) FROM LedgerBlobs WHERE Kind = 'receipt'")
    assert pieces == 3 + 1


# --- answers that are lost -----------------------------------------------------------------------


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries without their pauses."""
    monkeypatch.setattr(client, "_RETRY", client._RETRY.with_delay(initial=0.001, maximum=0.01))


@pytest.mark.parametrize("seed", few_first(range(3)))
def test_charges_whose_outcome_is_unknown(
    again: Open, url: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is made once, says so to the one who made it, and late commits change nothing."""
    quick(monkeypatch)
    one, two, network = again(), again(), Network(seed, aborted=0.2, unknown=0.5)
    with network.between(connect(url)):
        decisions = [account.charge(gaussian(run)) for run in range(6) for account in (one, two)]
        answers = [
            Asker(account, "sql").answered(
                charge(50 + n, 0.1), "asked", lambda run_id: run_id.encode()
            )
            for n, account in enumerate((one, two))
        ]
    assert decisions == [True, False] * 6
    assert network.faults["answer lost"] and network.faults["delayed"]
    assert [a.charged for a in answers] == [True, False]
    assert answers[0].receipt == answers[1].receipt
    expected = [*(gaussian(run) for run in range(6)), charge(50, 0.1)]
    assert accounts.charges(url) == one.entries()
    assert accounts.undated(one.entries()) == expected


@pytest.mark.parametrize("seed", few_first(range(2)))
def test_lineage_when_answers_are_lost(
    again: Open, url: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The genuine store goes on at every begin, charged once; its copy does not."""
    quick(monkeypatch)
    create_store(tmp_path / "store.db", IDENTITY)
    network, paid = Network(seed, aborted=0.2, unknown=0.4), []
    with network.between(connect(url)):
        for begin in range(4):
            store = SqliteStore(tmp_path / "store.db", KEY_SCHEMA, STREAMS)
            paid.append(enter(again(), store, CHARGE))
            store.close()
            if begin == 1:
                shutil.copyfile(tmp_path / "store.db", tmp_path / "copy.db")
        copy = SqliteStore(tmp_path / "copy.db", KEY_SCHEMA, STREAMS)
        with pytest.raises(PolicyError, match="older or forked"):
            enter(again(), copy, CHARGE)
        copy.close()
    assert paid == [True, False, False, False] and accounts.undated(again().entries()) == [CHARGE]
    assert network.faults["answer lost"] and network.faults["delayed"]


def test_an_attempt_that_lands_when_nobody_waits(
    again: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller saw an error; the charge stands, is found by its name, and is not made twice."""
    one, real = again(), commit

    def lost(database: Any, fill: Any) -> None:
        real(database, fill)
        raise RunError("store", "the database does not answer", "run again")

    with monkeypatch.context() as patch:
        patch.setattr("dpstream.state.ledger.spanner.commit", lost)
        with pytest.raises(RunError, match=r"account\.path: the database does not answer"):
            one.charge(charge(1))
    assert one.charge(charge(1)) is False and accounts.undated(again().entries()) == [charge(1)]


# --- many processes, and killed ones -------------------------------------------------------------

SCRIPT = """
import sys
from dpstream.accounting.errors import PolicyError
from dpstream.state.ledger.open import open_path
from tests.state.ledger.test_sqlite import DELTA, EPSILON, charge

ledger, done, first, many = open_path(sys.argv[1]), 0, *map(int, sys.argv[2:])
for run in range(first, first + many):
    try:
        done += ledger.charge(charge(run // 2))
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


@pytest.mark.parametrize(
    ("processes", "many"), [(3, 8), pytest.param(8, 5, marks=pytest.mark.slow)]
)
def test_processes_never_overspend(url: str, processes: int, many: int) -> None:
    """Several at once want more than there is, some runs asked for by two of them."""
    accounts.set_limit(url, (EPSILON, DELTA))
    step = many - 1
    running = [started(SCRIPT, url, step * n, many) for n in range(processes)]
    done = [process.communicate(timeout=300) for process in running]
    assert [process.returncode for process in running] == [0] * processes, done
    entries = accounts.charges(url)
    assert len(entries) == most() == sum(int(out) for out, _ in done)
    assert step * processes // 2 > most() and within(entries, EPSILON, DELTA)
    assert len({e.run_id for e in entries}) == len(entries)


KILLED = """
import os, signal, sys
from tests.state.ledger.conformance import Asker
from dpstream.state.ledger import spanner
from dpstream.state.ledger.open import open_path
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
ledger = open_path(url)
print(Asker(ledger, "sql").answered(charge(run), request, draw).receipt)
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
    paid = accounts.undated(accounts.charges(url))
    assert paid == ([] if point == "charge before" else [charge(1)])
    done = Asker(again(), "sql").answered(charge(2), "asked", lambda r: b"second")
    assert done.charged is (point == "charge before")
    assert done.run_id == charge(2 if done.charged else 1).run_id
    assert done.receipt == (
        f"first {done.run_id}".encode() if point == "receipt behind" else b"second"
    )
    assert len(accounts.charges(url)) == 1
