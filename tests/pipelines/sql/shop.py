"""A small shop that the tests of the SQL front ask about, and rows for it, ugly on purpose."""

import random
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.csv

from dpstream.dp_transforms.batches import OFFSET, PARTITION
from dpstream.pipelines.connectors.files.source import batches
from dpstream.pipelines.connectors.query import query_of
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.sql.load import catalog_of
from dpstream.pipelines.sql.query_plan import stage_one
from dpstream.pipelines.statements.row_query import RowEngine
from dpstream.pipelines.statements.statement import PrivateSelect
from dpstream.pipelines.tables.catalog import Catalog
from tests import projects
from tests.fixed_runs import fix_run_id

_KEYED = {"order_id": "INT64", "customer_id": "INT64", "day": "DATE", "price": "FLOAT64"}
#: Sections of the project file.
SHOP: dict[str, Any] = {
    "data_set": {"shop": {
        "account": {"path": "ledger.db", "id": "0acc0acc0acc0acc"},
        "unit": {"name": "uid", "type": "int"}}},
    "table": {
        "users": {"path": "users.csv", "unit_column": "uid",
         "columns": {"uid": "INT64", "dept": "STRING", "age": "INT64", "score": "FLOAT64"}},
        "visits": {"path": "visits.jsonl", "unit_column": "uid",
         "columns": {"uid": "INT64", "page": "STRING", "seconds": "FLOAT64", "at": "TIMESTAMP",
                     "day": "DATE", "cost": "NUMERIC", "flag": "BOOL", "n": "INT64"}},
        "orders": {"path": "orders.csv", "columns": _KEYED,
         "unit_via": {"table": "users", "on": [["customer_id", "uid"]]}},
        "items": {"path": "items.csv",
         "columns": {"order_id": "INT64", "line": "INT64", "product": "STRING", "qty": "INT64"},
         "unit_via": {"table": "orders", "on": [["order_id", "order_id"]]}},
        "pages": {"path": "pages.csv", "public": True,
         "columns": {"page": "STRING", "title": "STRING", "weight": "FLOAT64", "uid": "INT64"}},
        "depts": {"path": "depts.csv", "public": True, "csv": {"decimal": ","},
         "columns": {"dept": "STRING", "floor": "INT64"}},
    },
}  # fmt: skip


def shop() -> Catalog:
    """The catalog."""
    return catalog_of(projects.of_sections(Path("/shop"), SHOP))


TYPES = {
    "INT64": "BIGINT", "FLOAT64": "DOUBLE", "NUMERIC": "DECIMAL(18, 2)", "STRING": "VARCHAR",
    "BOOL": "BOOLEAN", "DATE": "DATE", "TIMESTAMP": "TIMESTAMPTZ", "DATETIME": "TIMESTAMP",
    "BYTES": "BLOB",
}  # fmt: skip
UNITS = 14
_UGLY = [0.1, 0.2, 0.3, -0.7, 1e17, -1e17, 1e300, -1e300, 0.0, -0.0, None, float("nan"),
         float("inf"), 3.25, 7.5, 1e-9]  # fmt: skip
_TEXTS = ["a", "b", "c", "7", "-3", "", None, "1e400"]
_DAYS = ["2024-01-05", "2024-02-29", "2023-12-31", None]
Rows = dict[str, list[tuple[Any, ...]]]


def ugly_rows(seed: int, size: int = 60) -> Rows:
    """Rows of every table of the shop; some have no unit, or a key that nobody has."""
    draw = random.Random(seed)
    unit = lambda: draw.choice([*range(UNITS), None])  # noqa: E731
    number = lambda: draw.choice([*range(-2, 6), None, 2**62])  # noqa: E731
    ugly, text, day = (lambda of=of: draw.choice(of) for of in (_UGLY, _TEXTS, _DAYS))
    at = lambda: draw.choice(["2024-01-05 01:02:03+00", "2024-02-01 00:00:00+00", None])  # noqa: E731
    people = [(i, text(), draw.randrange(90), ugly()) for i in range(UNITS - 2)]
    return {
        "users": [*people, (None, "a", 3, 0.5)],
        "visits": [
            (unit(), text(), ugly(), at(), day(), draw.choice(["1.25", "-3.10", None]),
             draw.choice([True, False, None]), number())
            for _ in range(size)
        ],
        "orders": [(i, draw.choice([*range(UNITS + 2), None]), day(), ugly()) for i in range(size)],
        "items": [
            (draw.randrange(size + 5), draw.randrange(5), text(), number()) for _ in range(size)
        ],
        "pages": [(t, f"title {i % 2}", ugly(), draw.randrange(UNITS))
                  for i, t in enumerate(_TEXTS)] * 2,
        "depts": [(t, i) for i, t in enumerate(_TEXTS[:5])],
    }  # fmt: skip


def of_units(rows: Rows, units: Collection[int]) -> Rows:
    """The rows of these units and the public ones.  An order is its customer's, an item its
    order's, whoever that is; rows that nobody owns go with unit -1."""
    owner = {o[0]: o[1] if any(u[0] == o[1] for u in rows["users"]) else None
             for o in rows["orders"]}  # fmt: skip
    mine = lambda unit: (-1 if unit is None else unit) in units  # noqa: E731
    return rows | {
        "users": [r for r in rows["users"] if mine(r[0])],
        "visits": [r for r in rows["visits"] if mine(r[0])],
        "orders": [r for r in rows["orders"] if mine(owner[r[0]])],
        "items": [r for r in rows["items"] if mine(owner.get(r[0]))],
    }


def database(catalog: Catalog, rows: Rows) -> duckdb.DuckDBPyConnection:
    """A database of the rows."""
    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'UTC'")
    for table in catalog.tables.values():
        columns = ", ".join(f'"{name}" {TYPES[kind]}' for name, kind in table.columns.items())
        connection.execute(f'CREATE TABLE "{table.name}" ({columns})')
        if rows[table.name]:
            marks = ", ".join("?" for _ in table.columns)
            connection.executemany(f"INSERT INTO {table.name} VALUES ({marks})", rows[table.name])
    return connection


def stage_text(select: PrivateSelect, catalog: Catalog, step: float = 0.25) -> str:
    """DuckDB's text of stage 1, with one grid for all functions (counts: whole numbers)."""
    grids = {
        f.name: (1.0, 0, 5) if f.kind == "count" else (step, -20, 40) for f in select.functions
    }
    return str(stage_one(select, catalog, grids).sql("duckdb"))


def answers(connection: duckdb.DuckDBPyConnection, text: str) -> list[str]:
    """The rows of a query as texts in order: equal texts are equal to the bit."""
    return sorted(repr(row) for row in connection.execute(text).fetchall())


# A stream of visits with public sections, for tests of statements that are stream jobs.


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
