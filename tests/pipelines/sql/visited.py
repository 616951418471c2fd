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
from dpstream.pipelines.statements.row_query import RowEngine
from tests.fixed_runs import fix_run_id

#: Everything but what a statement says.
PROJECT = """\
version = 1

[data_set.shop]
unit = { name = "user" }
insecure_test_secret = "KEY"

[table.visits]
path = "in/*.csv"
columns = { page = "STRING", seconds = "FLOAT64", n = "INT64", flag = "BOOL", day = "DATE" }
unit_column = "user"
time_column = "at"

[table.sections]
public = true
path = "sections.csv"
key_columns = ["page"]
columns = { page = "STRING", section = "STRING", weight = "FLOAT64" }

[job.daily]
table = "visits"
start = "2024-01-01T00:00:00Z"
end = "2024-01-02T00:00:00Z"
window = "1d"
release_every = "6h"
sink = { kind = "parquet", path = "releases" }
""".replace("KEY", "0f" * 32)
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


def folder(path: Path, text: str = PROJECT, table: pa.Table | None = None, files: int = 2) -> Path:
    """Files of rows, of sections and the project, whose path is given."""
    table = rows() if table is None else table
    (path / "in").mkdir(exist_ok=True)
    size = -(-table.num_rows // files)
    for i in range(files):
        options = pa.csv.WriteOptions(quoting_style="needed")
        pa.csv.write_csv(table.slice(i * size, size), path / "in" / f"{i}.csv", options)
    (path / "sections.csv").write_text(SECTIONS)
    (path / "dpstream.toml").write_text(text)
    fix_run_id(path)
    return path / "dpstream.toml"


def with_fields(*lines: str, text: str = PROJECT) -> str:
    """The project with more fields of its job."""
    return text.replace('table = "visits"\n', "\n".join(('table = "visits"', *lines, "")))


#: What a statement says of the budget, in a job that is written by hand.
BUDGET = 'budget = { epsilon = 50, delta = 1e-6, covers = "lifetime" }\ncontributions = 8'


def with_text(path: Path, text: str, keys: str = "page", value: str | None = "x") -> Job:
    """The job with a query written by hand, that gives key columns and a value."""
    aggregates = ['aggregate.n = { kind = "count" }']
    if value is not None:
        aggregates.append(
            f'aggregate.t = {{ kind = "sum", column = "{value}", bounds = [0, 10], grid = 0.125 }}'
        )
    key = ", ".join(f'"{name}"' for name in keys.split())
    (path / "live.sql").write_text(text)
    fields = ('query = "live.sql"', f"key = [{key}]", *aggregates, BUDGET)
    return load_job(folder(path, with_fields(*fields)))


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
