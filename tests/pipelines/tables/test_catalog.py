"""Catalogs: places, columns, types and owners of tables, and their digest."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sqlglot import exp

from dpstream.pipelines.project.sections import Via
from dpstream.pipelines.sql.load import catalog_of
from dpstream.pipelines.tables.catalog import (
    MAX_COLUMNS,
    Catalog,
    Table,
    canonical,
    file_columns,
    kind_of,
    sql_type,
)
from tests import projects
from tests.golden.pinned import check, of_refusals
from tests.pipelines.sql.shop import SHOP, shop
from tests.structs import changed as changed_field
from tests.structs import leaves


def changed(**account: Any) -> Catalog:
    data_set = SHOP["data_set"]["shop"]
    sections = {"shop": {**data_set, "account": {**data_set["account"], **account}}}
    return elsewhere({**SHOP, "data_set": sections})


def elsewhere(sections: dict[str, Any]) -> Catalog:
    return catalog_of(projects.of_sections(Path("/elsewhere"), sections))


def test_a_path_adds_the_unit_s_column() -> None:
    catalog = shop()
    assert catalog.schema["orders"] == catalog.tables["orders"].columns | {"uid": "INT64"}
    assert catalog.schema["users"] == catalog.tables["users"].columns
    assert catalog.types["items"]["uid"] == exp.DType.BIGINT
    assert catalog.types["visits"]["at"] == exp.DType.TIMESTAMPTZ
    assert catalog.declared_keys == [("orders", ("order_id",)), ("users", ("uid",))]


def test_a_digest_is_of_tables_and_not_of_their_place() -> None:
    one, there = shop(), elsewhere(SHOP)
    assert one.digest(SHOP["table"]) == there.digest(SHOP["table"]) and one.tables != there.tables
    more = {"n": "BOOL"}
    tables = {k: {**t, "columns": t["columns"] | more} for k, t in SHOP["table"].items()}
    other = elsewhere({**SHOP, "table": tables})
    assert all(other.digest([name]) != one.digest([name]) for name in tables)
    assert one.digest(["users"]) != one.digest(["users", "visits"]) != one.digest(["visits"])


@pytest.mark.parametrize(
    ("path", "beside", "notebook"),
    [("books/ledger.db", "/elsewhere/books", "/elsewhere/books/ledger.db.keys"),
     ("spanner://project/instance/database", "/elsewhere", "/elsewhere/database.keys")],
    ids=["file", "database"],
)  # fmt: skip
def test_notes_lie_beside_the_ledger(path: str, beside: str, notebook: str) -> None:
    catalog = changed(path=path)
    assert (str(catalog.beside), str(catalog.notebook)) == (beside, notebook)


FULL = Table(
    "orders", "postgresql", "postgresql://host/shop", {"order_id": "INT64", "day": "DATE"},
    "uid", Via("users", (("customer_id", "uid"),)), "public.orders", ("uid", "owner"),
)  # fmt: skip


def test_the_canonical_form_of_a_table_has_frozen_names() -> None:
    """Digests of catalogs and notes on keys are computed from this form: a renamed field keeps its
    name here."""
    assert canonical(FULL) == {
        "name": "orders", "kind": "postgresql", "remote": "public.orders",
        "columns": {"order_id": "INT64", "day": "DATE"}, "unit": "uid", "units": ["uid", "owner"],
        "via": {"table": "users", "on": [["customer_id", "uid"]]},
    }  # fmt: skip


@pytest.mark.parametrize("path", leaves(FULL), ids=lambda path: ".".join(map(str, path)))
def test_every_field_but_the_place_is_in_the_canonical_form(path: tuple[object, ...]) -> None:
    same = canonical(changed_field(FULL, path)) == canonical(FULL)
    assert same == (path == ("place",))


HERE = Path("/data")


@pytest.mark.parametrize(
    ("path", "uri", "expected"),
    [
        ("a.parquet", None, ("parquet", "/data/a.parquet")),
        ("a.CSV.gz", None, ("csv", "/data/a.CSV.gz")),
        ("/x/*.ndjson.zst", None, ("jsonl", "/x/*.ndjson.zst")),
        (None, "postgres://h/d", ("postgresql", "postgres://h/d")),
        (None, "sqlite:///x.db", ("sqlite", "sqlite:////data/x.db")),
        (None, "SQLite:x.db", ("sqlite", "sqlite:////data/x.db")),
        (None, "sqlite:////x/y.db", ("sqlite", "sqlite:////x/y.db")),
    ],
)
def test_kind_and_place(path: str | None, uri: str | None, expected: tuple[str, str]) -> None:
    assert kind_of("table t", path, uri, HERE) == expected


def test_declared_types_are_in_one_case() -> None:
    assert file_columns("t", "csv", "", {"Uid": "int64"}) == {"uid": "INT64"}


PLACES = [(None, None), ("a.csv", "sqlite:x"), ("a.xls", None), ("a\0.csv", None),
          (None, "mysql://h/d")]  # fmt: skip
COLUMNS: dict[str, dict[str, str] | None] = {
    "none": None, "no columns": {}, "differ in case": {"a": "INT64", "A": "INT64"},
    "a.b": {"a.b": "INT64"}, "JSON": {"a": "JSON"}, "a:b": {"a:b": "STRING"},
    "empty": {"": "INT64"},
    "a space first": {" a": "INT64"}, 'a"b': {'a"b': "INT64"}, "a`b": {"a`b": "INT64"},
    "the program's": {"Row Number": "INT64"}, "upper case": {"Ärzte": "INT64"},
    "too many": {f"c{n}": "BOOL" for n in range(MAX_COLUMNS + 1)},
}  # fmt: skip


def test_places_and_columns_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"no parquet")
    calls: dict[str, Callable[[], object]] = {
        f"{path!r} {uri!r}": partial(kind_of, "table.t", path, uri, HERE) for path, uri in PLACES
    }
    for name, declared in COLUMNS.items():
        calls[name] = partial(file_columns, "table.t", "csv", "", declared)
    for file in ("a.parquet", "none.parquet"):
        calls[file] = partial(file_columns, "table.t", "parquet", f"{tmp_path / file}", None)
    check(Path(__file__).with_name("columns.txt"), of_refusals(calls))


def test_parquet_says_its_own_types(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    columns = {
        "n": pa.array([1]),
        "list": pa.array([[1]]),
        "s": pa.array(["x"]).dictionary_encode(),
        "Bike Type": pa.array(["x"]),
        "cost €": pa.array([1]),
        "bike.type": pa.array(["x"]),  # no statement can write these four
        "Ärzte": pa.array([1]),
        "Id": pa.array([1]),
        "id": pa.array([1]),
    }
    pq.write_table(pa.table(columns), path)
    assert file_columns("t", "parquet", str(path), None) == {
        "n": "INT64", "s": "STRING", "bike type": "STRING", "cost €": "INT64",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (pa.int8(), "INT64"),
        (pa.uint64(), "NUMERIC"),
        (pa.float32(), "FLOAT64"),
        (pa.bool_(), "BOOL"),
        (pa.large_string(), "STRING"),
        (pa.binary(), "BYTES"),
        (pa.date32(), "DATE"),
        (pa.timestamp("us", "UTC"), "TIMESTAMP"),
        (pa.timestamp("us"), "DATETIME"),
        (pa.decimal128(9, 2), "NUMERIC"),
        (pa.struct([]), None),
    ],
)
def test_types_of_arrow(kind: pa.DataType, name: str | None) -> None:
    assert sql_type(kind) == name
