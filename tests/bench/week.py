"""Memory over a week of event time: a recording replayed on Prism, watched from outside.

    python -m tests.bench.week                    # a week, 100,000 rows a day
    python -m tests.bench.week --days 1 --rows 1000000               # a day in finer view

Windows and privacy periods of a day, a trigger every 15 minutes, releases as Parquet files; as
fast as it goes, so that the source is held by its backpressure.  The command runs in a process of
its own; twice a second are noted the event time that all releases have reached, the resident memory
of that process and of Prism's, and the size of the store.

The claim is that memory does not grow after the first day: the exit code is 1 when a straight
line through what follows rises by more than `ALLOWED_MIB` from the end of day 1 to the end.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.bench.common import emit, machine
from tests.runners.prism import binary

ROOT = Path(__file__).parents[2]
DAY, TRIGGER = 86_400, 900
ALLOWED_MIB = 40.0
MIB = 1 << 20
PROJECT = """
version = 1
[data_set.visits]
unit = {{ name = "user", type = "int" }}
insecure_test_secret = "{key}"
[table.visits]
path = "in/*.parquet"
unit_column = "user"
time_column = "time"
[job.pages]
table = "visits"
key = ["page"]
aggregate.n = {{ kind = "count" }}
start = "2024-01-01T00:00:00Z"
end = "2024-01-{end:02d}T00:00:00Z"
window = "1d"
release_every = "15m"
budget = {{ epsilon = 6.0, delta = 1e-9, covers = "window" }}
contributions = 8
store = "state.db"
shards = 4
sink = {{ kind = "parquet", path = "out" }}
"""


class Point(NamedTuple):
    """One look: seconds since the start, hours of event time that are released, MiB."""

    seconds: float
    hours: float
    python: float
    prism: float
    store: float


def write(folder: Path, days: int, rows: int, users: int, keys: int) -> None:
    """A recording of ``rows`` a day, a file each, in order of time; and the job."""
    (folder / "in").mkdir(parents=True)
    rng, start = np.random.default_rng(0), 1_704_067_200
    names = pa.array([f"k{n:06d}" for n in range(keys)])
    law = (np.arange(keys) + 3.0) ** -1
    for day in range(days):
        at = np.sort(rng.integers(0, DAY * 1_000_000, rows)) + (start + day * DAY) * 1_000_000
        page = rng.choice(keys, rows, p=law / law.sum())
        # Half of the users are new every day, as units and counters of periods are.
        user = rng.integers(0, users, rows) + rng.integers(0, 2, rows) * (day + 1) * users
        columns = {
            "user": pa.array(user),
            "page": names.take(pa.array(page)),
            "time": pa.array(at).cast(pa.timestamp("us", "UTC")),
        }
        pq.write_table(pa.table(columns), folder / f"in/{day}.parquet", row_group_size=20_000)
    (folder / "dpstream.toml").write_text(PROJECT.format(end=days + 1, key="0f" * 32))


def resident(pid: int) -> float:
    """MiB of a process that are in memory; 0: there is none."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


def children(pid: int) -> Iterator[int]:
    """Processes that a process has started."""
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in tasks.read_text().split():
            yield int(child)


def released_hours(out: Path) -> float:
    """Event time through which releases are there, in hours."""
    windows = sorted(out.glob("window-*"))
    if not windows:
        return 0.0
    day = int(windows[-1].name.removeprefix("window-"))
    return day * 24 + len(list(windows[-1].glob("trigger-*"))) * TRIGGER / 3_600


def watch(folder: Path, speed: float | None) -> list[Point]:
    """Run the job and look at it until it ends."""
    program = ["dpstream"] if speed is None else ["tests.paced", str(speed)]
    flags = ["--runner=PrismRunner", f"--prism_location={binary()}", "--quiet"]
    begin, points = time.monotonic(), list[Point]()
    with open(folder / "told.txt", "wb") as log_file:
        job = subprocess.Popen(
            [sys.executable, "-m", *program, "run", *flags],
            cwd=folder, stdout=log_file, stderr=log_file,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    while job.poll() is None:
        time.sleep(0.5)
        store = sum(p.stat().st_size for p in folder.glob("state.db*")) / MIB
        runner = sum(resident(child) for child in children(job.pid))
        seconds, hours = time.monotonic() - begin, released_hours(folder / "out")
        points.append(Point(seconds, hours, resident(job.pid), runner, store))
    if job.returncode:
        raise SystemExit((folder / "told.txt").read_text()[-2000:])
    return [p for p in points if p.prism > 0]


def growth(points: list[Point], days: int) -> dict[str, float]:
    """MiB by which each measure rises from the end of the first day (or quarter) to the end."""
    first = min(24.0, days * 24 / 4)
    late = [p for p in points if p.hours >= first]
    hours = np.array([p.hours for p in late])
    out = {}
    for name in ("python", "prism", "store"):
        values = np.array([getattr(p, name) for p in late])
        slope = np.polyfit(hours, values, 1)[0] if len(set(hours)) > 1 else 0.0
        out[name] = round(float(slope * (days * 24 - first)), 1)
    return out


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--days", type=int, default=7)
    parser.add_argument("--rows", type=int, default=100_000, help="a day")
    parser.add_argument("--users", type=int, default=20_000)
    parser.add_argument("--keys", type=int, default=2_000)
    parser.add_argument("--speed", type=float, help="seconds of stream a second")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, options.days, options.rows, options.users, options.keys)
        points = watch(folder, options.speed)
    rises = growth(points, options.days)
    seconds, rows = points[-1].seconds, options.rows * options.days
    peaks = {name: round(max(getattr(p, name) for p in points), 1) for name in rises}
    result = {
        "bench": "week", "days": options.days, "rows": rows, "seconds": round(seconds, 1),
        "rows_per_second": round(rows / seconds), "peak_mib": peaks, "rise_mib": rises,
        **machine(),
        "points": [[round(x, 2) for x in p] for p in points[:: max(1, len(points) // 60)]],
    }  # fmt: skip
    emit(result, options.out)
    if max(rises["python"], rises["prism"]) > ALLOWED_MIB:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
