"""A store of schema version 1 is upgraded: ``version1.store``, written by the code of that version.

The file holds what ``test_store.WORK`` does: decisions, an open window and a closed one.
``version2.store`` holds what a reshard of ``life_conformance.sample`` and an expiry leave:
snapshots, releases from ahead, progress of unit shards.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from dpstream.accounting.arrays import Ids
from dpstream.accounting.errors import PolicyError, RunError
from dpstream.state.sqlite import file as sqlite_file
from dpstream.state.sqlite.backup import backup_file, check_file
from dpstream.state.sqlite.database import sqlite3
from dpstream.state.sqlite.file import create_store
from dpstream.state.sqlite.store import SqliteStore
from dpstream.state.sqlite.tables import put_meta
from dpstream.state.store import NEVER, KeyShard
from tests.state.conformance import IDENTITY, change, decide, take_step
from tests.state.life_conformance import whole
from tests.state.sqlite.bench import SqliteBench
from tests.state.sqlite.resharded import opened, resharded_today
from tests.state.sqlite.test_store import WORK, final

OLD = Path(__file__).with_name("version1.store")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "s.db"
    shutil.copy(OLD, path)
    return path


def version(path: Path) -> str:
    """The number behind its digest, if it has one."""
    with sqlite3.connect(path) as db:
        (found,) = db.execute("SELECT value FROM meta WHERE name = 'schema_version'").fetchone()
    db.close()
    return found.rpartition(" ")[2]


def change_then(states: KeyShard, keys: list[int], seed: int, named: Ids | None = None) -> Any:
    """The suite's change as it was when the file was written: every other slot was due."""
    out = change(states, keys, seed, named)
    states.due[out[0]] = np.where(out[0] % 2, seed + 1, NEVER)
    return out


def expected(folder: Path) -> list[object]:
    """What the same work leaves in a store of today."""
    bench = SqliteBench(folder / "today.db")
    with mock.patch("tests.state.conformance.change", change_then):
        for work in WORK:
            work(bench.open())
    found = final(bench.open())
    bench.close()
    return found


def test_nothing_is_lost(old: Path, tmp_path: Path) -> None:
    assert version(old) == "1"
    store = opened(old)
    assert store.identity == IDENTITY and version(old) == "3"
    assert final(store) == expected(tmp_path)
    # And it goes on like a new one.
    decide(store, 4, [1], [1], first=9)
    take_step(store, 4, [1], 4)
    store.forget_positions(0, 3)
    store.close()
    again = opened(old)
    assert again.unit_progress(0).forgotten == 3 and again.key_shard(0, 0).committed == 4
    again.close()


def test_creating_what_exists_upgrades_it(old: Path) -> None:
    assert create_store(old, IDENTITY) == IDENTITY and version(old) == "3"


def test_two_that_upgrade_at_once_agree(old: Path) -> None:
    """The second finds the work done, also while the first goes on with the store."""
    honest, others = sqlite_file.alone, list[SqliteStore]()

    def slow(*args: Any, **options: Any) -> Any:
        with mock.patch.object(sqlite_file, "alone", honest):
            others.append(opened(old))  # another process is faster
        return honest(*args, **options)

    with mock.patch.object(sqlite_file, "alone", slow):
        opened(old).close()
    assert len(others) == 1
    others[0].close()
    assert version(old) == "3" and check_file(old)


@pytest.mark.parametrize("name", ["version1.store", "version2.store"])
def test_no_store_is_upgraded_under_an_older_program(tmp_path: Path, name: str) -> None:
    """It would go on writing rows without digests; the store was damaged then, for good."""
    path = tmp_path / "s.db"
    shutil.copy(OLD.with_name(name), path)
    was = version(path)
    older = sqlite3.connect(path, isolation_level=None)
    older.execute("PRAGMA journal_mode = WAL")
    (row,) = older.execute("SELECT releases FROM steps WHERE length(releases) LIMIT 1").fetchone()
    with mock.patch.object(sqlite_file, "_PATIENCE", 0.1):
        for attempt in (
            lambda: opened(path),
            lambda: create_store(path, IDENTITY),
            lambda: check_file(path),
            lambda: backup_file(path, tmp_path / "b"),
        ):
            with pytest.raises(RunError, match="a run has it open"):
                attempt()
            assert version(path) == was
    older.execute("INSERT INTO steps VALUES (99, 0, 1, ?, NULL, NULL, NULL)", (row,))
    older.close()
    store = opened(path)
    assert store.committed_releases(99, 0, 1) is not None and version(path) == "3"
    store.close()
    check_file(path)


#: Writes of the upgrade of ``version1.store``.
WRITES = 15


@pytest.mark.parametrize("nth", (0, 3, 9, WRITES - 1))
def test_a_migration_cut_short_changes_nothing(old: Path, tmp_path: Path, nth: int) -> None:
    """Killed after the nth statement: the old version or the new one, all of it."""
    child = f"""
import os, signal
from dpstream.state.sqlite.database import sqlite3
from dpstream.state.sqlite import file as sqlite_file, upgrade as sqlite_upgrade
class Db:
    def __init__(self, db): self.db, self.left = db, {nth}
    def __getattr__(self, name): return getattr(self.db, name)
    def __enter__(self): return self.db.__enter__()
    def __exit__(self, *e): return self.db.__exit__(*e)
    def execute(self, text, *values):
        if text.strip().startswith(("CREATE", "DROP", "INSERT", "REPLACE")):
            self.left -= 1
            if self.left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return self.db.execute(text, *values)
with sqlite_file.alone({str(old)!r}) as db:
    sqlite_upgrade.upgrade(Db(db))
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    code = subprocess.run([sys.executable, "-c", child], env=environment, check=False).returncode
    assert code == -signal.SIGKILL
    assert version(old) == "1"
    store = opened(old)
    assert final(store) == expected(tmp_path) and version(old) == "3"
    store.close()


def test_a_full_disk_leaves_the_old_version(old: Path, tmp_path: Path) -> None:
    real = sqlite_file.alone

    @contextlib.contextmanager
    def full(*args: Any, **options: Any) -> Iterator[sqlite3.Connection]:
        with real(*args, **options) as db:
            db.execute("PRAGMA max_page_count = 1")  # as many as there are
            yield db

    with (
        mock.patch.object(sqlite_file, "alone", full),
        pytest.raises(RunError, match="SQLITE_FULL"),
    ):
        opened(old)
    assert version(old) == "1"
    store = opened(old)
    assert final(store) == expected(tmp_path)
    store.close()


@pytest.mark.parametrize("found", ["3", "0", "x", ""])
def test_a_version_that_no_program_wrote_is_damage(old: Path, found: str) -> None:
    """The third writes it with a digest."""
    with sqlite3.connect(old) as db:
        db.execute("UPDATE meta SET value = ? WHERE name = 'schema_version'", (found,))
    db.close()
    for attempt in (lambda: opened(old), lambda: create_store(old, IDENTITY)):
        with pytest.raises(PolicyError, match="is damaged"):
            attempt()
    assert version(old) == found


def test_a_newer_version_is_refused_and_left_alone(old: Path) -> None:
    with sqlite3.connect(old) as db:
        put_meta(db, "schema_version", "4")
    db.close()
    for attempt in (lambda: opened(old), lambda: create_store(old, IDENTITY)):
        with pytest.raises(PolicyError, match="schema version is beyond 3"):
            attempt()
    assert version(old) == "4"


def test_a_store_without_identity_is_refused(old: Path) -> None:
    with sqlite3.connect(old) as db:
        db.execute("DELETE FROM meta WHERE name = 'identity'")
    db.close()
    with pytest.raises(PolicyError, match="is damaged"):
        opened(old)


OLD_2 = Path(__file__).with_name("version2.store")


def all_of(store: SqliteStore) -> list[object]:
    return [
        whole(store),
        store.identity,
        store.metadata("x"),
        store.reshards,
        [store.unit_progress(shard) for shard in range(3)],
        sorted(store.progress()),
    ]


def test_a_store_of_version_2_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    shutil.copy(OLD_2, path)
    assert version(path) == "2"
    store, today = opened(path), resharded_today(tmp_path)
    assert version(path) == "3" and all_of(store) == all_of(today)
    store.close(), today.close()
    assert check_file(path).shards == 3  # every digest fits


@pytest.mark.parametrize("old_store", [OLD, OLD_2], ids=["1", "2"])
def test_damage_from_before_the_digests_is_noticed_as_far_as_it_can_be(
    tmp_path: Path, old_store: Path
) -> None:
    """No error that is not coded; where Arrow or SQLite see it, that of damage."""
    path, whole_file, noticed = tmp_path / "s.db", old_store.read_bytes(), 0
    for byte in range(40, len(whole_file), len(whole_file) // 150):
        data = bytearray(whole_file)
        data[byte] ^= 0x10
        path.write_bytes(bytes(data))
        try:
            store = opened(path)
            store.close()
        except PolicyError as error:
            noticed += 1
            assert error.field == "state.store"
        for side in ("-wal", "-shm"):
            Path(f"{path}{side}").unlink(missing_ok=True)
    assert noticed >= 15
