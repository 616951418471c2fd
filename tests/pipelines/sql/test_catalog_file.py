"""The catalog file: strict TOML, one unit, tables that say who owns their rows."""

import copy
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpstream.accounting.errors import DpstreamError, PolicyError, UsageError
from dpstream.accounting.plan.unit import UnitIdentity
from dpstream.pipelines.sql.catalog import Via
from dpstream.pipelines.sql.catalog_file import catalog_of, load_catalog
from dpstream.pipelines.sql.columns import sql_type
from dpstream.pipelines.sql.keys import check_keys
from tests import accounts
from tests.pipelines.sql.shop import SHOP, shop

_TEXT = """
[ledger]
path = "ledger.db"
data_set = "shop"
id = "0acc0acc0acc0acc"
[unit]
name = "Customer"
type = "int"
[[table]]
name = "Customers"
path = "customers/*.parquet"
unit_column = "ID"
[[table]]
name = "orders"
uri = "sqlite:///shop.db"
remote = "Orders"
columns = { order_id = "INT64", customer_id = "int64", price = "NUMERIC" }
unit_via = { table = "customers", on = [["customer_id", "id"]] }
[[table]]
name = "countries"
path = "countries.csv.gz"
columns = { code = "STRING" }
public = true
"""


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "customers").mkdir()
    table = pa.table({"ID": pa.array([1], pa.int32()), "Name": ["x"], "tags": [["a"]]})
    pq.write_table(table, tmp_path / "customers" / "1.parquet")
    accounts.write(tmp_path / "catalog.toml", _TEXT)
    catalog = load_catalog(tmp_path / "catalog.toml")
    assert catalog.unit == UnitIdentity("Customer", "int") and catalog.unit.period is None
    assert catalog.ledger.path == str(tmp_path / "ledger.db") and catalog.ledger.unit == "Customer"
    customers, orders, countries = catalog.tables.values()
    assert (customers.name, customers.kind, customers.unit) == ("customers", "parquet", "id")
    assert customers.columns == {"id": "INT64", "name": "STRING"}  # a list has no type here
    assert orders.via == Via("customers", (("customer_id", "id"),))
    assert (orders.kind, orders.remote, orders.unit) == ("sqlite", "Orders", "customer")
    assert orders.units == ("customer", "customer_id") and customers.units == ("id",)
    assert (countries.kind, countries.unit, countries.units) == ("csv", None, ())
    assert catalog.schema["orders"]["customer"] == "INT64"
    assert "customer" not in catalog.schema["customers"]
    assert catalog.declared_keys == [("customers", ("id",))]


def _changed(**changes: Any) -> dict[str, Any]:
    """The shop with paths of it (``table__0__name``) replaced; ``None`` removes."""
    tables = copy.deepcopy(SHOP)
    for path, value in changes.items():
        *way, last = (int(part) if part.isdigit() else part for part in path.split("__"))
        at: Any = tables
        for part in way:
            at = at[part]
        if value is None:
            del at[last]
        else:
            at[last] = value
    return tables


@pytest.mark.parametrize(("changes", "field", "kind"), [
    ({"table__0__unit_column": None}, "table[0]", PolicyError),
    ({"table__0__public": True}, "table[0]", PolicyError),
    ({"table__4__unit_column": "uid"}, "table[4]", PolicyError),
    ({"unit__type": "string"}, "table[0].unit_column", PolicyError),
    ({"table__0__unit_column": "user"}, "table[0].unit_column", UsageError),
    ({"table__0__name": "a b"}, "table[0].name", UsageError),
    ({"table__0__name": "released"}, "table[0].name", UsageError),
    ({"table__0__name": "visits"}, "table[1].name", UsageError),
    ({"table__0__path": None}, "table[0]", UsageError),
    ({"table__0__path": "users.xlsx"}, "table[0].path", UsageError),
    ({"table__0__uri": "sqlite:///x"}, "table[0]", UsageError),
    ({"table__0__remote": "x"}, "table[0].remote", UsageError),
    ({"table__0__path": None, "table__0__uri": "mysql://x"}, "table[0].uri", UsageError),
    ({"table__0__columns": None}, "table[0].columns", UsageError),
    ({"table__0__columns": {"uid": "LIST"}}, "table[0].columns", UsageError),
    ({"table__0__columns": {"uid": "INT64", "UID": "INT64"}}, "table[0].columns", UsageError),
    ({"table__0__columns": {"uid": "INT64", "a b": "INT64"}}, "table[0].columns", UsageError),
    ({"table__2__unit_via": {"table": "nobody", "on": [["customer_id", "uid"]]}},
     "table[2].unit_via", UsageError),
    ({"table__2__unit_via": {"table": "items", "on": [["order_id", "order_id"]]}},
     "table[2].unit_via", UsageError),
    ({"table__2__unit_via": {"table": "depts", "on": [["customer_id", "floor"]]}},
     "table[2].unit_via", PolicyError),
    ({"table__2__unit_via": {"table": "users", "on": []}}, "table[2].unit_via.on", UsageError),
    ({"table__2__unit_via": {"table": "users", "on": [["customer_id", "dept"]]}},
     "table[2].unit_via.on", UsageError),
    ({"table__2__unit_via": {"table": "users", "on": [["price", "score"]]}},
     "table[2].unit_via.on", UsageError),
    ({"table__2__unit_via": {"table": "users", "on": [["nothing", "uid"]]}},
     "table[2].unit_via.on", UsageError),
    ({"table__2__columns__uid": "INT64"}, "table[2].unit_via", UsageError),
    ({"table__0__colums": {}}, "table[0].colums", UsageError),
    ({"unit__period": "1d"}, "unit.period", UsageError),
    ({"unit__name": ""}, "unit.name", UsageError),
    ({"ledger__unit": "person"}, "unit.name", UsageError),
    ({"ledger__limit": {"epsilon": 1.0, "delta": 1e-9}}, "account.limit", UsageError),
    ({"ledger": None}, "ledger", UsageError),
    ({"table": []}, "table", UsageError),
])  # fmt: skip
def test_refusals(changes: dict[str, Any], field: str, kind: type[DpstreamError]) -> None:
    with pytest.raises(kind) as caught:
        catalog_of(_changed(**changes), Path("/shop"))
    assert caught.value.field == field


def test_files_that_are_none(tmp_path: Path) -> None:
    for text in (None, b"x = [", b"\xff", b"# " + b"x" * (1 << 20)):
        if text is not None:
            (tmp_path / "c.toml").write_bytes(text)
        with pytest.raises(UsageError):
            load_catalog(tmp_path / "c.toml")
    (tmp_path / "x.parquet").write_text("no")
    for name in ("x.parquet", "y.parquet"):
        with pytest.raises(UsageError) as caught:
            catalog_of(_changed(table__0__path=name, table__0__columns=None), tmp_path)
        assert caught.value.field == "table[0].path"


@pytest.mark.parametrize(("kind", "name"), [
    (pa.int8(), "INT64"), (pa.uint32(), "INT64"), (pa.uint64(), "NUMERIC"),
    (pa.float32(), "FLOAT64"), (pa.decimal128(9, 2), "NUMERIC"), (pa.bool_(), "BOOL"),
    (pa.string(), "STRING"), (pa.dictionary(pa.int8(), pa.string()), "STRING"),
    (pa.binary(), "BYTES"), (pa.date32(), "DATE"), (pa.timestamp("us", "UTC"), "TIMESTAMP"),
    (pa.timestamp("us"), "DATETIME"), (pa.list_(pa.int8()), None), (pa.struct([]), None),
])  # fmt: skip
def test_types_of_arrow(kind: pa.DataType, name: str | None) -> None:
    assert sql_type(kind) == name


def test_keys_are_unique() -> None:
    catalog = shop()
    assert catalog.declared_keys == [("orders", ("order_id",)), ("users", ("uid",))]
    tables = {
        "users": [pa.record_batch({"UID": [1, 2, None]}), pa.record_batch({"UID": [3, None]})],
        "orders": [pa.record_batch({"order_id": [1, 2]}), pa.record_batch({"order_id": [3]})],
    }
    check_keys(catalog, tables.__getitem__)
    check_keys(catalog, lambda name: [])
    tables["orders"].append(pa.record_batch({"order_id": [987654321, 1]}))
    with pytest.raises(PolicyError) as caught:
        check_keys(catalog, tables.__getitem__)
    assert caught.value.field == "table orders" and "987654321" not in str(caught.value)
