"""F7: aborted commits, lost answers and late arrivals on Spanner: no effect happens twice."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dpstream.accounting.errors import DpstreamError
from dpstream.state import open as stores
from dpstream.state.spanner import client as spanner_client
from dpstream.state.spanner import store as spanner
from dpstream.state.spanner.client import ExistsError, commit, connect, read_rows
from dpstream.state.spanner.commits import Mutations
from dpstream.state.store import OvertakenError
from tests import emulator
from tests.faults.child import batches_of, plan_of
from tests.faults.places import Places, places, small_commits
from tests.faults.runs import Releases, calm, job, released
from tests.faults.unsure import Network

ABORTED, UNKNOWN = 0.3, 0.05
#: Attempts of one commit: with 35% faults, one of 10,000 needs about 9.
MOST_ATTEMPTS = 25
NAMES = ("sticky", "rounds", "combined", "public")
TABLES = {
    "Progress": ("Part", "WindowIndex", "Reached"),
    "Steps": ("Part", "WindowIndex", "Step", "Piece", "Releases"),
    "Keys": ("Part", "WindowIndex", "KeyId", "Columns", "State", "UnitIds"),
    "KeyUnits": ("Part", "WindowIndex", "KeyId", "Chunk", "UnitIds"),
    "KeysByDue": ("Part", "WindowIndex", "Due", "Step", "Piece", "KeyIds"),
    "Units": ("Part", "UnitId", "Records"),
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same attempts with shorter pauses."""
    retry = spanner_client._RETRY.with_delay(initial=0.0002, maximum=0.01)
    monkeypatch.setattr(spanner_client, "_RETRY", retry)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Places]:
    with places("spanner", tmp_path) as fresh:
        yield fresh


def contents(url: str) -> dict[str, list[list[Any]]]:
    """Everything a run wrote, without the random marks of its writers."""
    return {
        table: list(read_rows(connect(url), table, columns)) for table, columns in TABLES.items()
    }


def writers(url: str) -> Counter[str]:
    """Rows of ``Steps`` by their writer."""
    return Counter(row[0] for row in read_rows(connect(url), "Steps", ("Writer",)))


def run_on(url: str, name: str) -> Releases:
    try:
        return released(job(name, url), batches_of(plan_of(name)))
    finally:
        stores.close_all()


class Tally:
    """Figures of many runs over a bad network; every run is checked."""

    def __init__(self, place: Places) -> None:
        self.place, self.transactions = place, 0
        self.attempts: Counter[int] = Counter()
        self.faults: Counter[str] = Counter()
        self.late: Counter[str] = Counter()
        self._calm: dict[str, dict[str, list[list[Any]]]] = {}

    def calm_contents(self, name: str) -> dict[str, list[list[Any]]]:
        """Tables of a run over a good network."""
        if name not in self._calm:
            url = self.place()
            assert run_on(url, name) == calm(name)
            self._calm[name] = contents(url)
            assert all(self._calm[name][table] for table in ("Progress", "Steps", "Units"))
        return self._calm[name]

    def run(self, name: str, seed: int) -> None:
        """One run over a bad network: its releases and its tables are those of a good one."""
        with small_commits():
            expected, url = self.calm_contents(name), self.place()
            network = Network(seed, ABORTED, UNKNOWN)
            with network.between(connect(url)):
                releases = run_on(url, name)
        assert releases == calm(name)
        assert contents(url) == expected
        # Whatever was sent took effect once: each mark stands, and no commit was applied twice.
        assert set(writers(url)) == set(network.attempts) == set(network.applied)
        assert set(network.applied.values()) == {1}
        self.transactions += len(network.attempts)
        self.attempts.update(network.attempts.values())
        self.faults.update(network.faults)
        self.late.update(network.late)

    def show(self) -> None:
        """Print what happened."""
        spread = ", ".join(f"{n}: {self.attempts[n]}" for n in sorted(self.attempts))
        print(
            f"\nF7: {self.transactions} transactions, {dict(self.faults)}, late {dict(self.late)}:"
            f" 0 double effects, 0 lost; attempts of a commit {{{spread}}}"
        )


def many(place: Places, transactions: int) -> None:
    tally, seed = Tally(place), 0
    while tally.transactions < transactions:
        tally.run(NAMES[seed % len(NAMES)], seed)
        seed += 1
    tally.show()
    assert max(tally.attempts) <= MOST_ATTEMPTS
    sent = sum(tally.attempts.values())
    assert sum(tally.faults.values()) > 0.3 * sent and tally.late["refused"]


def test_commits_of_unknown_outcome(place: Places) -> None:
    many(place, 300)


@pytest.mark.slow
def test_commits_of_unknown_outcome_long(place: Places) -> None:
    many(place, 10_000)


def test_an_emulator_that_aborts_at_random(tmp_path: Path) -> None:
    """Its own fault injection, a few in a hundred commits; runs go on until it was seen."""
    with emulator.running("--enable_fault_injection"), places("spanner", tmp_path) as place:
        for _ in range(10):
            url, network = place(), Network(0, 0.0, 0.0)
            job("sticky", url)
            with network.between(connect(url)), small_commits():
                assert run_on(url, "sticky") == calm("sticky")
            assert set(network.applied.values()) == {1}
            assert max(network.attempts.values()) <= MOST_ATTEMPTS
            if sum(network.attempts.values()) > len(network.attempts):
                return
    raise AssertionError("the emulator aborted nothing")


def no_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of ``Steps`` may be written again: a late commit overwrites newer states."""
    monkeypatch.setattr(Mutations, "insert", Mutations.upsert)


def no_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit whose row is there believes that another worker wrote it."""

    def commit_once(store: Any, out: Mutations, fence: tuple[int, ...]) -> None:
        try:
            commit(store._db, out.fill)
        except ExistsError:
            raise OvertakenError from None

    monkeypatch.setattr(spanner.SpannerStore, "_commit_once", commit_once)


def no_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit is tried once."""
    monkeypatch.setattr(spanner_client, "_RETRY", spanner_client._RETRY.with_timeout(0.0))


@pytest.mark.parametrize("sabotage", [no_fence, no_mark, no_retry], ids=lambda f: f.__name__)
def test_sabotage_is_seen(
    place: Places, sabotage: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    tally = Tally(place)
    with small_commits():
        tally.calm_contents("sticky")
    sabotage(monkeypatch)
    with pytest.raises((AssertionError, DpstreamError)):
        tally.run("sticky", 5)
