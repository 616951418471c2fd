"""The account in Spanner: who is first, pieces, how it is made, lost answers, many processes.

What holds for every storage is in test_log.py.
"""

import contextlib
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dpstream.accounting.errors import RunError
from dpstream.state.ledger import contract
from dpstream.state.ledger.lineage import enter
from dpstream.state.ledger.log import LedgerMovedError
from dpstream.state.ledger.open import ledger_exists, open_path, read_ledger
from dpstream.state.ledger.spanner import DDL
from dpstream.state.spanner import client
from dpstream.state.spanner.client import commit, connect
from dpstream.state.spanner.schema import create_tables, make_tables
from dpstream.state.sqlite.file import create_store
from dpstream.state.sqlite.store import SqliteStore
from tests import accounts, emulator
from tests.accounts import within
from tests.faults.unsure import Network
from tests.golden.refusals import Refused
from tests.lanes import few_first
from tests.state.conformance import IDENTITY, KEY_SCHEMA, STREAMS
from tests.state.ledger.conformance import Asker, Open, charge
from tests.state.ledger.starters import CHARGE
from tests.state.ledger.test_sqlite import DELTA, EPSILON, most
from tests.state.ledger.test_sqlite import charge as gaussian


@pytest.fixture
def again(url: str) -> Open:
    return lambda: open_path(url)


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


def test_without_the_fence_they_overspend(
    again: Open, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sabotaged: whoever is told that another was first goes on with a number of its own."""
    one, two = again(), again()
    real, numbers = commit, iter(range(100, 200))

    class Unfenced:
        def __init__(self, batch: Any) -> None:
            self._batch = batch

        def insert(self, table: str, columns: Any, row_values: Any) -> None:
            rows = [(next(numbers), *row[1:]) for row in row_values]
            self._batch.insert(table, columns, rows)

        def insert_or_update(self, *rows: Any) -> None:
            self._batch.insert_or_update(*rows)

    monkeypatch.setattr(
        "dpstream.state.ledger.spanner.commit",
        lambda database, fill: real(database, lambda batch: fill(Unfenced(batch))),
    )
    with one.transaction():
        assert one.charge_within(charge(1, 3.5))
        assert two.charge(charge(2, 3.5))
    with connect(url).snapshot() as look:
        [[written]] = look.execute_sql("SELECT COUNT(*) FROM LedgerLog WHERE Number >= 100")
    assert written == 2 and not within([charge(1, 3.5), charge(2, 3.5)], *accounts.LIMIT)


def test_one_that_is_always_overtaken_says_so(
    again: Open, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    monkeypatch.setattr(contract, "BUSY_SECONDS", 0.0)
    one, two = again(), again()

    def overtaken() -> None:
        two.charge(charge(1 + len(two.entries()), 0.01))

    refused(lambda: one.transact(overtaken))


def test_what_a_cell_does_not_take_lies_in_pieces(
    again: Open, url: str, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    """Rows and blobs: in order, and all of them."""
    monkeypatch.setattr("dpstream.state.ledger.spanner.CELL_BYTES", 1_000)
    draw = random.Random(0)
    with contextlib.closing(again()) as one, contextlib.closing(again()) as two:
        for run, receipt in ((1, draw.randbytes(2_500)), (2, b"")):
            Asker(one, "sql").answered(charge(run), str(run), lambda _, r=receipt: r)  # type: ignore[misc]
            done = two.request_of(charge(run).run_id)
            assert done is not None and done.receipt == receipt
        with one.transaction():
            for _ in range(80):
                one.append(charge(draw.getrandbits(128), 1e-6))
        assert two.entries() == one.entries()
    with connect(url).snapshot(multi_use=True) as look:
        [[blobs]] = look.execute_sql("SELECT COUNT(*) FROM LedgerBlobs")
        [[pieces]] = look.execute_sql("SELECT MAX(Piece) FROM LedgerLog")
    assert blobs == 3 + 1 and pieces > 0  # an empty receipt is the blob of every request
    for table in ("LedgerBlobs", "LedgerLog"):
        change = f"DELETE FROM {table} WHERE Piece = 1"
        connect(url).run_in_transaction(lambda work, change=change: work.execute_update(change))
        refused(open_path, url)


def test_the_schema_file_is_the_schema() -> None:
    text = (Path(__file__).parents[3] / "deploy" / "spanner" / "ledger.sql").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("--")]
    assert "\n".join(lines).strip() == DDL.strip()


def test_a_ledger_is_made_once_and_alone(running: None, refused: Refused) -> None:
    made = emulator.fresh_url()
    assert not ledger_exists(made)
    refused(lambda: open_path(made))
    make_tables(connect(made), DDL.split(";")[0], "it")  # where a creation was stopped
    assert not ledger_exists(made)
    refused(lambda: open_path(made))
    created = accounts.created(made)
    assert ledger_exists(made) and accounts.created(made) == created
    open_path(made).charge(charge(1))
    refused(lambda: accounts.created(made))
    assert accounts.undated(accounts.charges(made)) == [charge(1)]
    refused(lambda: create_tables(connect(made)))
    emulator.drop(made)
    create_tables(connect(made))
    refused(lambda: accounts.created(made))
    refused(lambda: open_path(made))
    emulator.drop(made)


def test_an_account_of_an_older_program_is_refused(running: None, refused: Refused) -> None:
    """Also by whoever would make another one in its place."""
    url = emulator.fresh_url()
    make_tables(connect(url), "CREATE TABLE LedgerCommits (N INT64) PRIMARY KEY (N)", "it")
    for attempt in (open_path, read_ledger, lambda url: accounts.create(url, "flights")):
        refused(attempt, url)
    emulator.drop(url)


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
    again: Open,
    url: str,
    seed: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refused: Refused,
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
        refused(lambda: enter(again(), copy, CHARGE))
        copy.close()
    assert paid == [True, False, False, False] and accounts.undated(again().entries()) == [CHARGE]
    assert network.faults["answer lost"] and network.faults["delayed"]


def test_an_attempt_that_lands_when_nobody_waits(
    again: Open, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    """The caller saw an error; the charge stands, is found by its name, and is not made twice."""
    one, real = again(), commit

    def lost(database: Any, fill: Any) -> None:
        real(database, fill)
        raise RunError("store", "the database does not answer", "run again")

    with monkeypatch.context() as patch:
        patch.setattr("dpstream.state.ledger.spanner.commit", lost)
        refused(lambda: one.charge(charge(1)))
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
