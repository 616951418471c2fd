"""A job on a user's own rows, and the rows: each in one batch, in dicts, in DataFrames."""

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import dpstream
from dpstream.dp_transforms.batches import OFFSET, PARTITION
from tests import accounts
from tests.fixed_runs import fix_run_id

PROJECT = """
version = 1

[data_set.visits]
unit = { name = "user", type = "int" }
ACCOUNT
insecure_test_secret = "1111111111111111111111111111111111111111111111111111111111111111"

[table.visits]
path = "visits-*.parquet"
unit_column = "user"
time_column = "at"
RECORD_ID

[job.daily]
table = "visits"
key = ["page"]
aggregate.n = { kind = "count" }
aggregate.s = { kind = "sum", column = "seconds", bounds = [0, 64], grid = 1.0 }
start = "2024-01-01T00:00:00Z"
end = "2024-01-03T00:00:00Z"
window = "1d"
release_every = "12h"
budget = { epsilon = 6.0, delta = 1e-3, covers = "lifetime" }
contributions = 9
store = "s.db"
shards = 2
sink = { kind = "parquet", path = "out" }
"""
ACCOUNT = 'account = { path = "book.db", limit = { epsilon = 9.0, delta = 0.01 } }'
START = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)


def a_job(folder: Path, record_id: bool = False, more: str = "", account: str = "") -> dpstream.Job:
    """The job of a project file; ``more`` are further lines of its section."""
    folder.mkdir(exist_ok=True)
    named = 'record_id = { column = "id", type = "int" }' if record_id else ""
    text = PROJECT.replace("RECORD_ID", named).replace("ACCOUNT", account)
    accounts.write(folder / "dpstream.toml", text + more)
    fix_run_id(folder)
    return dpstream.load_job(folder / "dpstream.toml")


def dicts(rows: int = 600) -> list[dict[str, Any]]:
    """Rows with their number in all (``id``), and a partition and offset."""
    draw = np.random.default_rng(1)
    minutes = draw.integers(0, 2_800, rows)
    return [
        {"id": i, "user": int(draw.integers(0, 200)), "page": f"p{draw.integers(0, 3)}",
         "at": START + datetime.timedelta(minutes=int(minutes[i])),
         "seconds": float(draw.integers(0, 60)), "part": i % 3, "line": i // 3}
        for i in range(rows)
    ]  # fmt: skip


def batches(offsets: list[int | None]) -> list[pa.RecordBatch]:
    """The rows cut into as many batches; each says where its first row stands."""
    table = pa.Table.from_pylist(dicts()).select(["user", "page", "at", "seconds"])
    size = table.num_rows // len(offsets)
    out = []
    for number, offset in enumerate(offsets):
        [batch] = table.slice(number * size, size).combine_chunks().to_batches()
        where = {} if offset is None else {PARTITION: "0", OFFSET: str(offset)}
        out.append(batch.replace_schema_metadata(where))
    return out
