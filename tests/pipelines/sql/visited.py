"""A stream of visits with public sections, for tests of statements that are stream jobs."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv

from dpstream.dp_transforms.batches import OFFSET, PARTITION
from dpstream.pipelines.connectors.files.source import batches
from dpstream.pipelines.connectors.query import query_of
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.sql.row_engine import RowEngine

#: Everything but what a statement says.
JOB = """
[source]
kind = "csv"
path = "in/*.csv"
[source.query]
table = "visits"
columns = { page = "STRING", seconds = "FLOAT64", n = "INT64", flag = "BOOL", day = "DATE" }
[[source.query.look_up]]
name = "sections"
path = "sections.csv"
key = ["page"]
columns = { page = "STRING", section = "STRING", weight = "FLOAT64" }
[schema]
unit = { column = "user" }
event_time = { column = "at" }
[time]
start = "2024-01-01T00:00:00Z"
end = "2024-01-02T00:00:00Z"
window = "1d"
trigger_every = "6h"
[privacy]
insecure_test_key = "KEY"
insecure_test_run_id = "RUN"
[sink]
kind = "parquet"
path = "releases"
""".replace("KEY", "0f" * 32).replace("RUN", "1e" * 16)
SECTIONS = "page,section,weight\np0,shop,1\np1,help,0.5\np2,shop,\np4,,2\n"
OPTIONS = "epsilon = 50, delta = 1e-6, max_rows_contributed = 8"
LOOKED_UP = (
    "s.section, COUNT(*) AS n, SUM(v.seconds / v.n, contribution_bounds_per_row => (0, 10)) AS t "
    "FROM visits AS v JOIN sections AS s ON v.page = s.page WHERE v.flag AND v.n < 5 "
    "GROUP BY s.section"
)


def dp(items: str, options: str = OPTIONS) -> str:
    return f"SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS({options}) {items}"


def rows(size: int = 600, units: int = 90, seed: int = 3) -> pa.Table:
    """Visits as text: some cells are empty or not of their type."""
    draw = random.Random(seed)
    odd = lambda good, bad: bad if draw.random() < 0.03 else good  # noqa: E731
    return pa.table({
        "user": [odd(f"u{draw.randrange(units)}", None) for _ in range(size)],
        "page": [odd(f"p{draw.randrange(6)}", None) for _ in range(size)],
        "at": [odd(f"2024-01-01T{draw.randrange(24):02}:10:00Z", "noon") for _ in range(size)],
        "seconds": [odd(str(draw.randrange(80) / 8), "NaN") for _ in range(size)],
        "n": [odd(str(draw.randrange(-2, 9)), "many") for _ in range(size)],
        "flag": [odd(draw.choice(["true", "false"]), "?") for _ in range(size)],
        "day": [odd(f"2024-01-{draw.randrange(1, 29):02}", "2024-02-31") for _ in range(size)],
    })  # fmt: skip


def folder(path: Path, job: str = JOB, table: pa.Table | None = None, files: int = 2) -> Path:
    """Files of rows, of sections and the job, whose path is given."""
    table = rows() if table is None else table
    (path / "in").mkdir(exist_ok=True)
    size = -(-table.num_rows // files)
    for i in range(files):
        options = pa.csv.WriteOptions(quoting_style="needed")
        pa.csv.write_csv(table.slice(i * size, size), path / "in" / f"{i}.csv", options)
    (path / "sections.csv").write_text(SECTIONS)
    (path / "job.toml").write_text(job)
    return path / "job.toml"


def with_text(path: Path, text: str, keys: str = "page", value: str | None = "x") -> Job:
    """The job with a query written by hand, that gives key columns and a value."""
    job = JOB.replace('table = "visits"', f'table = "visits"\ntext = """{text}"""')
    key = ", ".join(f'{{ column = "{name}" }}' for name in keys.split())
    more = [
        job.replace("event_time =", f"key = [{key}]\nevent_time ="),
        '[[aggregate]]\nname = "n"\nkind = "count"',
    ]
    if value is not None:
        more.append(f'[[aggregate]]\nname = "t"\nkind = "sum"\ncolumn = "{value}"\n'
                    "clamp = [0, 10]\ngrid = 0.125")  # fmt: skip
    text = "\n".join(more)
    text = text.replace("[privacy]", "[privacy]\nepsilon = 50\ndelta = 1e-6\ncontributions = 8")
    return load_job(folder(path, text))


def one_by_one(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """A batch cut into rows, each with its position."""
    for i in range(batch.num_rows):
        where = {PARTITION: b"0", OFFSET: str(i).encode()}
        yield batch.slice(i, 1).replace_schema_metadata(where)


def all_rows(job: Job) -> pa.RecordBatch:
    """The rows of a job's source as one batch at position 0."""
    table = pa.Table.from_batches([b.replace_schema_metadata(None) for b in batches(job)])
    batch = table.combine_chunks().to_batches()[0]
    return batch.replace_schema_metadata({PARTITION: b"0", OFFSET: b"0"})


def through(
    job: Job, row_batches: list[pa.RecordBatch], sql: str | None = None
) -> list[dict[str, Any]]:
    """What a job's query, or another text in its place, gives of batches, row after row."""
    query = query_of(job)
    with RowEngine(query if sql is None else query._replace(sql=sql)) as engine:
        return [row for batch in row_batches for row in engine(batch).to_pylist()]
