"""F9: disk full, read-only, rights lost, at every write: a clear refusal, and the store opens.

A small file system of its own (tmpfs) is filled to every degree; without the rights to mount one
the tests say so loudly.  SQLite's page limit covers every single commit.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from dpstream.accounting.errors import DpstreamError, UsageError
from dpstream.dp_transforms.flow import run_in_memory
from dpstream.dp_transforms.run import Run
from dpstream.state import open as stores
from dpstream.state import transfer
from dpstream.state.ledger.events import Charge
from dpstream.state.sqlite import file as sqlite_file
from dpstream.state.sqlite import retention as sqlite
from dpstream.state.sqlite.database import sqlite3
from dpstream.state.sqlite.store import check_file
from tests import accounts
from tests.faults.child import batches_of, plan_of
from tests.faults.runs import calm, job, released
from tests.faults.test_store_faults import redelivered
from tests.runners.engines import need, without
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
    for name in ("rounds", "public"):
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
