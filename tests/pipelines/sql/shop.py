"""A small shop: the data set that the tests of the SQL front ask about."""

from pathlib import Path
from typing import Any

from dpstream.pipelines.sql.load import catalog_of
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
