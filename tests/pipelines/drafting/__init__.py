"""Tests of first jobs, a file to draft one for, and the sections of one."""

import datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dpstream.pipelines.drafting.draft import NO_ID, NewDataSet, Target

SECRET = "s3cret-value"
#: Flags that a job needs, beside the file.
FLAGS = (
    *("--unit", "author", "--key", "path", "--time", "when"),
    *("--start", "2023-01-01", "--end", "2024-01-01", "--epsilon", "2"),
)


def commits(path: Path, rows: int = 3) -> Path:
    """A Parquet file of commits whose texts are all a secret."""
    begin = datetime.datetime(2023, 3, 5, 7, tzinfo=datetime.UTC)
    times = [begin + datetime.timedelta(days=100 * i) for i in range(rows)]
    pq.write_table(
        pa.table({
            "sha": pa.array([SECRET] * rows),
            "author": pa.array(range(rows), pa.int64()),
            "path": pa.array([SECRET] * rows).dictionary_encode(),
            "when": pa.array(times, pa.timestamp("us", "UTC")),
            "lines": pa.array([7.0, 13.0, 170.0] * rows, pa.float64())[:rows],
            "epoch": pa.array([1_700_000_000] * rows, pa.int64()),
            "nested": pa.array([{"a": SECRET}] * rows),
        }),
        path,
    )  # fmt: skip
    return path


def begun(folder: Path) -> Target:
    """Sections of a new project file, all of them called ``visits``."""
    data_set = NewDataSet("user", "visits.account.db", NO_ID, "visits.secret", (2.0, 2e-8))
    return Target(folder / "dpstream.toml", "", "visits", "visits", "visits", data_set)
