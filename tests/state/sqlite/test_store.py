"""The SQLite store: the suite that every store passes, and a fault at every database call."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from dpstream.accounting.errors import DpstreamError, RunError
from dpstream.state.sqlite.database import sqlite3
from dpstream.state.sqlite.store import SqliteStore
from dpstream.state.store import OvertakenError, Store
from tests.state.conformance import (
    StoreConformance,
    counts,
    decide,
    look,
    take_step,
)
from tests.state.sqlite.bench import SqliteBench


class TestSqliteStore(StoreConformance):
    """The suite every store passes."""


def test_commits_are_durable(bench: SqliteBench) -> None:
    store = bench.open()
    assert store._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert store._db.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL


def test_a_closed_windows_states_are_gone_from_the_file(bench: SqliteBench) -> None:
    store = bench.open()
    for trigger in (1, 2, 3):
        take_step(store, trigger, [trigger], 1)
    take_step(store, 4, [1], 1, closes=True)
    take_step(store, 1, [1], 1, shard=1)
    step_counts = bench.rows(
        "SELECT shard, count(keys), count(states), count(pairs) FROM steps GROUP BY 1"
    )
    assert step_counts == [(0, 0, 0, 0), (1, 1, 1, 1)]
    assert sorted(store.progress()) == [(0, 0, 4), (0, 1, 1)]


# --- faults ----------------------------------------------------------------------------


class Faulty:
    """A connection whose Nth use fails: before it had an effect, or after (outcome unknown)."""

    def __init__(self, db: sqlite3.Connection, fails_at: int, after: bool) -> None:
        self._db, self._left, self._after = db, fails_at, after
        self.fired = False

    def _due(self) -> bool:
        self._left -= 1
        if self._left:
            return False
        self.fired = True
        return True

    def _fail(self) -> None:
        error = sqlite3.OperationalError("disk I/O error at u17")
        error.sqlite_errorname = "SQLITE_IOERR"
        raise error

    def execute(self, *args: object) -> sqlite3.Cursor:
        due = self._due()
        if due and not self._after:
            self._fail()
        result = self._db.execute(*args)  # type: ignore[arg-type]
        if due:
            self._fail()
        return result

    def __enter__(self) -> "Faulty":
        self._db.__enter__()
        return self

    def __exit__(self, *error: object) -> bool | None:
        due = self._due()
        if due and not self._after:
            self._db.rollback()
            self._fail()
        result = self._db.__exit__(*error)  # type: ignore[arg-type]
        if due:
            self._fail()
        return result

    def close(self) -> None:
        self._db.close()


WORK: list[Callable[[Store], object]] = [
    lambda store: decide(store, 1, [1, 2], [1, 1], first=0),
    lambda store: take_step(store, 1, [1, 2, 3], 1),
    lambda store: take_step(store, 2, [3, 4], 2),
    lambda store: decide(store, 3, [2, 5], [2, 1], first=2),
    lambda store: take_step(store, 3, [1, 5], 3),
    lambda store: take_step(store, 1, [9], 1, shard=1),
    lambda store: take_step(store, 2, [9], 2, closes=True, shard=1),
]


def final(store: Store) -> list[object]:
    names = [(0, shard, t) for shard in (0, 1) for t in (1, 2, 3)]
    releases = [store.committed_releases(*name) for name in names]
    return [
        counts(store),
        store.unit_shard(0).decided,
        look(store, 0),
        look(store, 1),
        [None if f is None else f.to_pylist() for f in releases],
        store.admitted_before(0, store.unit_shard(0))[1].offset.tolist(),
    ]


def attempt(store: Store, work: Callable[[Store], object]) -> None:
    """Do the work unless it was done, as a worker that repeats a failed bundle would."""
    before = counts(store), store.unit_shard(0).decided
    try:
        work(store)
    except DpstreamError as error:
        assert isinstance(error, RunError)
        assert "SQLITE_IOERR" in str(error) and "u17" not in str(error)
        if (counts(store), store.unit_shard(0).decided) == before:
            with contextlib.suppress(OvertakenError):  # it was committed after all
                work(store)


@pytest.mark.parametrize("after", [False, True], ids=["no-effect", "unknown-outcome"])
def test_a_fault_at_every_call_of_a_commit(tmp_path: Path, after: bool) -> None:
    clean = SqliteBench(tmp_path / "clean.db")
    for work in WORK:
        work(clean.open())
    expected = final(clean.open())
    clean.close()
    calls = 0
    for number, work in enumerate(WORK):
        for fails_at in range(1, 30):
            bench = SqliteBench(tmp_path / f"{after}-{number}-{fails_at}.db")
            store = bench.open()
            for earlier in WORK[:number]:
                earlier(store)
            # Loads are done before: this is about commits.
            store.unit_shard(0), store.key_shard(0, 0), store.key_shard(0, 1)
            honest = store._db
            store._db = faulty = Faulty(honest, fails_at, after)  # type: ignore[assignment]
            try:
                attempt(store, work)
            finally:
                store._db = honest
            for later in WORK[number + 1 :]:
                later(store)
            assert final(bench.open()) == expected
            bench.close()
            if not faulty.fired:
                break
            calls += 1
        else:
            pytest.fail("the commit never became clean")
    assert calls >= 3 * len(WORK)


def test_the_fault_test_notices_states_that_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SqliteStore, "forget", lambda *_: None)
    monkeypatch.setattr(SqliteStore, "forget_units", lambda *_: None)
    with pytest.raises(AssertionError):
        test_a_fault_at_every_call_of_a_commit(tmp_path, after=False)
