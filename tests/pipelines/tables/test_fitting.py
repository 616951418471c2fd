"""What a catalog says of columns that is not so is refused before anything is charged."""

import contextlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpstream.accounting.errors import DpstreamError, PolicyError, RunError, UsageError
from dpstream.pipelines.formats.parquet import MAX_UNPACKED
from dpstream.pipelines.sql.ask import ask
from dpstream.pipelines.sql.load import catalog_of, load_catalog
from dpstream.pipelines.tables.catalog import Catalog
from dpstream.pipelines.tables.fitting import require_fitting
from dpstream.pipelines.tables.registration import register
from dpstream.state.sqlite.database import sqlite3
from tests import accounts, projects
from tests.pipelines.sql.asking import FRESH, KEY, charges, data_set, dp, visits
from tests.pipelines.tables.test_databases import server  # noqa: F401

_COUNT = dp("COUNT(*) AS n", "FROM visits", "epsilon = 50, delta = 1e-9")


def declared(folder: Path, columns: str) -> Catalog:
    """The data set with columns that its catalog declares."""
    path = data_set(folder)
    text = path.read_text().replace('unit_column = "uid"\n', f'unit_column = "uid"\n{columns}\n', 1)
    accounts.write(path, text)
    return load_catalog(path)


@pytest.mark.parametrize("own", ["file_row_number", "filename", "file_index", "elsewhere"])
def test_a_column_that_no_parquet_file_has_is_refused(own: str, tmp_path: Path) -> None:
    """DuckDB has some of its own: a row's number in its file depends on other units' rows."""
    columns = f'columns = {{ uid = "INT64", {own} = "INT64" }}'
    text = dp(f"SUM({own}, contribution_bounds_per_group => (0, 9)) AS n", "FROM visits")
    with pytest.raises(RunError, match="without one of its columns") as failed:
        ask(declared(tmp_path, columns), text)
    assert failed.value.field == "table visits" and charges(tmp_path) == []
    table = visits().append_column(own, visits().column("n"))
    declaration = declared(tmp_path, columns)
    pq.write_table(table, tmp_path / "visits.parquet")
    assert ask(declaration, text).charged


def test_pages_that_unpack_too_far_are_refused_before_a_charge(tmp_path: Path) -> None:
    """DuckDB would decode them whole, after the charge."""
    path = data_set(tmp_path)
    plain = tmp_path / "visits.parquet"
    long = pa.array(["x" * (1 << 20)] * ((MAX_UNPACKED >> 20) + 2))
    rows = visits().slice(0, len(long))
    at = rows.schema.get_field_index("page")
    table = rows.set_column(at, "page", long)
    pq.write_table(table, plain, compression="zstd", use_dictionary=False, write_statistics=False)
    with pytest.raises(UsageError) as refused:
        ask(load_catalog(path), _COUNT)
    assert refused.value.field == "table visits" and charges(tmp_path) == []


def test_a_header_without_a_column_is_refused_and_an_old_answer_is_not(tmp_path: Path) -> None:
    path = data_set(tmp_path, kind="csv")
    first = ask(load_catalog(path), _COUNT)
    lines = (tmp_path / "visits.csv").read_text().splitlines()
    (tmp_path / "visits.csv").write_text("\n".join(['"uid","page","seconds","m"', *lines[1:]]))
    with pytest.raises(RunError, match="without one of its columns"):
        ask(load_catalog(path), _COUNT, FRESH)
    assert len(charges(tmp_path)) == 1
    assert ask(load_catalog(path), _COUNT).receipt == first.receipt


def database(folder: Path, uri: str, key: str = "INT64", **columns: str) -> Catalog:
    """People and what they ordered, by a key."""
    tables = {
        "people": {"uri": uri, "unit_column": "uid",
                   "columns": {"uid": "INT64", "code": key, **columns}},
        "orders": {"uri": uri, "columns": {"person": key},
                   "unit_via": {"table": "people", "on": [["person", "code"]]}},
    }  # fmt: skip
    unit = ("uid", "int")
    return catalog_of(projects.of_tables(folder, unit, tables, insecure_test_secret=KEY))


def refused(catalog: Catalog) -> DpstreamError:
    """Of a question and of the owner's check alike; nothing is charged."""
    with pytest.raises(DpstreamError) as register_error:
        register(catalog)
    with pytest.raises(DpstreamError) as fitting_error:
        require_fitting(catalog, catalog.tables)
    assert (type(fitting_error.value), str(fitting_error.value)) == (
        type(register_error.value),
        str(register_error.value),
    )
    return register_error.value


def test_sqlite_types(tmp_path: Path) -> None:
    def made(columns: str) -> Catalog:
        with contextlib.closing(sqlite3.connect(tmp_path / "shop.db")) as db:
            db.executescript(
                "DROP TABLE IF EXISTS people; DROP TABLE IF EXISTS orders;"
                f"CREATE TABLE people ({columns}); CREATE TABLE orders (person)"
            )
        return database(tmp_path, "sqlite:///shop.db")

    for columns in ("UID, code", "uid INTEGER, code BIGINT", "uid, code NUMERIC"):
        require_fitting(made(columns), ["people", "orders"])
    for columns, fits in (("uid, code VARCHAR(9)", "STRING"), ("uid REAL, code", "FLOAT64")):
        error = refused(made(columns))
        assert isinstance(error, UsageError) and error.fix == f"declare it as {fits}"
        assert error.field.startswith("table people, column ")
    assert "is not there" in str(refused(made("uid, kode")))


def test_postgresql_types(server: str, tmp_path: Path) -> None:  # noqa: F811
    import adbc_driver_postgresql.dbapi as postgresql

    def made(columns: str, **declared: Any) -> Catalog:
        person = "numeric(9, 0)" if declared.get("key") else "int"
        with postgresql.connect(server) as connection, connection.cursor() as cursor:
            for text in ("DROP TABLE IF EXISTS people", "DROP TABLE IF EXISTS orders",
                         "DROP DOMAIN IF EXISTS d", "CREATE DOMAIN d AS numeric(9, 2)",
                         f"CREATE TABLE people ({columns})",
                         f"CREATE TABLE orders (person {person})"):  # fmt: skip
                cursor.execute(text)
            connection.commit()
        return database(tmp_path, server, **declared)

    key = "uid bigint, code int PRIMARY KEY"
    register(made(key))
    register(made(f"{key}, x d, y numeric, z uuid", x="NUMERIC", y="FLOAT64", z="STRING"))
    for columns, more, fits in (
        ("uid bigint, code text PRIMARY KEY", {}, "STRING"),
        ("uid bigint, code numeric PRIMARY KEY", {}, "NUMERIC"),
        ("uid varchar(9), code int PRIMARY KEY", {}, "STRING"),
        (f"{key}, x timestamp", {"x": "DATE"}, "DATETIME"),
        (f"{key}, x int", {"x": "BOOL"}, "INT64"),
    ):
        error = refused(made(columns, **more))
        assert isinstance(error, UsageError) and error.fix == f"declare it as {fits}"
    assert "is not there" in str(refused(made("uid bigint, kode int")))
    for kind, usable in (("d", True), ("numeric(9, 9)", True), ("numeric(12, 10)", False),
                         ("numeric", False), ("bigint", True)):  # fmt: skip
        catalog = made(f"uid bigint, code {kind} PRIMARY KEY", key="NUMERIC")
        if usable:
            register(catalog)
        else:
            assert isinstance(refused(catalog), PolicyError)
