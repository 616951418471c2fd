"""The SQLite store: conformance, injected faults at every database call, identity checks."""

import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from dpstream.accounting.errors import DpstreamError, PolicyError, RunError, UsageError
from dpstream.dp_transforms.run import KeySource, begin_run
from dpstream.state import open as stores
from dpstream.state.sqlite.file import connect, create_store, store_exists
from dpstream.state.sqlite.store import SqliteStore
from dpstream.state.sqlite.tables import put_meta
from dpstream.state.store import OvertakenError, RunIdentity, Store
from tests.state.conformance import (
    IDENTITY,
    KEY_SCHEMA,
    STREAMS,
    Bench,
    StoreConformance,
    counts,
    decide,
    look,
    take_step,
)
from tests.state.life_conformance import OLD, RetentionBench, RetentionConformance
from tests.streams import KEYS, RUN_ID, make_plan


class SqliteBench(Bench):
    def __init__(self, path: Path, identity: RunIdentity = IDENTITY) -> None:
        self.path = path
        create_store(path, identity)
        self._open: list[Store] = []

    def open(self) -> SqliteStore:
        store = SqliteStore(self.path, KEY_SCHEMA, STREAMS)
        self._open.append(store)
        return store

    def close(self) -> None:
        for store in self._open:
            store.close()

    def rows(self, query: str) -> list[tuple[object, ...]]:
        with sqlite3.connect(self.path) as db:
            found = db.execute(query).fetchall()
        db.close()
        return found


@pytest.fixture
def bench(tmp_path: Path) -> SqliteBench:
    made = SqliteBench(tmp_path / "deep" / "store.db")
    yield made  # type: ignore[misc]
    made.close()


class TestSqliteStore(StoreConformance):
    """The suite every store passes."""


class SqliteRetentionBench(SqliteBench, RetentionBench):
    def fresh(self, identity: RunIdentity) -> SqliteStore:
        path = self.path.with_name(f"fresh{len(self._open)}.db")
        create_store(path, identity)
        store = SqliteStore(path, KEY_SCHEMA, STREAMS)
        self._open.append(store)
        return store


@pytest.fixture
def life(tmp_path: Path) -> SqliteRetentionBench:
    made = SqliteRetentionBench(tmp_path / "life.db", OLD)
    yield made  # type: ignore[misc]
    made.close()


class TestSqliteRetention(RetentionConformance):
    """The suite of every store's own life."""


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
    kept = bench.rows(
        "SELECT shard, count(keys), count(states), count(pairs) FROM steps GROUP BY 1"
    )
    assert kept == [(0, 0, 0, 0), (1, 1, 1, 1)]
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
    found = [store.committed_releases(*name) for name in names]
    return [
        counts(store),
        store.unit_shard(0).decided,
        look(store, 0),
        look(store, 1),
        [None if f is None else f.to_pylist() for f in found],
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


def test_a_full_or_read_only_disk_is_refused_with_a_code(tmp_path: Path) -> None:
    bench = SqliteBench(tmp_path / "store.db")
    store = bench.open()
    store._db.execute("PRAGMA max_page_count = 1")
    with pytest.raises(RunError, match="SQLITE_FULL"):
        take_step(store, 1, list(range(5000)), 1)
    store._db.execute("PRAGMA max_page_count = 1000000")
    store._db.execute("PRAGMA query_only = ON")
    with pytest.raises(RunError, match="SQLITE_READONLY"):
        decide(store, 1, [1], [1], first=0)
    bench.close()
    assert bench.open().key_shard(0, 0).size == 0
    bench.close()


# --- identity --------------------------------------------------------------------------


def test_an_existing_store_keeps_its_run_id(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    assert not store_exists(path)
    assert create_store(path, IDENTITY) == IDENTITY
    assert store_exists(path)
    other = msgspec.structs.replace(IDENTITY, run_id="33" * 16)
    assert create_store(path, other) == IDENTITY


def test_a_begin_that_was_cut_off_is_no_store(tmp_path: Path) -> None:
    """Killed between SQLite's header and the transaction that makes the tables."""
    path = tmp_path / "store.db"
    connect(path).close()
    assert path.stat().st_size > 0 and not store_exists(path)
    plan, url = make_plan(), f"sqlite:{path}"
    assert begin_run(plan, KEYS, url, 3)[1] is False
    assert store_exists(path) and begin_run(plan, KEYS, url, 3)[1] is True
    stores.close_all()
    (tmp_path / "other").write_bytes(b"no database at all" * 100)
    assert store_exists(tmp_path / "other") and not store_exists(tmp_path / "none")
    held = sqlite3.connect(path, isolation_level=None)
    held.execute("PRAGMA locking_mode = EXCLUSIVE")
    held.execute("BEGIN EXCLUSIVE")
    assert store_exists(path)
    held.close()


def test_what_an_operator_adds_is_no_damage(bench: SqliteBench) -> None:
    with sqlite3.connect(bench.path) as db:
        db.execute("INSERT INTO steps VALUES (9, 9, 9, x'', NULL, NULL, NULL)")
        db.execute("ANALYZE")
        db.execute("CREATE INDEX steps_by_trigger ON steps (trigger)")
        db.execute("DELETE FROM steps")
        assert ("sqlite_stat1",) in db.execute("SELECT name FROM sqlite_master").fetchall()
    db.close()
    bench.open().close()
    for change in ("DROP INDEX admissions_by_shard", "ALTER TABLE steps ADD COLUMN more"):
        with sqlite3.connect(bench.path) as db:
            db.execute(change)
        db.close()
        with pytest.raises(PolicyError, match="is damaged"):
            bench.open()


def test_a_run_is_resumed_and_nothing_else(tmp_path: Path) -> None:
    plan, url = make_plan(), f"sqlite:{tmp_path / 'store.db'}"
    source = (b"file", b"digest")
    assert begin_run(plan, KEYS, url, 3, source=source, run_id=RUN_ID)[1] is False
    run, resumed = begin_run(plan, KEYS, url, 3, source=source)
    assert resumed and run.open().identity.run_id == RUN_ID
    refused = [
        ("state.store", lambda: begin_run(make_plan(triggers=6), KEYS, url, 3, source=source)),
        (
            "privacy.key",
            lambda: begin_run(plan, KeySource(None, "12" * 32), url, 3, source=source),
        ),
        ("source", lambda: begin_run(plan, KEYS, url, 3, source=(b"file", b"other"))),
        ("source", lambda: begin_run(plan, KEYS, url, 3, source=(b"filedigest",))),
        ("state.shards", lambda: begin_run(plan, KEYS, url, 4, source=source)),
    ]
    for field, attempted in refused:
        with pytest.raises(PolicyError) as caught:
            attempted()
        assert caught.value.field == field
    stores.close_all()
    with pytest.raises(PolicyError, match="another plan"):
        stores.open_store(url, make_plan(triggers=6), "22" * 16)
    assert begin_run(plan, KEYS, url, 3, source=source)[1] is True


def test_fingerprints_are_keyed(tmp_path: Path) -> None:
    plan = make_plan()
    found: list[RunIdentity] = []
    for number, keys in enumerate((KEYS, KeySource(None, "12" * 32))):
        url = f"sqlite:{tmp_path / f'{number}.db'}"
        found.append(begin_run(plan, keys, url, source=(b"digest",))[0].open().identity)
    assert found[0].key_fingerprint != found[1].key_fingerprint
    assert found[0].source_fingerprint != found[1].source_fingerprint
    assert found[0].run_id != found[1].run_id and len(found[0].run_id) == 32
    assert "11" * 32 not in msgspec.json.encode(found[0]).decode()


def test_another_schema_version_is_refused(bench: SqliteBench) -> None:
    with sqlite3.connect(bench.path) as db:
        put_meta(db, "schema_version", "4")
    db.close()
    with pytest.raises(PolicyError, match="schema version"):
        bench.open()


@pytest.mark.parametrize("content", [b"no database at all" * 100, b"SQLite format 3\0"])
def test_what_is_no_store_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "store.db"
    path.write_bytes(content)
    with pytest.raises((UsageError, PolicyError)):
        create_store(path, IDENTITY)
    assert path.read_bytes() == content


def test_a_database_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE accounts (name TEXT)")
    db.close()
    with pytest.raises(PolicyError, match="not a dpstream store"):
        SqliteStore(path, KEY_SCHEMA, STREAMS)


@pytest.mark.parametrize("url", ["", "store.db", "postgres:x", "sqlite:"])
def test_unknown_urls_are_refused(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        stores.exists(url)
    assert caught.value.field == "state.store"
