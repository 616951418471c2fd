"""The SQLite store: the suite that every store passes, and a fault at every database call.

Copies of a file: whole under their name, with a digest behind them, and never over another.

The embedded store's own life: the suite that every store passes, and what its file shows.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from dpstream.accounting.errors import DpstreamError, RunError
from dpstream.state.sqlite.database import sqlite3
from dpstream.state.sqlite.store import (
    SqliteStore,
    backup_file,
    check_file,
    copy_backup,
    drafted,
    publish,
    refuse_existing,
    replace_file,
    seal_backup,
)
from dpstream.state.store import OvertakenError, Store
from tests.golden.refusals import Refused
from tests.state.conformance import (
    IDENTITY,
    StoreConformance,
    counts,
    decide,
    look,
    take_step,
)
from tests.state.life_conformance import RetentionConformance, decide_units, fill_step
from tests.state.sqlite.bench import SqliteBench, SqliteRetentionBench


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

    path = None

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


def test_a_backup_is_the_store_of_one_instant(bench: SqliteBench, tmp_path: Path) -> None:
    store, out, progress = bench.open(), tmp_path / "b" / "backup", list[tuple[int, int]]()
    take_step(store, 1, [1, 2], 1)
    assert backup_file(bench.path, out, lambda done, of: progress.append((done, of))) == IDENTITY
    assert progress and progress[-1][0] == progress[-1][1]
    assert out.stat().st_mode & 0o77 == 0, "for its owner only"
    take_step(store, 2, [3], 2)
    copy = tmp_path / "copy"
    copy_backup(out, copy)
    assert check_file(copy) == IDENTITY
    there = SqliteBench(copy)
    assert there.open().progress() == [(0, 0, 1)]
    there.close()
    assert [path.name for path in out.parent.iterdir()] == ["backup"]


def test_nothing_is_overwritten(bench: SqliteBench, tmp_path: Path, refused: Refused) -> None:
    out, draft = tmp_path / "out", tmp_path / "draft"
    out.write_text("mine"), draft.write_text("other")
    for attempt in (
        lambda: refuse_existing(out),
        lambda: backup_file(bench.path, out),
        lambda: publish(draft, out),
    ):
        caught = refused(attempt)
        assert caught.field == "backup" and out.read_text() == "mine"


@pytest.mark.parametrize("at", [0, 10, -1, -16])
def test_any_other_byte_is_noticed(tmp_path: Path, at: int, refused: Refused) -> None:
    file, copy = tmp_path / "backup", tmp_path / "copy"
    file.write_bytes(b"anything at all")
    seal_backup(file)
    copy_backup(file, copy)
    assert copy.read_bytes() == b"anything at all"
    data = bytearray(file.read_bytes())
    data[at] ^= 4
    file.write_bytes(data)
    refused(lambda: copy_backup(file, copy))


def test_a_file_without_a_digest_is_no_backup(
    bench: SqliteBench, tmp_path: Path, refused: Refused
) -> None:
    bench.open().close()
    bench.close()
    for content in (b"", b"short", b"x" * 100, Path(bench.path).read_bytes()):
        (tmp_path / "file").write_bytes(content)
        refused(copy_backup, tmp_path / "file", tmp_path / "copy")


def test_a_store_that_is_replaced_is_kept_under_a_free_name(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    path.write_text("0"), (tmp_path / "s.db-wal").write_text("log of 0")
    for number, aside in enumerate(("s.db.old", "s.db.old1", "s.db.old2"), 1):
        draft = tmp_path / "draft"
        draft.write_text(str(number))
        assert replace_file(path, draft) == tmp_path / aside
        assert (tmp_path / aside).read_text() == str(number - 1) and path.read_text() == str(number)
    assert (tmp_path / "s.db.old-wal").read_text() == "log of 0"
    assert not (tmp_path / "s.db-wal").exists()


def test_a_draft_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    denied = pytest.raises(
        RunError, match=r"cannot be written: (there is no such|a file of that name)"
    )
    with denied, drafted(tmp_path / "file" / "out"):
        pass
    with pytest.raises(KeyboardInterrupt), drafted(tmp_path / "out") as draft:
        draft.write_text("half")
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


class TestSqliteRetention(RetentionConformance):
    """The suite of every store's own life."""


def test_compaction_leaves_one_row_of_each_log(bench: SqliteBench) -> None:
    store = bench.open()
    for trigger in (1, 2, 3):
        take_step(store, trigger, [trigger, 7], trigger)
        decide_units(store, 0, trigger, [0, 2 * trigger])
    assert bench.rows("SELECT count(*) FROM admissions") == [(3,)]
    store._db.execute("INSERT INTO carried VALUES (9, 9, 9, zeroblob(1000000))")
    store._db.execute("DELETE FROM carried")
    assert store._db.execute("PRAGMA freelist_count").fetchone()[0] > 100
    store.compact()
    assert store._db.execute("PRAGMA freelist_count").fetchone() == (0,)
    assert bench.rows("SELECT count(*) FROM admissions") == [(1,)]
    assert bench.rows("SELECT count(states), count(*) FROM steps") == [(0, 3)]
    assert bench.rows("SELECT count(*) FROM snapshots") == [(1,)]
    assert bench.path.with_name(f"{bench.path.name}-wal").stat().st_size == 0


def test_dropped_releases_leave_no_row(life: SqliteRetentionBench) -> None:
    store = life.open()
    for window in range(3):
        fill_step(store, window, 0, 1, [0])
    store.drop_releases(2)
    assert life.rows("SELECT window FROM steps") == [(2,)]
