"""What statements can name: columns, keys and places of a catalog's tables."""

from pathlib import Path
from typing import Any

import pytest
from sqlglot import exp

from dpstream.pipelines.project.sections import Via
from dpstream.pipelines.sql.load import catalog_of
from dpstream.pipelines.tables.catalog import Catalog, Table, canonical
from tests import projects
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
