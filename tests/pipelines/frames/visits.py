"""Tables of pandas, Polars and Arrow with the same rows, an account, and a job on such rows."""

import dataclasses
import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
from pyarrow.dataset import dataset

import dpstream
from dpstream.dp_transforms.batches import OFFSET, PARTITION
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.pipelines.frames.question import Arguments, Figure, Question, question_of
from dpstream.pipelines.jobs.secret import new_secret
from tests import accounts
from tests.fixed_runs import fix_run_id

KEY = "3f7a91c4d2e85b60718293a4b5c6d7e8f90a1b2c3d4e5f60718293a4b5c6d7e8"
DEFAULTS: dict[str, Any] = {
    "kind": "units", "unit": "user", "key": "page", "value": None, "bounds": None, "epsilon": 1.0,
    "whole_numbers": False, "at": (0.5,),
    "delta": 1e-9, "max_keys": 8, "max_rows": 5, "public_keys": None,
    "mechanism": "auto", "optimise": None, "charged": False,
}  # fmt: skip


def visits(rows: int = 3_000, users: int = 400, seed: int = 3) -> pa.Table:
    """Users, pages and seconds in eighths."""
    draw = np.random.default_rng(seed)
    pages = np.minimum(draw.exponential(2.0, rows).astype(int), 9)
    return pa.table({
        "user": draw.integers(0, users, rows),
        "page": pa.array([f"p{page}" for page in pages]),
        "seconds": draw.integers(0, 800, rows) / 8,
    })  # fmt: skip


def as_pandas(table: pa.Table) -> pd.DataFrame:
    return table.to_pandas()


def as_polars(table: pa.Table) -> pl.DataFrame:
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    return frame


LIBRARIES: dict[str, Callable[[pa.Table], Any]] = {
    "pandas": as_pandas, "polars": as_polars, "arrow": lambda table: table,
    "duckdb": duckdb.from_arrow, "data set": dataset,
}  # fmt: skip


def ring() -> KeyRing:
    return KeyRing(bytes.fromhex(KEY))


def question(data: Any, **given: Any) -> tuple[Question, dict[str, pa.ChunkedArray]]:
    arguments = {**DEFAULTS, **given}
    kind = arguments.pop("kind")
    figure = {name: arguments.pop(name) for name in ("value", "bounds", "whole_numbers", "at")}
    return question_of(data, Arguments(**{"figures": {kind: Figure(kind, **figure)}} | arguments))


def account(folder: Path, epsilon: float = 100.0) -> dict[str, Any]:
    """Arguments of a question that is charged."""
    if not (folder / "noise.secret").exists():
        new_secret(folder / "noise.secret")
    place = accounts.create(folder / "ledger.db", "visits", (epsilon, 1e-5), type_="int")
    secret = f"file:{folder / 'noise.secret'}"
    return {"account": dpstream.account(place.path, "visits", id=place.id, secret=secret)}


def with_secret(paid: dict[str, Any], secret: SecretSource) -> dict[str, Any]:
    """The same with the secret at another place."""
    return {"account": dataclasses.replace(paid["account"], secret=secret)}


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
