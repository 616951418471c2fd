"""A small shop that the tests of the SQL front ask about, and rows for it, ugly on purpose."""

import random
from collections.abc import Collection
from pathlib import Path
from typing import Any

import duckdb

from dpstream.pipelines.sql.load import catalog_of
from dpstream.pipelines.sql.query_plan import stage_one
from dpstream.pipelines.statements.statement import PrivateSelect
from dpstream.pipelines.tables.catalog import Catalog
from tests import projects

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
        "depts": {"path": "depts.csv", "public": True,
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
