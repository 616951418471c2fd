"""A data set of the project file: one unit, tables that say who owns their rows."""

import copy
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpstream.accounting.errors import DpstreamError, PolicyError, UsageError
from dpstream.accounting.plan.unit import UnitIdentity
from dpstream.pipelines.project.sections import Via
from dpstream.pipelines.sql.load import catalog_of, load_catalog
from dpstream.pipelines.tables.catalog import sql_type
from dpstream.pipelines.tables.registration import check_keys
from tests import projects
from tests.pipelines.sql.shop import SHOP, shop

_TEXT = """
version = 1
[data_set.shop]
unit = { name = "Customer", type = "int" }
account = { path = "ledger.db", id = "0acc0acc0acc0acc" }
[data_set.other]
unit = { name = "dog" }
[table.Customers]
data_set = "shop"
path = "customers/*.parquet"
unit_column = "ID"
[table.orders]
data_set = "shop"
uri = "sqlite:///shop.db"
remote = "Orders"
columns = { order_id = "INT64", customer_id = "int64", price = "NUMERIC" }
unit_via = { table = "customers", on = [["customer_id", "id"]] }
[table.countries]
path = "countries.txt"
format = "csv"
columns = { code = "STRING" }
public = true
[table.live]
data_set = "shop"
folder = "live"
format = "parquet"
unit_column = "ID"
time_column = "at"
[table.dogs]
data_set = "other"
path = "dogs.csv"
unit_column = "dog"
columns = { dog = "STRING" }
"""


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "customers").mkdir()
    table = pa.table({"ID": pa.array([1], pa.int32()), "Name": ["x"], "tags": [["a"]]})
    pq.write_table(table, tmp_path / "customers" / "1.parquet")
    (tmp_path / "dpstream.toml").write_text(_TEXT)
    catalog = load_catalog(tmp_path, "shop")
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
    (tmp_path / "dpstream.toml").write_text(_TEXT.replace('data_set = "other"\n', ""))
    for data_set, field in (("shop", "table.dogs.data_set"), ("shops", "--data-set")):
        with pytest.raises(UsageError) as caught:
            load_catalog(tmp_path, data_set)
        assert caught.value.field == field


def test_the_data_set_that_has_tables_for_statements_is_chosen() -> None:
    session = {"data_set": "rides", "path": "rides.csv", "dimension": {"hour": {"type": "integer"}}}
    live = {"data_set": "dogs", "folder": "live", "unit_column": "dog"}
    sections = _changed(table__rides=session, table__live=live)
    for name in ("users", "visits", "orders", "items"):
        sections["table"][name]["data_set"] = "shop"
    sections["data_set"] |= {"rides": {}, "persons": {"unit": {"name": "person"}}, "dogs": {}}
    catalog = catalog_of(projects.of_sections(Path("/shop"), sections))
    assert catalog.ledger.data_set == "shop" and "rides" not in catalog.tables
    sections["table"]["dogs"] = {"data_set": "dogs", "path": "dogs.csv", "unit_column": "dog"}
    with pytest.raises(UsageError) as caught:
        catalog_of(projects.of_sections(Path("/shop"), sections))
    assert caught.value.rule.endswith("tables for SQL: dogs, shop")
    assert "`dpstream sql --data-set dogs`" in caught.value.fix
    sections["table"] = {"rides": session}
    with pytest.raises(UsageError, match="several: dogs, persons, rides, shop"):
        catalog_of(projects.of_sections(Path("/shop"), sections))


def _changed(**changes: Any) -> dict[str, Any]:
    """The shop with paths of it (``table__users__path``) replaced; ``None`` removes."""
    tables = copy.deepcopy(SHOP)
    for path, value in changes.items():
        *way, last = path.split("__")
        at: Any = tables
        for part in way:
            at = at[part]
        if value is None:
            del at[last]
        else:
            at[last] = value
    return tables


@pytest.mark.parametrize(("changes", "field", "kind"), [
    ({"table__users__unit_column": None}, "table.users", UsageError),
    ({"table__users__public": True}, "table.users", UsageError),
    ({"table__pages__unit_column": "uid"}, "table.pages", UsageError),
    ({"data_set__shop__unit__type": "string"}, "table.users.unit_column", UsageError),
    ({"table__users__unit_column": "user"}, "table.users.unit_column", UsageError),
    ({"table__released": {"path": "x.csv", "public": True}}, "table.released", UsageError),
    ({"table__a-b": {"path": "x.csv", "public": True}}, "table.a-b", UsageError),
    ({"table__Users": SHOP["table"]["users"]}, "table.Users", UsageError),
    ({"table__users__path": None}, "table.users", UsageError),
    ({"table__users__path": "users.xlsx"}, "table.users.path", UsageError),
    ({"table__users__uri": "sqlite:///x"}, "table.users", UsageError),
    ({"table__users__remote": "x"}, "table.users.remote", UsageError),
    ({"table__users__path": None, "table__users__uri": "mysql://x"}, "table.users.uri", UsageError),
    ({"table__users__columns": None}, "table.users.columns", UsageError),
    ({"table__users__columns": {"uid": "LIST"}}, "table.users.columns", UsageError),
    ({"table__users__columns": {"uid": "INT64", "UID": "INT64"}},
     "table.users.columns", UsageError),
    ({"table__users__columns": {"uid": "INT64", "a:b": "INT64"}},
     "table.users.columns", UsageError),
    ({"table__orders__unit_via": {"table": "nobody", "on": [["customer_id", "uid"]]}},
     "table.orders.unit_via", UsageError),
    ({"table__orders__unit_via": {"table": "items", "on": [["order_id", "order_id"]]}},
     "table.orders.unit_via", UsageError),
    ({"table__orders__unit_via": {"table": "depts", "on": [["customer_id", "floor"]]}},
     "table.orders.unit_via", UsageError),
    ({"table__orders__unit_via": {"table": "users", "on": []}},
     "table.orders.unit_via.on", UsageError),
    ({"table__orders__unit_via": {"table": "users", "on": [["customer_id", "dept"]]}},
     "table.orders.unit_via.on", UsageError),
    ({"table__orders__unit_via": {"table": "users", "on": [["price", "score"]]}},
     "table.orders.unit_via.on", UsageError),
    ({"table__orders__unit_via": {"table": "users", "on": [["nothing", "uid"]]}},
     "table.orders.unit_via.on", UsageError),
    ({"table__orders__columns__uid": "INT64"}, "table.orders.unit_via", UsageError),
    ({"table__users__colums": {}}, "table.users.colums", UsageError),
    ({"data_set__shop__unit__period": "1d"}, "data_set.shop.unit.period", UsageError),
    ({"data_set__shop__unit__name": ""}, "data_set.shop.unit.name", UsageError),
    ({"data_set__shop__account__limit": {"epsilon": 1.0, "delta": 1e-9}},
     "data_set.shop.account.limit", UsageError),
    ({"data_set__shop__account__id": "no id"}, "data_set.shop.account.id", UsageError),
    ({"data_set__shop__account": None}, "data_set.shop.account", UsageError),
    ({"data_set__shop__unit": None}, "data_set.shop.unit", UsageError),
    ({"table": {}}, "data_set.shop", UsageError),
])  # fmt: skip
def test_refusals(changes: dict[str, Any], field: str, kind: type[DpstreamError]) -> None:
    with pytest.raises(kind) as caught:
        catalog_of(projects.of_sections(Path("/shop"), _changed(**changes)))
    assert caught.value.field == field


def test_files_that_are_none(tmp_path: Path) -> None:
    for text in (None, b"x = [", b"\xff", b"# " + b"x" * (1 << 20)):
        if text is not None:
            (tmp_path / "dpstream.toml").write_bytes(text)
        with pytest.raises(UsageError):
            load_catalog(tmp_path / "dpstream.toml")
    (tmp_path / "x.parquet").write_text("no")
    for name in ("x.parquet", "y.parquet"):
        with pytest.raises(UsageError) as caught:
            sections = _changed(table__users__path=name, table__users__columns=None)
            catalog_of(projects.of_sections(tmp_path, sections))
        assert caught.value.field == "table.users.path"


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
