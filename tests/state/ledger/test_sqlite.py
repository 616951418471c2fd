"""The ledger: composition, refusals, one charge per run, and eight processes at once.

An account's file: made once, opened, and refused where it is another program's or older.
"""

import contextlib
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.accounting.gaussian import delta_of, mu_of
from dpstream.accounting.plan.unit import UnitIdentity
from dpstream.state.ledger import sqlite
from dpstream.state.ledger.contract import Ledger
from dpstream.state.ledger.events import Charge, Head
from dpstream.state.ledger.open import ledger_exists, make, open_path, read_ledger
from dpstream.state.sqlite import database
from dpstream.state.sqlite.database import sqlite3
from tests import accounts
from tests.accounts import within
from tests.golden.refusals import Refused
from tests.state.ledger.conformance import charge as sql_charge

CREATED = accounts.CREATED


def test_a_file_is_made_once_for_its_owner(tmp_path: Path, refused: Refused) -> None:
    path = tmp_path / "data" / "account.db"
    make(path, CREATED)
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    before = path.read_bytes()
    refused(lambda: make(path, CREATED))
    assert path.read_bytes() == before
    assert [entry.event for entry in read_ledger(path)] == [CREATED]


def test_no_database_is_refused(tmp_path: Path, refused: Refused) -> None:
    (tmp_path / "ledger.db").write_bytes(b"not a database" * 100)
    refused(lambda: open_path(tmp_path / "ledger.db"))


def test_newer_and_other_files_are_refused_and_stay_as_they_are(
    tmp_path: Path, refused: Refused
) -> None:
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE accounts (x)")
    db.close()
    before = path.read_bytes()
    for attempt in (open_path, read_ledger):
        refused(attempt, path)
    refused(lambda: make(path, CREATED))
    assert path.read_bytes() == before


def test_an_account_of_an_older_program_is_refused(tmp_path: Path, refused: Refused) -> None:
    """Also by whoever would make another one in its place."""
    path = tmp_path / "account.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE entries (seq)")
        db.execute("CREATE TABLE account_meta (name)")
    db.close()
    for attempt in (open_path, read_ledger):
        refused(attempt, path)
    refused(lambda: accounts.created(path))


def test_what_an_interrupted_creation_leaves_is_no_account(
    tmp_path: Path, refused: Refused
) -> None:
    """SQLite makes the file larger before it has written the account, and a journal."""
    path = tmp_path / "account.db"
    pid = os.fork()
    if not pid:
        with mock.patch.object(sqlite, "sync", lambda _: None):
            db = sqlite3.connect(path, isolation_level=None)
            db.execute("PRAGMA cache_size = 1")
            db.execute("BEGIN IMMEDIATE")
            for number in range(40):
                db.execute(f"CREATE TABLE log{number} (number INTEGER PRIMARY KEY)")
        os._exit(9)
    os.waitpid(pid, 0)
    remains = [path.read_bytes(), path.with_name("account.db-journal").read_bytes()]
    assert all(remains)
    make(path, CREATED)
    path.write_bytes(remains[0])
    path.with_name("account.db-journal").write_bytes(remains[1])
    assert not ledger_exists(path)
    created = accounts.created(path)
    assert accounts.created(path) == created  # stopped behind its end
    refused(lambda: accounts.created(path, (5.0, 1e-6)))
    with contextlib.closing(open_path(path)) as ledger:
        ledger.charge(charge(1))
    refused(lambda: accounts.created(path))


def test_an_absent_or_empty_account_is_refused(tmp_path: Path, refused: Refused) -> None:
    (tmp_path / "empty.db").touch()
    for attempt in (open_path, read_ledger):
        emptied = refused(attempt, tmp_path / "empty.db")
        caught = refused(attempt, tmp_path / "none.db")
        assert caught.field == "account.path"
        assert caught.fix == emptied.fix, "an emptied account is a lost one"
    assert not (tmp_path / "none.db").exists()
    # A process that was stopped before its first commit leaves an empty file.
    make(tmp_path / "empty.db", CREATED)
    assert accounts.charges(tmp_path / "empty.db") == []


def test_a_busy_account_says_so(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.05)
    other = open_path(tmp_path / "data" / "ledger.db")
    with ledger.transaction():
        refused(lambda: other.charge(sql_charge(1)))
    assert other.charge(sql_charge(1)) is True
    other.close()


EPSILON, DELTA = 3.0, 1e-6
MU = mu_of(1.0, 0.6e-7)


def charge(run: int, mu: float = MU, threshold: float = 0.4e-7) -> Charge:
    return Charge(f"{run:032x}", "plan", accounts.USER, 1.0, 1e-7, mu, threshold)


def most(limit: tuple[float, float] = (EPSILON, DELTA)) -> int:
    """How many equal runs the limit holds: noise has .3 of its delta, thresholds have .4."""
    epsilon, delta, runs = *limit, 1
    while (
        delta_of(epsilon, MU * math.sqrt(runs + 1)) <= 0.3 * delta
        and (runs + 1) * 0.4e-7 <= 0.4 * delta
    ):
        runs += 1
    return runs


def test_runs_compose_until_the_limit(ledger: Ledger, refused: Refused) -> None:
    allowed = most()
    assert 3 < allowed < 20
    for run in range(allowed):
        assert ledger.charge(charge(run)) is True
    caught = refused(lambda: ledger.charge(charge(99)))
    assert f"{allowed} charges before" in str(caught) and caught.exit_code == 3
    assert [c.run_id for c in ledger.entries()] == [charge(run).run_id for run in range(allowed)]
    # A steward may raise the limit.
    ledger.set_limit((2 * EPSILON, DELTA))
    assert ledger.charge(charge(99)) is True


def test_composition_is_neither_free_nor_linear() -> None:
    runs = most()
    assert within([charge(i) for i in range(runs)], EPSILON, DELTA)
    assert not within([charge(i) for i in range(runs + 1)], EPSILON, DELTA)
    assert not within([charge(i, mu=MU * 1.1) for i in range(runs)], EPSILON, DELTA)
    # Threshold failures add up even where there is no noise at all.
    assert not within([charge(0, 0.0, 0.3e-6), charge(1, 0.0, 0.3e-6)], EPSILON, DELTA)
    assert within([charge(0, 0.0, 0.2e-6), charge(1, 0.0, 0.2e-6)], EPSILON, DELTA)


def test_one_run_spends_its_own_guarantee() -> None:
    assert within([charge(0)], 1.0, 1e-7)
    assert not within([charge(0)], 0.99, 1e-7)
    assert not within([charge(0)], 1.0, 0.99e-7)
    # At another epsilon by its parts.
    assert within([charge(0)], 2.0, 1e-7) and not within([charge(0)], 2.0, 0.9e-7)


def test_a_restart_is_not_charged_again(ledger: Ledger) -> None:
    ledger.set_limit((1.0, 1e-7))
    assert ledger.charge(charge(0)) is True
    assert ledger.charge(charge(0)) is False
    # Nor refused when the limit has become smaller in the meantime.
    ledger.set_limit((0.1, 1e-9))
    assert ledger.charge(charge(0)) is False
    assert len(ledger.entries()) == 1


SCRIPT = """
import multiprocessing, sys
from dpstream.accounting.errors import PolicyError
from dpstream.state.ledger.open import open_path
from tests.state.ledger.test_sqlite import DELTA, EPSILON, charge

def work(first):
    done = 0
    ledger = open_path(sys.argv[1])
    for run in range(first, first + 5):
        try:
            done += ledger.charge(charge(run // 2))
        except PolicyError:
            pass
    ledger.close()
    return done

with multiprocessing.get_context("fork").Pool(8) as pool:
    print(*pool.map(work, range(0, 40, 5), chunksize=1))
"""


def test_eight_processes_never_overspend(tmp_path: Path) -> None:
    """Eight at once, each run asked for by two of them."""
    path = str(tmp_path / "ledger.db")
    accounts.create(path, "flights", (EPSILON, DELTA))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, path],
        env={"PYTHONPATH": ":".join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    ledger = open_path(path)
    entries = ledger.entries()
    ledger.close()
    assert len(entries) == most() == sum(int(n) for n in done.stdout.split())
    assert within(entries, EPSILON, DELTA)
    assert len({e.run_id for e in entries}) == len(entries)


def test_another_privacy_unit_is_refused(ledger: Ledger, refused: Refused) -> None:
    ledger.charge(charge(1))
    other = msgspec.structs.replace(charge(2), identity=UnitIdentity("other", "string").text)
    refused(lambda: ledger.charge(other))
    refused(lambda: ledger.history().check([other]))
    assert len(ledger.entries()) == 1


def test_a_check_writes_nothing(ledger: Ledger) -> None:
    ledger.history().check([charge(1)])
    assert ledger.entries() == []
    with pytest.raises(PolicyError):
        much = msgspec.structs.replace(charge(1, mu=50.0), epsilon=9.0)
        ledger.history().check([much])


def test_each_epoch_of_a_run_is_charged(ledger: Ledger) -> None:
    """A restore that cannot replay draws again: the second epoch costs what the first did."""
    first, second = (
        msgspec.structs.replace(charge(1), kind="stream", epoch=epoch) for epoch in (0, 1)
    )
    assert [ledger.charge(c) for c in (first, second, second, first)] == [
        True, True, False, False,
    ]  # fmt: skip
    assert accounts.undated(ledger.entries()) == [first, second]
    assert within([first, second], 2.0, 2.1e-7) and not within([first, second], 2.0, 1.9e-7)
    assert within([first], 2.0, 1.9e-7)


def test_kinds_and_plain_charges(ledger: Ledger, tmp_path: Path, refused: Refused) -> None:
    session = Charge("5e" * 16, "q", charge(1).identity, 0.5, 0.0, None, 0.0, "table")
    assert ledger.charge(charge(1))
    assert ledger.charge(session)
    beyond = msgspec.structs.replace(session, run_id="5f" * 16, epsilon=2.5)
    refused(lambda: ledger.charge(beyond))
    assert accounts.charges(tmp_path / "data" / "ledger.db") == ledger.entries()
    assert [e.kind for e in ledger.entries()] == ["stream", "table"]


def test_removed_last_entries_are_noticed_by_who_saw_them(
    ledger: Ledger, tmp_path: Path, refused: Refused
) -> None:
    """Chain and seal of what is left hold; only who remembers the end can tell."""
    start, ends = ledger.head(), []
    for run in range(3):
        ledger.charge(charge(run))
        ends.append(ledger.head())
    for seen in (start, *ends):
        ledger.refuse_older(seen)
    accounts.shorten(tmp_path / "data" / "ledger.db", 3)
    refused(ledger.entries)
    ledger = open_path(tmp_path / "data" / "ledger.db")
    assert len(ledger.entries()) == 2
    for seen in (start, *ends[:2]):
        ledger.refuse_older(seen)
    refused(lambda: ledger.refuse_older(ends[2]))
    # Another run in the removed one's place does not hide it.
    ledger.charge(charge(7))
    refused(lambda: ledger.refuse_older(ends[2]))
    refused(lambda: ledger.refuse_older(Head("f" * 16, 1, ends[0].digest)))
    ledger.close()


def test_a_row_changed_under_open_ledgers_is_noticed(
    ledger: Ledger, tmp_path: Path, refused: Refused
) -> None:
    """By each of them, at its next charge: none goes on, so none hides it from the others."""
    path = tmp_path / "data" / "ledger.db"
    other = open_path(path)
    for run in range(3):
        ledger.charge(charge(run))
        other.entries()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE log SET changes = changes || x'00' WHERE number = 2")
    db.close()
    for account in (other, ledger, other):
        refused(account.charge, charge(9))
    other.close()


class Interrupted:
    """A connection that is interrupted behind its next commit."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db, self._armed = db, True

    def execute(self, statement: str, *given: Any) -> sqlite3.Cursor:
        done = self._db.execute(statement, *given)
        if statement == "COMMIT" and self._armed:
            self._armed = False
            raise KeyboardInterrupt
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)


def test_an_interrupt_behind_a_commit(tmp_path: Path) -> None:
    """The charge stands, and the ledger that was interrupted knows it."""
    storage = sqlite.AccountStorage(accounts.create(tmp_path / "ledger.db", "flights").path)
    ledger = Ledger(storage)
    ledger.charge(charge(1))
    storage.db = Interrupted(storage.db)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        ledger.charge(charge(2))
    assert ledger.charge(charge(2)) is False
    assert ledger.charge(charge(3)) is True
    assert accounts.undated(ledger.entries()) == [charge(1), charge(2), charge(3)]
    ledger.close()
