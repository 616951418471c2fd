"""A job on files that join it, day by day; shared by the tests of passes and of their faults."""

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from tests.fixed_runs import fix_run_id

DAYS = 4
DAY = 86_400_000_000
START = 1_704_067_200_000_000  # 2024-01-01
JOB = """
version = 1

[data_set.shop]
unit = { name = "user", type = "int" }
insecure_test_secret = "1111111111111111111111111111111111111111111111111111111111111111"

[table.visits]
path = "in/*.KIND"
unit_column = "user"
time_column = "at"

[job.daily]
table = "visits"
key = ["page"]
aggregate.visits = { kind = "count" }
aggregate.spent = { kind = "sum", column = "amount", bounds = [0, 10] }
start = "2024-01-01T00:00:00Z"
end = "2024-01-05T00:00:00Z"
window = "1d"
release_every = "6h"
allowed_lateness = "LATE"
budget = { epsilon = 20.0, delta = 1e-2, covers = "lifetime" }
contributions = 9
store = "s.db"
shards = 3
sink = { kind = "parquet", path = "out" }
"""
#: (instant that a pass releases through, files that are there by then) of the usual course.
COURSE = (("2024-01-02", 1), ("2024-01-03", 2), ("2024-01-04", 3), ("end", 4))


def day(number: int, begin: float = 0.0, end: float = 1.0, rows: int = 1_500) -> pa.Table:
    """Records of a day, or of a part of it counted in days from its midnight."""
    rng = np.random.default_rng(number)
    at = START + np.sort(rng.integers(int(begin * DAY), int(end * DAY), rows)) + number * DAY
    return pa.table(
        {
            "user": rng.integers(0, 400, rows),
            "page": [f"p{n}" for n in rng.zipf(1.5, rows) % 40],
            "at": pa.array(at).cast(pa.timestamp("us", "UTC")),
            "amount": rng.integers(0, 12, rows).astype(np.float64),
        }
    )


def write(folder: Path, name: str, table: pa.Table) -> None:
    """A file of the source, of the kind its name says."""
    path = folder / "in" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=600)
    else:
        pacsv.write_csv(table, path)


def place(folder: Path, kind: str = "parquet", late: str = "0s") -> Path:
    """A folder with the job, all days in ``all/`` and none in ``in/`` yet."""
    (folder / "in").mkdir(parents=True, exist_ok=True)
    (folder / "dpstream.toml").write_text(JOB.replace("KIND", kind).replace("LATE", late))
    fix_run_id(folder)
    for number in range(DAYS):
        # Every other file holds some of the next day, as exports do.
        write(folder, f"day-{number}.{kind}", day(number, 0.0, 1.0 if number % 2 else 1.2))
    (folder / "in").rename(folder / "all")
    (folder / "in").mkdir()
    return folder


def arrive(folder: Path, files: int) -> None:
    """The first so many files are there."""
    for path in sorted((folder / "all").iterdir())[:files]:
        if not (folder / "in" / path.name).exists():
            shutil.copy(path, folder / "in" / path.name)


def released(folder: Path) -> dict[str, bytes]:
    """The releases, by name."""
    out = folder / "out"
    return {p.relative_to(out).as_posix(): p.read_bytes() for p in out.glob("window-*/*")}
