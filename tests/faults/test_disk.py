"""Disks that are full, read-only or open to others; databases that are locked or away."""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from unittest import mock

import pytest

from dpstream.accounting.errors import DpstreamError, UsageError
from dpstream.dp_transforms.flow import run_in_memory
from dpstream.dp_transforms.run import Run
from dpstream.state import open as stores
from dpstream.state import transfer
from dpstream.state.ledger.events import Charge
from dpstream.state.ledger.open import read_ledger
from dpstream.state.sqlite import file as sqlite_file
from dpstream.state.sqlite import retention as sqlite
from dpstream.state.sqlite.database import sqlite3
from dpstream.state.sqlite.store import check_file
from tests import accounts, emulator
from tests.faults.child import batches_of, plan_of
from tests.faults.journals import leave_journal
from tests.faults.live_jobs import LATENESS, WINDOW, Growing, Live
from tests.faults.places import places
from tests.faults.runs import calm, job, released
from tests.faults.systems import SYSTEMS, charged, done
from tests.faults.test_store_faults import redelivered
from tests.listening import Relay
from tests.runners.engines import need, without
from tests.runners.prism import wait_for
from tests.written import write_release

DISK = 2 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mounting, check=False, capture_output=True).returncode:
        without("a small disk is missing: no right to mount one")
    yield folder
    stores.close_all()
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path, left: int) -> None:
    """Leave so many free bytes."""
    (disk / "ballast").unlink(missing_ok=True)
    free = shutil.disk_usage(disk).free
    (disk / "ballast").write_bytes(bytes(max(0, free - left)))


def clear(error: BaseException) -> bool:
    """A coded error that says what to do, and nothing private."""
    assert isinstance(error, DpstreamError), repr(error)
    assert error.field.split(".")[0] in ("store", "sink", "account", "backup") and error.fix
    return True


def refused(work: Callable[[], object]) -> bool:
    """Whether the work was refused, with a clear message."""
    try:
        work()
        return False
    except Exception as error:
        return clear(error)
    finally:
        stores.close_all()


def run_all(run: Run) -> None:
    run_in_memory(run, batches_of(run.plan))


def test_a_run_on_a_full_disk(disk: Path, tmp_path: Path) -> None:
    """However much is left, the run stops clearly or ends; with space it goes on, nothing lost."""
    expected, refusals = calm("sticky"), 0
    run = job("sticky", disk / "s.db")
    stores.close_all()
    for left in range(0, 400_000, 40_000):
        fill(disk, left)
        refusals += refused(lambda: run_all(run))
        (disk / "ballast").unlink()
        assert stores.identity_of(run.store, run.plan).run_id == run.run_id
    assert refusals >= 3
    assert released(run, redelivered(run.plan, 3)) == expected


def test_a_read_only_disk_says_so(disk: Path, tmp_path: Path) -> None:
    expected = calm("sticky")
    run = job("sticky", disk / "s.db")
    stores.close_all()
    for path in (disk / "s.db", disk / "new.db"):
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(UsageError, match="file system is read-only"):
            job("sticky", path)
        stores.close_all()
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    assert released(run, redelivered(run.plan, 3)) == expected


@pytest.mark.parametrize("command", ["backup", "restore", "reshard", "expire"])
def test_a_change_of_a_store_on_a_full_disk(disk: Path, tmp_path: Path, command: str) -> None:
    expected = calm("sticky")
    run = job("sticky", disk / "s.db")
    with mock.patch("dpstream.dp_transforms.flow.expire"):  # something is left to expire
        run_all(run)
    stores.close_all()
    transfer.backup(run.store, run.plan, tmp_path / "b")
    before, refusals = sorted(p.name for p in disk.iterdir()), 0

    def expire() -> None:
        from dpstream.state import retention

        store = run.open()
        retention.expire(store, run.plan.timeline)
        store.compact()

    def work() -> object:
        return {
            "backup": lambda: transfer.backup(run.store, run.plan, disk / "new"),
            "restore": lambda: transfer.restore(run.store, run.plan, tmp_path / "b", replace=True),
            "reshard": lambda: transfer.reshard(run.store, run.plan, 7),
            "expire": expire,
        }[command]()

    for left in [*range(0, 160_000, 16_000), 300_000]:
        fill(disk, left)
        failed = refused(work)
        refusals += failed
        (disk / "ballast").unlink()
        if failed:
            assert {p.name for p in disk.iterdir()} <= {*before, "s.db-wal", "s.db-shm"}
        elif command != "expire":
            break
        check_file(disk / "s.db")
    assert refusals >= 2
    if not failed and command == "reshard":
        run = run._replace(shards=7)
    assert released(run, redelivered(run.plan, 3)) == expected


def test_ledger_and_sink_on_a_full_disk(disk: Path, tmp_path: Path) -> None:
    batches = run_in_memory(job("sticky", tmp_path / "s.db"), batches_of(plan_of("sticky")))[0]
    stores.close_all()
    accounts.create(disk / "ledger.db", "d", (5.0, 1e-5))
    fill(disk, 0)

    def charge() -> None:
        ledger = accounts.opened(disk / "ledger.db", "d")
        with contextlib.closing(ledger):
            ledger.charge(Charge("r", "p", accounts.USER, 1.0, 1e-6, 0.3, 0.0))

    assert refused(charge)
    for left in (0, 8192):
        fill(disk, left)
        assert refused(lambda: [write_release(disk / "out", "csv", b) for b in batches * 20])
    (disk / "ballast").unlink()
    for batch in batches:
        write_release(disk / "out", "csv", batch)
    charge()
    assert not [p for p in (disk / "out").rglob(".*")]


@pytest.mark.parametrize("name", ["sticky", "combined"])
def test_no_page_is_left_at_any_commit(name: str, tmp_path: Path) -> None:
    """SQLite's page limit at every size that a run reaches: refused, then the run goes on."""
    expected = released(job(name, tmp_path / "calm.db"), batches_of(plan_of(name)))
    stores.close_all()
    run = job(name, tmp_path / "s.db")
    stores.close_all()
    real, limit = sqlite_file.connect, 0

    def small(path: Path) -> sqlite3.Connection:
        db = real(path)
        db.execute(f"PRAGMA max_page_count = {limit}")
        return db

    refusals, pages = 0, (tmp_path / "calm.db").stat().st_size // 8192
    for limit in range(10, pages + 8, max(1, pages // 12)):  # noqa: B007 - read by small
        with mock.patch.object(sqlite, "connect", small):
            refusals += refused(lambda: run_all(run))
    assert refusals >= 3
    assert released(run, redelivered(run.plan, 3)) == expected


@pytest.mark.slow
def test_no_page_is_left_at_any_size(tmp_path: Path) -> None:
    for name in ("threshold", "public"):
        folder = tmp_path / name
        folder.mkdir()
        test_no_page_is_left_at_any_commit(name, folder)


def test_a_disk_that_becomes_read_only(disk: Path, tmp_path: Path) -> None:
    expected, run = calm("sticky"), job("sticky", disk / "s.db")
    run_all(run)
    stores.close_all()
    transfer.backup(run.store, run.plan, tmp_path / "b")
    for option in ("ro", "rw"):
        remount = ["mount", "-o", f"remount,{option},size={DISK}", str(disk)]
        subprocess.run(remount, check=True)
        if option == "ro":
            for work in (
                lambda: run_all(run),
                lambda: transfer.backup(run.store, run.plan, disk / "b"),
                lambda: transfer.reshard(run.store, run.plan, 3),
                lambda: transfer.restore(run.store, run.plan, tmp_path / "b", replace=True),
                lambda: accounts.opened(disk / "ledger.db", "d"),
            ):
                assert refused(work)
    assert released(run, redelivered(run.plan, 3)) == expected


def test_rights_that_are_lost(tmp_path: Path) -> None:
    """As another user, who may not write: refused, and the file stays as it was."""
    need(os.geteuid() == 0, "a user who can become another is missing (run as root)")
    folder = tmp_path / "state"
    folder.mkdir()
    run = job("sticky", folder / "s.db")
    run_all(run)
    stores.close_all()
    path = folder / "s.db"
    before = path.read_bytes()
    os.chmod(path, 0o444)
    attempt = f"""
import os
from dpstream.state.sqlite.database import sqlite3
from dpstream.accounting.errors import DpstreamError, UsageError
from dpstream.state.sqlite.file import connect, failed
os.setgid(65534)
os.setuid(65534)
try:
    db = connect({str(path)!r})
    try:
        db.execute("BEGIN IMMEDIATE")
    except sqlite3.Error as error:
        raise failed(error)
except DpstreamError as error:
    print(error)
"""
    with reachable(folder):
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        done = subprocess.run(
            [sys.executable, "-c", attempt], env=environment, capture_output=True, check=False
        )
    assert b"store: " in done.stdout, done.stderr
    os.chmod(path, 0o600)
    assert path.read_bytes() == before
    assert stores.identity_of(run.store, run.plan).run_id == run.run_id


@contextlib.contextmanager
def reachable(folder: Path) -> Iterator[None]:
    """Let other users come as far as a folder for a moment."""
    parents = [p for p in (folder, *folder.parents) if not p.stat().st_mode & 0o001]
    modes = [p.stat().st_mode for p in parents]
    try:
        for parent in parents:
            os.chmod(parent, 0o755)
        yield
    finally:
        for parent, mode in zip(parents, modes, strict=True):
            os.chmod(parent, mode)


@pytest.mark.parametrize("name", SYSTEMS)
def test_no_command_is_stopped_by_a_journal(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands that read and those that charge, of every system; the charge stays one."""
    system, folder = SYSTEMS[name], tmp_path / "work"
    system.make(folder)
    monkeypatch.chdir(folder)
    charged(system)
    entries = accounts.charges(system.ledger)
    assert len(entries) == 1
    for words in (*system.reads, system.charge):
        journal = leave_journal(Path(system.ledger))
        done(*words)
        assert not journal.exists() or words[0] in ("doctor", "report", "plan", "state")
    assert accounts.charges(system.ledger) == entries


def test_a_journal_on_a_disk_that_is_read_only(disk: Path) -> None:
    """It says what happened; on the same disk, writable again, the same call succeeds."""
    path = disk / "ledger.db"
    accounts.opened(path, "d").close()
    leave_journal(path)
    for option in ("ro", "rw"):
        subprocess.run(["mount", "-o", f"remount,{option}", str(disk)], check=True)
        if option == "ro":
            for look in (lambda: read_ledger(path), lambda: accounts.opened(path, "d")):
                with pytest.raises(UsageError, match="journal cannot be rolled back") as caught:
                    look()
                assert caught.value.field == "account.path"
    assert accounts.charges(path) == []


#: What is made for its owner alone, by the beginnings of names below the folder.
PRIVATE = (
    "book", "ledger.db", "state", "dead_letter", "small.table", "noise.secret", "cache", "job.db",
    "small.names", "s.db",
)  # fmt: skip


@pytest.mark.parametrize("name", SYSTEMS)
def test_nothing_is_open_to_others(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system, folder = SYSTEMS[name], tmp_path / "work"
    old = os.umask(0)
    try:
        system.make(folder)
        # The account is made by the program, as `dpstream account create` does; all else is ours.
        mine = {path for path in folder.rglob("*") if path.name != "ledger.db"}
        monkeypatch.chdir(folder)
        charged(system)
        for words in system.reads:
            done(*words)
    finally:
        os.umask(old)
    made = [path for path in sorted(folder.rglob("*")) if path not in mine]
    assert made
    for path in made:
        mode, name = path.stat().st_mode & 0o777, path.relative_to(folder).as_posix()
        most = 0o755 if path.is_dir() else 0o644
        if name.lstrip(".").startswith(PRIVATE):
            most = 0o700 if path.is_dir() else 0o600
        assert not mode & ~most, f"{name} has mode {mode:o}"
    if system.out:
        assert Path(system.out).stat().st_mode & 0o777 == 0o755


SECONDS = 24
#: Triggers of all windows, times two shards.
STEPS = SECONDS // WINDOW * (WINDOW + LATENESS) * 2
MINUTE = [3, pytest.param(65, marks=pytest.mark.slow)]


def through(live: Live, away: Callable[[], None]) -> None:
    """The job lives through what happens after its first releases."""
    feeder, process = live.feeding(), live.run()
    wait_for(lambda: live.seen() > 1 or process.poll() is not None, 180)
    away()
    assert process.poll() is None, live.log_tail()
    live.finish("live", process)
    feeder.join()
    live.check()


@pytest.mark.parametrize("seconds", MINUTE)
def test_another_process_has_locked_the_file(seconds: float, tmp_path: Path) -> None:
    live = Growing(tmp_path / "job", SECONDS)

    def away() -> None:
        with closing(sqlite3.connect(live.folder / "s.db", isolation_level=None, timeout=60)) as db:
            db.execute("BEGIN IMMEDIATE")
            (steps,) = db.execute("SELECT count(*) FROM steps").fetchone()
            assert steps < STEPS, "the job was through before it could be disturbed"
            time.sleep(seconds)
            db.execute("ROLLBACK")

    through(live, away)


@pytest.mark.parametrize("seconds", MINUTE)
def test_spanner_cannot_be_reached(
    seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with places("spanner", tmp_path) as fresh:
        url, relay = fresh(), Relay(os.environ[emulator.HOST])
        live = Growing(tmp_path / "job", SECONDS, store=url)
        with monkeypatch.context() as patch:
            patch.setenv(emulator.HOST, relay.host)

            def away() -> None:
                relay.down()
                try:
                    assert live.seen() < STEPS // 2
                    time.sleep(seconds)
                finally:
                    relay.up()

            through(live, away)
        relay.down()
