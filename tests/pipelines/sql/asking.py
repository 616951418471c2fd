"""Data sets with an account and a secret, for tests that ask."""

import random
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from dpstream.dp_transforms.noise.oneshot import OneShot
from dpstream.pipelines.ask.question import ONCE, Asking
from dpstream.pipelines.sql.ask import ask
from dpstream.pipelines.sql.load import load_catalog
from dpstream.pipelines.sql.receipt import SqlAnswer
from dpstream.state.ledger.events import Charge
from tests import accounts

KEY = "3f7a91c4d2e85b60718293a4b5c6d7e8f90a1b2c3d4e5f60718293a4b5c6d7e8"
PROJECT = """
version = 1
[data_set.shop]
unit = {{ name = "uid", type = "int" }}
account = {{ path = "ledger.db", limit = {{ epsilon = {epsilon}, delta = 1e-5 }} }}
secret = "file:noise.secret"
[table.visits]
path = "visits.{kind}"
unit_column = "uid"
{columns}
[table.pages]
path = "pages.csv"
public = true
columns = {{ page = "STRING", title = "STRING" }}
"""
_DECLARED = 'columns = { uid = "INT64", page = "STRING", seconds = "FLOAT64", n = "INT64" }'
OPTIONS = "epsilon = 2, delta = 1e-9, max_groups_contributed = 12"
COUNTED = "COUNT(*, contribution_bounds_per_group => (0, 30))"


#: A column of every kind but a variance.
ALL = (
    f"page, {COUNTED} AS n, SUM(seconds WITH REPORT, contribution_bounds_per_group => (0, 900)) "
    "AS s, AVG(seconds, contribution_bounds_per_row => (0, 100)) AS a, "
    "MEDIAN(seconds, contribution_bounds_per_row => (0, 100)) AS m, COUNT(DISTINCT uid) AS u"
)


FRESH = Asking(fresh=True)


def answer_to(folder: Path, text: str, how: Asking = ONCE, **more: Any) -> SqlAnswer:
    """The answer on a folder's data set."""
    return ask(load_catalog(folder), text, how, **more)


def dp(items: str, rest: str = "FROM visits GROUP BY page", options: str = OPTIONS) -> str:
    return f"SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS({options}) {items} {rest}"


def visits(rows: int = 4_000, units: int = 300, seed: int = 7) -> pa.Table:
    """Visits in eighths of a second, which are exact on every grid."""
    draw = random.Random(seed)
    uid = [draw.randrange(units) for _ in range(rows)]
    page = [f"p{min(int(draw.expovariate(0.4)), 9)}" for _ in range(rows)]
    seconds = [None if draw.random() < 0.02 else draw.randrange(800) / 8 for _ in range(rows)]
    n = [draw.randrange(-3, 9) for _ in range(rows)]
    return pa.table({"uid": uid, "page": page, "seconds": seconds, "n": n})


def data_set(
    folder: Path, table: pa.Table | None = None, kind: str = "parquet", epsilon: float = 100.0
) -> Path:
    """Files and the project file, whose path is given."""
    table = visits() if table is None else table
    if kind == "parquet":
        pq.write_table(table, folder / "visits.parquet")
    elif kind == "csv":
        pyarrow.csv.write_csv(table, folder / "visits.csv")
    else:
        con = duckdb.connect()
        con.register("t", table)
        con.execute(f"COPY t TO '{folder}/visits.jsonl' (FORMAT json)")
        con.close()
    pages = "".join(f"p{i},Title {i % 3}\n" for i in range(12))
    (folder / "pages.csv").write_text("page,title\n" + pages)
    if not (folder / "noise.secret").exists():
        (folder / "noise.secret").write_text(KEY)
        (folder / "noise.secret").chmod(0o600)
    columns = "" if kind == "parquet" else _DECLARED
    path = folder / "dpstream.toml"
    accounts.write(path, PROJECT.format(kind=kind, columns=columns, epsilon=epsilon))
    return path


def charges(folder: Path) -> list[Charge]:
    path = folder / "ledger.db"
    return accounts.charges(path)


def without_noise(monkeypatch: Any) -> None:
    """Every draw is 0."""
    for law in ("rounded_gaussian", "discrete_laplace"):
        monkeypatch.setattr(OneShot, law, lambda self, items, scale: pa_zeros(len(items)))
    monkeypatch.setattr(OneShot, "staircase", lambda self, items, *_: pa_zeros(len(items)))
    monkeypatch.setattr(
        OneShot,
        "truncated_geometric",
        lambda self, items, *_: (pa_zeros(len(items)), pa_zeros(len(items))),
    )


def pa_zeros(size: int) -> Any:
    import numpy as np

    return np.zeros(size, np.int64)
