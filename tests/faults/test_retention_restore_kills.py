"""kill -9 at every point of reshard, backup, restore and expire: the old store or the new one."""

import functools
import shutil
import signal
import tempfile
from pathlib import Path
from unittest import mock

import pytest

from dpstream.dp_transforms import release
from dpstream.dp_transforms.flow import run_in_memory
from dpstream.state import open as stores
from dpstream.state import transfer
from tests.faults import retention_child
from tests.faults.child import plan_of
from tests.faults.processes import finish, forkserver_context
from tests.faults.runs import calm, job, released
from tests.faults.test_store_faults import Full, redelivered, stop_at_commit

COMMANDS = ("reshard", "backup", "restore", "restore a lost one", "expire")


@functools.cache
def template() -> Path:
    """A store in the midst of a run, its shards apart, and a backup of it."""
    folder = Path(tempfile.mkdtemp())
    run = job("sticky", folder / "s.db")
    together = mock.patch.object(release, "COMMIT_STEPS", 2)
    with pytest.raises(Full), stop_at_commit(17), together:
        run_in_memory(run, redelivered(run.plan, 1))
    stores.close_all()
    transfer.backup(run.store, run.plan, folder / "b")
    stores.close_all()
    return folder


def undisturbed() -> dict[tuple[int, int], bytes]:
    return calm("sticky")


def killed(command: str, folder: Path, nth: int) -> bool:
    """Run a command in a child that dies at the nth point; False if it came to its end."""
    process = forkserver_context().Process(
        target=retention_child.attempt, args=(command, "sticky", str(folder), nth), daemon=True
    )
    process.start()
    code = finish(process)
    assert code in (0, -signal.SIGKILL)
    return code != 0


def check(command: str, folder: Path) -> None:
    """The store is the old or the new one, goes on, and drafts of the dead are no obstacle."""
    plan = plan_of("sticky")
    backup = folder / "new.backup"
    if backup.exists():
        shutil.copy(backup, folder / "b")
        retention_child.commands("sticky", folder)["restore"]()  # whole, whenever it is there
    if not (folder / "s.db").exists():
        assert command == "restore a lost one"
        retention_child.commands("sticky", folder)[command]()
    url = f"sqlite:{folder / 's.db'}"
    shards = stores.identity_of(url, plan).shards
    assert shards in ((2, 5) if command == "reshard" else (2,))
    run = job("sticky", folder / "s.db", shards)
    assert not list(folder.glob(".*"))  # whoever begins sweeps them
    assert released(run, redelivered(plan, 9)) == undisturbed()
    stores.close_all()
    if command in ("reshard", "restore") and shards == 2:
        retention_child.commands("sticky", folder)[command]()


@pytest.mark.parametrize("command", COMMANDS)
def test_killed_at_points(command: str, tmp_path: Path) -> None:
    """A few points here; every one in the longer run."""
    points(command, tmp_path, {"expire": 1, "backup": 3}.get(command, 11))


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_killed_at_every_point(command: str, tmp_path: Path) -> None:
    points(command, tmp_path, 1)


def points(command: str, folder: Path, stride: int) -> None:
    kills = 0
    for nth in range(0, 500, stride):
        case = folder / str(nth)
        shutil.copytree(template(), case)
        if command == "restore a lost one":
            (case / "s.db").unlink()
        died = killed(command, case, nth)
        check(command, case)
        if not died:
            break
        kills += 1
    assert kills >= 2
