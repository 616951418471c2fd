"""A small survey: records, a job over them and workloads, as files."""

import contextlib
import json
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dpstream.accounting.workloads.workload import Workload, from_dict
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.state.ledger.events import Charge
from tests import accounts

DOMAIN = [
    {"name": "age", "edges": [0, 10, 20, 40, 65.5, 80]},
    {"name": "sex", "values": ["f", "m"]},
]
QUERIES: list[dict[str, Any]] = [
    {"factors": {"age": "range", "sex": "identity"}},
    {"weight": 2, "factors": {"age": "prefix"}},
    {"factors": {}},
]
JOB = """
version = 1

[data_set.people]
unit = {{ name = "user", type = "int" }}
account = {{ path = "ledger.db", limit = {{ epsilon = 900.0, delta = 1e-6 }} }}
insecure_test_secret = "{key}"

[table.records]
path = "records.parquet"
unit_column = "user"
time_column = "at"

[job.people]
table = "records"
key = ["sex", {{ column = "age", type = "int" }}]
aggregate.n = {{ kind = "count" }}
start = "2024-01-01T00:00:00Z"
end = "2024-01-03T00:00:00Z"
window = "1d"
release_every = "6h"
budget = {{ epsilon = {epsilon}, delta = 1e-9, covers = "lifetime" }}
contributions = 1
sink = {{ kind = "parquet", path = "releases" }}
"""
KEY = "5e" * 32


def workload(queries: list[dict[str, Any]] = QUERIES, domain: Any = None) -> Workload:
    return from_dict({"domain": domain or DOMAIN, "queries": queries})


def survey(folder: Path, rows: int = 2000, epsilon: float = 6.0, text: str = JOB) -> Job:
    """Records of one each, some outside the domain, and the project with the job."""
    rng = np.random.default_rng(7)
    age = rng.integers(-10, 180, rows) / 2.0
    at = 1_704_067_200_000_000 + rng.integers(0, 2 * 86_400, rows) * 1_000_000
    folder.mkdir(parents=True, exist_ok=True)
    table = {
        "user": np.arange(rows),
        "age": pa.array(age, mask=rng.random(rows) < 0.02),
        "sex": pa.array(rng.choice(["f", "m", "x"], rows, p=[0.5, 0.4, 0.1])),
        "at": pa.array(at).cast(pa.timestamp("us", "UTC")),
        "amount": rng.integers(0, 9, rows),
    }
    pq.write_table(pa.table(table), folder / "records.parquet")
    accounts.write(folder / "dpstream.toml", text.format(epsilon=epsilon, key=KEY))
    write(folder / "asked.json")
    return load_job(folder / "dpstream.toml", workload=True)


def write(path: Path, queries: list[dict[str, Any]] = QUERIES, domain: Any = None) -> Path:
    """A workload file."""
    path.write_text(json.dumps({"domain": domain or DOMAIN, "queries": queries}))
    return path


def exact(folder: Path, row: dict[str, Any], summed: str = "count(*)", until: str = "") -> float:
    """What one answer is of, by DuckDB, from the label of its row."""
    where = [f"records.at < '{until}'"] if until else []
    where += ["sex IN ('f', 'm')", "age >= 0", "age < 80"]
    if row["age"] != "all":
        low, high = row["age"].strip("[)").split(", ")
        where += [f"age >= {low}", f"age < {high}"]
    if row["sex"] != "all":
        where.append(f"sex = '{row['sex']}'")
    path = folder / "records.parquet"
    text = f"SELECT {summed} FROM '{path}' AS records WHERE {' AND '.join(where)}"
    [[total]] = duckdb.execute(text).fetchall()
    return float(total or 0)


def charges(folder: Path) -> list[Charge]:
    """The charges of the account."""
    with contextlib.closing(accounts.opened(folder / "ledger.db", "people")) as ledger:
        return ledger.entries()


def rows(folder: Path, out: str = "out") -> list[dict[str, Any]]:
    """The answers that a folder holds."""
    return pq.read_table(folder / out / "answers.parquet").to_pylist()
