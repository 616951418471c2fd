"""F3 through the command line: ``dpstream run`` killed with -9 and started again until done."""

import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpstream.pipelines.jobs.job import load_job
from dpstream.pipelines.stream.run import run_job
from tests.faults.places import KINDS, Places, places
from tests.faults.processes import files
from tests.fixed_runs import fix_run_id
from tests.streams import START, STEP

#: Kills of each store in the longer run, most of one run, and the longest run.
KILLS, KILLS_OF_RUN, LONGEST = 15, 5, 120
WINDOWS, TRIGGERS = 8, 6
PROJECT = """
version = 1

[data_set.shop]
unit = {{ name = "user", type = "int" }}
insecure_test_secret = "{secret}"

[table.visits]
path = "in.parquet"
unit_column = "user"
time_column = "time"

[job.live]
table = "visits"
key = ["page"]
aggregate.n = {{ kind = "count" }}
aggregate.total = {{ kind = "sum", column = "value", bounds = [0, 8], grid = 0.5 }}
start = "2023-11-14T22:13:20Z"
end = "2023-11-14T22:14:08Z"
window = "6s"
release_every = "1s"
budget = {{ epsilon = 20.0, delta = 1e-2, covers = "lifetime" }}
contributions = 12
mechanism = {{ pre_threshold = 1, strategy = "blt" }}
store = "{store}"
shards = 3
sink = {{ kind = "parquet", path = "out" }}
"""


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def place(kind: str, tmp_path: Path) -> Iterator[Places]:
    with places(kind, tmp_path) as fresh:
        yield fresh


def write_job(folder: Path, store: str) -> Path:
    """A folder with a job and its input."""
    folder.mkdir()
    rng, rows = np.random.default_rng(7), 6_000
    at = np.sort(START + rng.integers(0, WINDOWS * TRIGGERS * STEP, rows))
    table = pa.table(
        {
            "user": pa.array(rng.integers(0, 2_000, rows)),
            "page": [f"p{n}" for n in rng.zipf(1.5, rows) % 50],
            "time": pa.array(at).cast(pa.timestamp("us", "UTC")),
            "value": pa.array(rng.integers(0, 17, rows) / 2),
        }
    )
    pq.write_table(table, folder / "in.parquet")
    text = PROJECT.format(secret="11" * 32, store=store)
    (folder / "dpstream.toml").write_text(text)
    fix_run_id(folder)
    return folder


def start(folder: Path) -> subprocess.Popen[bytes]:
    """The command in a process group of its own."""
    command = [sys.executable, "-m", "tests.fixed_runs"]
    with open(folder / "errors.txt", "ab") as errors:
        return subprocess.Popen(
            [*command, "run", "--quiet"],
            cwd=folder, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        )  # fmt: skip


def killed(folder: Path, until: Callable[[], bool]) -> bool:
    """Start the command, kill its whole group when a moment has come; whether it was in time."""
    process = start(folder)
    while process.poll() is None and not until():
        time.sleep(0.002)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


def finish(folder: Path) -> float:
    """Run the command to its end; returns the seconds it took."""
    began = time.monotonic()
    assert start(folder).wait(LONGEST) == 0, (folder / "errors.txt").read_text()
    return time.monotonic() - began


@functools.cache
def undisturbed() -> dict[str, bytes]:
    """Files of a run that nothing happens to, on SQLite and in this process."""
    with tempfile.TemporaryDirectory() as folder:
        here = write_job(Path(folder) / "job", "s.db")
        run_job(load_job(here / "dpstream.toml"))
        out = published(here)
    assert len(out) == WINDOWS * TRIGGERS and len(set(map(len, out.values()))) > 4
    return out


def published(folder: Path) -> dict[str, bytes]:
    """The releases that a job's folder shows (the manifest beside them names each begin)."""
    return {name: data for name, data in files(folder / "out").items() if "/" in name}


def seen(folder: Path) -> int:
    return len(list((folder / "out").glob("window-*/trigger-*")))


@pytest.mark.parametrize(
    "kind", [pytest.param("sqlite", marks=pytest.mark.slow), "spanner"], indirect=True
)
def test_the_command_is_killed_in_the_middle(tmp_path: Path, place: Places) -> None:
    """Between its first release and its last."""
    folder = write_job(tmp_path / "job", place())
    assert killed(folder, lambda: seen(folder) > 0)
    assert len(published(folder)) < WINDOWS * TRIGGERS
    finish(folder)
    assert published(folder) == undisturbed()


def reached(folder: Path, end: float | None, releases: int) -> bool:
    """Whether it is late enough, or that many releases are there."""
    return seen(folder) >= releases if end is None else time.monotonic() > end


@pytest.mark.slow
def test_the_command_is_killed_at_random(tmp_path: Path, kind: str, place: Places) -> None:
    rng = np.random.default_rng(5)
    expected, took = undisturbed(), finish(write_job(tmp_path / "calm", place()))
    moments: list[int] = []
    runs = 0
    while len(moments) < KILLS:
        folder = write_job(tmp_path / f"job{runs}", place())
        for n in range(int(rng.integers(2, KILLS_OF_RUN + 1))):
            before, end = seen(folder), time.monotonic() + float(rng.uniform(0.4, 1.0)) * took
            # By turns at any time, and among the releases, which come out quickly at the end.
            goal = int(rng.integers(min(before, WINDOWS * TRIGGERS - 1), WINDOWS * TRIGGERS)) + 1
            later = functools.partial(reached, folder, end if n % 2 else None, goal)
            if killed(folder, later):
                moments.append(seen(folder))
        # Other work of the machine makes it fast and slow.
        took = finish(folder)
        assert published(folder) == expected
        runs += 1
    between = sum(0 < m < WINDOWS * TRIGGERS for m in moments)
    print(
        f"\nF3 dpstream run, {kind}: {len(moments)} kills over {runs} runs ({between} between the"
        f" first release and the last): all files as undisturbed"
    )
