"""Data sets with an account and a secret, for tests that ask."""

import gzip
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from dpstream.dp_transforms.noise.oneshot import OneShot
from dpstream.pipelines.ask.question import ONCE, Asking
from dpstream.pipelines.sql.ask import ask
from dpstream.pipelines.sql.load import catalog_of, load_catalog
from dpstream.pipelines.sql.receipt import SqlAnswer
from dpstream.pipelines.tables.catalog import Catalog
from dpstream.pipelines.tables.engine import Engine
from dpstream.pipelines.tables.files import Piece, files_of
from dpstream.state.ledger.events import Charge
from tests import accounts, projects

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


# A table of one file or more, read as a whole and in pieces.


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": lambda data: gzip.compress(data[:50]) + gzip.compress(data[50:]),
    ".zst": lambda data: b"".join(
        pa.Codec("zstd").compress(part).to_pybytes() for part in (data[:50], data[50:])
    ),
}
_COLUMNS = {"user": "STRING", "page": "STRING"}


def catalog(folder: Path, path: str, columns: dict[str, str] | None = None) -> Catalog:
    table = {"path": path, "unit_column": "user", "columns": columns or _COLUMNS}
    unit, secret = ("user", "string"), "00" * 32
    project = projects.of_tables(folder, unit, {"t": table}, insecure_test_secret=secret)
    return catalog_of(project)


def rows(catalog: Catalog, query: str = "SELECT * FROM t") -> list[tuple[object, ...]]:
    """The rows of the whole; those of all pieces are the same."""
    table = catalog.tables["t"]
    with Engine(catalog, ["t"]) as engine:
        all_rows = [tuple(row.values()) for row in engine.run(query).to_pylist()]
    paths, apart = files_of(table), list[tuple[object, ...]]()
    if len(paths) > 1:  # of different columns: no runner reads them
        return all_rows
    for path in paths:
        with Engine(catalog, ["t"], piece=Piece("t", path)) as engine:
            apart += [tuple(row.values()) for row in engine.run(query).to_pylist()]
    assert sorted(map(str, apart)) == sorted(map(str, all_rows))
    return all_rows


def units(catalog: Catalog) -> set[object]:
    return {row[0] for row in rows(catalog)}


def not_utf8(folder: Path, kind: pa.DataType) -> None:
    """Two files of Parquet in row groups, one with a text that is none, and a column less."""
    raw = [f"x{i}".encode() for i in range(200)]
    raw[7] = b"\xff\xfe"
    made = pa.array(raw, pa.large_binary() if pa.types.is_large_string(kind) else pa.binary())
    text = pa.string() if pa.types.is_dictionary(kind) else kind
    bad = pa.Array.from_buffers(text, 200, made.buffers())
    bad = bad.dictionary_encode() if pa.types.is_dictionary(kind) else bad
    user = [f"u{i % 20}" for i in range(200)]
    table = pa.table({"page": bad, "User": user, "k": list(range(200))})
    pq.write_table(table, folder / "a.parquet", row_group_size=30)
    pq.write_table(pa.table({"User": ["z"], "k": pa.array([7], pa.int32())}), folder / "b.parquet")
