"""F2 for input that grows: kill -9 at each commit point of a pass, and between passes."""

import functools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpstream.pipelines.jobs.job import load_job
from dpstream.pipelines.stream.run import run_job
from dpstream.state import open as stores
from tests.growing import COURSE, DAYS, arrive, place, released

ROOT = Path(__file__).parents[2]
POINTS = (
    "before commit 1", "after commit 1", "before commit_units 1", "after commit_units 2",
    "before commit_step 2", "after commit_step 1", "before write 1", "after write 1",
    "before end 1", "after end 1",
)  # fmt: skip
#: Of these every CI run kills at two, in the second pass.
QUICK = {"after commit_units 2", "before end 1"}


@pytest.fixture(autouse=True)
def closed_stores() -> Iterator[None]:
    yield
    stores.close_all()


@functools.cache
def undisturbed() -> dict[str, bytes]:
    """What a run on all files at once releases."""
    with tempfile.TemporaryDirectory() as name:
        folder = place(Path(name))
        arrive(folder, DAYS)
        run_job(load_job(folder / "dpstream.toml"))
        stores.close_all()
        return released(folder)


def attempt(folder: Path, through: str, point: str) -> int:
    """Exit code of a pass in another process."""
    command = [sys.executable, "-m", "tests.faults.pass_child", str(folder), through, point]
    return subprocess.run(command, cwd=ROOT, env=dict(os.environ), check=False).returncode


@pytest.mark.parametrize(
    "point", [p if p in QUICK else pytest.param(p, marks=pytest.mark.slow) for p in POINTS]
)
@pytest.mark.parametrize("killed", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_killed_at_a_commit_point(tmp_path: Path, killed: int, point: str) -> None:
    """The next file is there when the pass is done again: it joins after it."""
    folder = place(tmp_path)
    for number, (through, files) in enumerate(COURSE):
        arrive(folder, files)
        if number == killed:
            assert attempt(folder, through, point) == -signal.SIGKILL
            assert released(folder).items() <= undisturbed().items()
            arrive(folder, files + 1)
            if point in ("before commit 1", "after end 1"):
                (folder / "in" / f"day-{files}.parquet").unlink()  # nothing was begun, or left
        run_job(load_job(folder / "dpstream.toml"), through=through)
        stores.close_all()
    assert released(folder) == undisturbed()
