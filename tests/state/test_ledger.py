"""The ledger: composition, refusals, one charge per run, a chain, and eight processes at once."""

import math
import sqlite3
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from accounting.errors import PolicyError, RunError
from accounting.gaussian import delta_of, mu_of
from state.ledger import Charge, Ledger, within

EPSILON, DELTA = 3.0, 1e-6
MU = mu_of(1.0, 0.6e-7)


def charge(run: int, mu: float = MU, threshold: float = 0.4e-7) -> Charge:
    return Charge(f"{run:032x}", "plan", "user over the whole stream", 1.0, 1e-7, mu, threshold)


def most(limit: tuple[float, float] = (EPSILON, DELTA)) -> int:
    """How many equal runs the limit holds, by the formula of Gaussian composition."""
    runs = 1
    while delta_of(limit[0], MU * math.sqrt(runs + 1)) + (runs + 1) * 0.4e-7 <= limit[1]:
        runs += 1
    return runs


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    made = Ledger(tmp_path / "data" / "ledger.db", "flights")
    yield made  # type: ignore[misc]
    made.close()


def test_runs_compose_until_the_limit(ledger: Ledger) -> None:
    allowed = most()
    assert 3 < allowed < 20
    for run in range(allowed):
        assert ledger.charge(charge(run), EPSILON, DELTA) is True
    with pytest.raises(PolicyError, match="would together spend more than epsilon 3") as caught:
        ledger.charge(charge(99), EPSILON, DELTA)
    assert f"({allowed} runs" in str(caught.value) and caught.value.exit_code == 3
    assert [c.run_id for c in ledger.entries()] == [charge(run).run_id for run in range(allowed)]
    # A steward may raise the limit.
    assert ledger.charge(charge(99), 2 * EPSILON, DELTA) is True


def test_composition_is_neither_free_nor_linear() -> None:
    runs = most()
    assert within([charge(i) for i in range(runs)], EPSILON, DELTA)
    assert not within([charge(i) for i in range(runs + 1)], EPSILON, DELTA)
    assert not within([charge(i, mu=MU * 1.1) for i in range(runs)], EPSILON, DELTA)
    # Threshold failures add up even where there is no noise at all.
    assert not within([charge(0, 0.0, 0.6e-6), charge(1, 0.0, 0.6e-6)], EPSILON, DELTA)
    assert within([charge(0, 0.0, 0.4e-6), charge(1, 0.0, 0.4e-6)], EPSILON, DELTA)


def test_one_run_spends_its_own_guarantee() -> None:
    assert within([charge(0)], 1.0, 1e-7)
    assert not within([charge(0)], 0.99, 1e-7)
    assert not within([charge(0)], 1.0, 0.99e-7)
    # The same Gaussian seen at another epsilon.
    assert within([charge(0)], 2.0, 0.5e-7) == (delta_of(2.0, MU) + 0.4e-7 <= 0.5e-7)


def test_a_restart_is_not_charged_again(ledger: Ledger) -> None:
    assert ledger.charge(charge(0), 1.0, 1e-7) is True
    assert ledger.charge(charge(0), 1.0, 1e-7) is False
    # Nor refused when the limit has become smaller in the meantime.
    assert ledger.charge(charge(0), 0.1, 1e-9) is False
    assert len(ledger.entries()) == 1


def test_data_sets_have_their_own_limits(ledger: Ledger, tmp_path: Path) -> None:
    ledger.charge(charge(0), 1.0, 1e-7)
    other = Ledger(tmp_path / "data" / "ledger.db", "weather")
    assert other.charge(charge(1), 1.0, 1e-7) is True
    assert other.charge(charge(0), EPSILON, DELTA) is True  # the same run on other data
    assert [len(book.entries()) for book in (ledger, other)] == [1, 2]
    other.close()


BREAKS = {
    "an edited entry": "UPDATE entries SET entry = replace(entry, '1.0', '0.1') WHERE seq = 2",
    "an entry of another data set": "UPDATE entries SET data_set = 'weather' WHERE seq = 2",
    "a removed entry": "DELETE FROM entries WHERE seq = 2",
    "a removed first entry": "DELETE FROM entries WHERE seq = 1",
    "an edited digest": "UPDATE entries SET digest = '00' WHERE seq = 3",
    "entries in another order": "UPDATE entries SET seq = -seq",
}


@pytest.mark.parametrize("statement", BREAKS.values(), ids=[n.replace(" ", "-") for n in BREAKS])
def test_a_broken_chain_is_noticed(ledger: Ledger, tmp_path: Path, statement: str) -> None:
    for run in range(3):
        ledger.charge(charge(run), EPSILON, DELTA)
    ledger.entries()
    with sqlite3.connect(tmp_path / "data" / "ledger.db") as db:
        db.execute(statement)
    db.close()
    for attempt in (ledger.entries, lambda: ledger.charge(charge(9), EPSILON, DELTA)):
        with pytest.raises(PolicyError, match="chain is broken"):
            attempt()


def test_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ledger.db").write_bytes(b"not a database" * 100)
    with pytest.raises(RunError, match="SQLITE_NOTADB"):
        Ledger(tmp_path / "ledger.db", "flights")


SCRIPT = """
import multiprocessing, sys
from accounting.errors import PolicyError
from state.ledger import Ledger
from tests.state.test_ledger import DELTA, EPSILON, charge

def work(first):
    done = 0
    ledger = Ledger(sys.argv[1], "flights")
    for run in range(first, first + 5):
        try:
            done += ledger.charge(charge(run // 2), EPSILON, DELTA)
        except PolicyError:
            pass
    ledger.close()
    return done

with multiprocessing.get_context("fork").Pool(8) as pool:
    print(*pool.map(work, range(0, 40, 5), chunksize=1))
"""


def test_eight_processes_never_overspend(tmp_path: Path) -> None:
    """Eight at once on a ledger that none has created, each run asked for by two of them."""
    path = str(tmp_path / "ledger.db")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, path],
        env={"PYTHONPATH": ":".join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    ledger = Ledger(path, "flights")
    entries = ledger.entries()
    ledger.close()
    assert len(entries) == most() == sum(int(n) for n in done.stdout.split())
    assert within(entries, EPSILON, DELTA)
    assert len({e.run_id for e in entries}) == len(entries)


def test_another_privacy_unit_is_refused(ledger: Ledger) -> None:
    ledger.charge(charge(1), EPSILON, DELTA)
    other = msgspec.structs.replace(charge(2), unit="user per period of 3600 s")
    for act in (ledger.charge, ledger.check):
        with pytest.raises(PolicyError, match="another privacy unit"):
            act(other, EPSILON, DELTA)
    assert len(ledger.entries()) == 1


def test_a_check_writes_nothing(ledger: Ledger) -> None:
    ledger.check(charge(1), EPSILON, DELTA)
    assert ledger.entries() == []
    with pytest.raises(PolicyError):
        ledger.check(msgspec.structs.replace(charge(1, mu=50.0), epsilon=9.0), EPSILON, DELTA)
