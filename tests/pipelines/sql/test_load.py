"""A data set of the project file: one unit, tables that say who owns their rows."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dpstream.accounting.plan.unit import UnitIdentity
from dpstream.pipelines.project.sections import Via
from dpstream.pipelines.sql.load import catalog_of, load_catalog
from dpstream.pipelines.tables.catalog import Catalog
from tests import projects
from tests.golden.pinned import check, of_refusals, refusal
from tests.golden.refusals import Refused
from tests.pipelines.sql.shop import SHOP

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


def test_the_data_set_that_has_tables_for_statements_is_chosen(refused: Refused) -> None:
    session = {"data_set": "rides", "path": "rides.csv", "dimension": {"hour": {"type": "integer"}}}
    live = {"data_set": "dogs", "folder": "live", "unit_column": "dog"}
    sections = _changed(table__rides=session, table__live=live)
    for name in ("users", "visits", "orders", "items"):
        sections["table"][name]["data_set"] = "shop"
    sections["data_set"] |= {"rides": {}, "persons": {"unit": {"name": "person"}}, "dogs": {}}
    catalog = catalog_of(projects.of_sections(Path("/shop"), sections))
    assert catalog.ledger.data_set == "shop" and "rides" not in catalog.tables
    sections["table"]["dogs"] = {"data_set": "dogs", "path": "dogs.csv", "unit_column": "dog"}
    refused(lambda: catalog_of(projects.of_sections(Path("/shop"), sections)))
    sections["table"] = {"rides": session}
    assert (
        refusal(catalog_of, projects.of_sections(Path("/shop"), sections))
        == "UsageError --data-set"
    )


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


REFUSED: list[dict[str, Any]] = [
    {"table__users__unit_column": None},
    {"table__users__public": True},
    {"table__pages__unit_column": "uid"},
    {"data_set__shop__unit__type": "string"},
    {"table__users__unit_column": "user"},
    {"table__released": {"path": "x.csv", "public": True}},
    {"table__a-b": {"path": "x.csv", "public": True}},
    {"table__Users": SHOP["table"]["users"]},
    {"table__users__path": None},
    {"table__users__path": "users.xlsx"},
    {"table__users__uri": "sqlite:///x"},
    {"table__users__remote": "x"},
    {"table__users__path": None, "table__users__uri": "mysql://x"},
    {"table__users__columns": None},
    {"table__users__columns": {"uid": "LIST"}},
    {"table__users__columns": {"uid": "INT64", "UID": "INT64"}},
    {"table__users__columns": {"uid": "INT64", "a:b": "INT64"}},
    {"table__orders__unit_via": {"table": "nobody", "on": [["customer_id", "uid"]]}},
    {"table__orders__unit_via": {"table": "items", "on": [["order_id", "order_id"]]}},
    {"table__orders__unit_via": {"table": "depts", "on": [["customer_id", "floor"]]}},
    {"table__orders__unit_via": {"table": "users", "on": []}},
    {"table__orders__unit_via": {"table": "users", "on": [["customer_id", "dept"]]}},
    {"table__orders__unit_via": {"table": "users", "on": [["price", "score"]]}},
    {"table__orders__unit_via": {"table": "users", "on": [["nothing", "uid"]]}},
    {"table__orders__columns__uid": "INT64"},
    {"data_set__shop__unit__period": "1d"},
    {"data_set__shop__unit__name": ""},
    {"data_set__shop__account__limit": {"epsilon": 1.0, "delta": 1e-9}},
    {"data_set__shop__account__id": "no id"},
    {"data_set__shop__account": None},
    {"data_set__shop__unit": None},
    {"table": {}},
    {"table__users": {"path": "x.parquet", "unit_column": "uid"}},
]  # fmt: skip


def test_refusals(tmp_path: Path) -> None:
    """Of a file too that is none, has no Parquet where it says so, or lets nobody choose."""

    def loaded(folder: Path, changes: dict[str, Any]) -> Catalog:
        return catalog_of(projects.of_sections(folder, _changed(**changes)))

    (tmp_path / "x.parquet").write_text("no")
    calls: dict[str, Callable[[], object]] = {}
    for changes in REFUSED:
        calls[f"{changes}"] = partial(loaded, tmp_path, changes)
    contents = {"text": b"x = [", "UTF-8": b"\xff", "a small file": b"# " + b"x" * (1 << 20)}
    for name, content in contents.items():
        (tmp_path / f"{name}.toml").write_bytes(content)
        calls[f"no {name}"] = partial(load_catalog, tmp_path / f"{name}.toml")
    calls["no file"] = partial(load_catalog, tmp_path / "none.toml")
    (tmp_path / "dpstream.toml").write_text(_TEXT.replace('data_set = "other"\n', ""))
    for data_set in ("shop", "shops", None):
        calls[f"data set {data_set}"] = partial(load_catalog, tmp_path, data_set)
    text = of_refusals(calls).replace(str(tmp_path), "FOLDER")
    check(Path(__file__).with_name("catalogs.txt"), text)
