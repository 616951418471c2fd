"""DuckDB behind its lock: what it refuses by itself, what a table becomes, how errors look."""

import decimal
import traceback
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpstream.accounting.errors import DpstreamError, RunError
from dpstream.pipelines.sql.load import catalog_of, load_catalog
from dpstream.pipelines.statements.statement import statement_of
from dpstream.pipelines.tables.catalog import Catalog
from dpstream.pipelines.tables.engine import Engine
from tests import projects
from tests.pipelines.sql.asking import data_set

_FORBIDDEN = [
    "ATTACH '{folder}/other.db'",
    "COPY (SELECT 1) TO '{folder}/out.csv'",
    "COPY visits TO '{folder}/out.csv'",
    "PRAGMA threads = 4",
    "SET enable_external_access = true",
    "SET lock_configuration = false",
    "RESET allowed_paths",
    "INSTALL httpfs",
    "LOAD httpfs",
    "EXPORT DATABASE '{folder}/out'",
    "SELECT * FROM '{folder}/secret.csv'",
    "SELECT * FROM read_csv('{folder}/secret.csv')",
    "SELECT * FROM read_parquet('{folder}/*.parquet')",
    "SELECT * FROM read_text('{folder}/noise.secret')",
    "SELECT * FROM glob('{folder}/*')",
    "SELECT * FROM local_table",
    "CREATE SECRET s (TYPE http)",
]


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    (tmp_path / "secret.csv").write_text("a\n1\n")
    return load_catalog(data_set(tmp_path))


@pytest.mark.parametrize("text", _FORBIDDEN)
def test_the_engine_itself_refuses(text: str, catalog: Catalog, tmp_path: Path) -> None:
    local_table = pa.table({"a": [1]})  # not found through Python either
    before = sorted(p.name for p in tmp_path.iterdir())
    with Engine(catalog, ["visits"]) as engine:
        assert engine.run("SELECT COUNT(*) AS n FROM visits")["n"][0].as_py() == 4_000
        with pytest.raises(RunError):
            engine.run(text.format(folder=tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir()) == before and local_table.num_rows == 1


@pytest.mark.parametrize("text", _FORBIDDEN)
def test_the_parser_refuses(text: str, catalog: Catalog, tmp_path: Path) -> None:
    with pytest.raises(DpstreamError):
        statement_of(text.format(folder=tmp_path), catalog)


def test_errors_say_nothing_of_the_rows(catalog: Catalog) -> None:
    with Engine(catalog, ["visits"]) as engine, pytest.raises(RunError) as failed:
        engine.run("SELECT CAST(page AS BIGINT) FROM visits")
    text = "".join(traceback.format_exception(failed.value))
    assert "p0" not in text and "duckdb." not in text.lower().split("raise found")[-1]
    assert failed.value.__cause__ is None and failed.value.__suppress_context__


def test_only_the_named_tables_are_there(catalog: Catalog) -> None:
    with Engine(catalog, ["pages"]) as engine, pytest.raises(RunError):
        engine.run("SELECT * FROM visits")


def test_empty_tables_have_the_types_of_the_full_ones(catalog: Catalog) -> None:
    with Engine(catalog, ["visits"]) as full, Engine(catalog, ["visits"], empty=True) as empty:
        query = "SELECT * FROM visits"
        assert full.run(query).schema == empty.run(query).schema
        assert empty.run(query).num_rows == 0 and full.rows == 4_000


def _types(folder: Path, file: str, columns: dict[str, str]) -> Catalog:
    table = {"path": file, "unit_column": "u", "columns": columns}
    return catalog_of(projects.of_tables(folder, ("u", "string"), {"t": table}))


def test_columns_have_the_catalog_s_types_and_misfits_are_null(tmp_path: Path) -> None:
    columns = {"u": "STRING", "i": "INT64", "f": "FLOAT64", "d": "NUMERIC", "b": "BOOL",
               "y": "DATE", "t": "TIMESTAMP", "l": "DATETIME"}  # fmt: skip
    (tmp_path / "t.csv").write_text(
        "T,U,i,f,d,b,y,l\n"  # in another order, and case
        "2024-01-05 01:02:03+01,e\u0301,5,2.5,1.25,true,2024-01-05,2024-01-05 01:02:03\n"
        "x,\u00e9,5.x,z,q,maybe,31st,noon\n"
    )
    with Engine(_types(tmp_path, "t.csv", columns), ["t"]) as engine:
        first, second = engine.run("SELECT * FROM t ORDER BY i NULLS LAST").to_pylist()
    assert first["u"] == second["u"] == "\u00e9"  # one unit in both spellings
    assert (first["i"], first["f"], first["d"]) == (5, 2.5, decimal.Decimal("1.25"))
    assert str(first["t"]) == "2024-01-05 00:02:03+00:00" and first["b"] is True
    assert [second[c] for c in "ifdbytl"] == [None] * 7


def test_parquet_decimals_keep_their_width(tmp_path: Path) -> None:
    price = pa.array([decimal.Decimal("1.25")], pa.decimal128(10, 2))
    pq.write_table(pa.table({"U": ["a"], "d": price}), tmp_path / "t.parquet")
    with Engine(_types(tmp_path, "t.parquet", {"u": "STRING", "d": "NUMERIC"}), ["t"]) as engine:
        assert engine.run("SELECT d FROM t").schema.field("d").type == pa.decimal128(10, 2)


def test_given_rows_take_the_place_of_files(catalog: Catalog) -> None:
    """What is not given is NULL of its type, and no file is read."""
    visits = pa.table({"uid": pa.array([1, 2]), "page": ["a", None]})
    with Engine(catalog, ["visits", "pages"], rows={"visits": visits, "pages": None}) as engine:
        rows = engine.run("SELECT * FROM visits")
        assert rows.to_pylist() == [
            {"uid": 1, "page": "a", "seconds": None, "n": None},
            {"uid": 2, "page": None, "seconds": None, "n": None},
        ]
        assert engine.run("SELECT * FROM pages").num_rows == 0
        with pytest.raises(RunError):
            engine.run(f"SELECT * FROM '{catalog.tables['visits'].place}'")
    with Engine(catalog, ["visits"], empty=True) as empty:
        assert empty.run("SELECT * FROM visits").schema == rows.schema


@pytest.mark.parametrize("kind", ["INT64", "FLOAT64", "NUMERIC", "BOOL", "DATE", "TIMESTAMP"])
def test_a_value_of_another_type_is_null_and_its_row_stays(kind: str, tmp_path: Path) -> None:
    """A cast that DuckDB moves into its reader of CSV would drop the row."""
    data_set(tmp_path)
    (tmp_path / "t.csv").write_text("page,v\na,zz\nb,2024-02-31\nc,\n")
    table = {"path": "t.csv", "public": True, "columns": {"page": "STRING", "v": kind}}
    tables = {"t": table, "s": {**table, "columns": {"page": "STRING", "v": "STRING"}}}
    project = projects.of_tables(tmp_path, ("uid", "int"), tables)
    with Engine(catalog_of(project), ["t", "s"], ordered=True) as engine:
        assert engine.run("SELECT v FROM t").column("v").to_pylist() == [None, None, None]
        own = engine.run("SELECT TRY_CAST(v AS DATE) AS v FROM s").column("v").to_pylist()
    assert own == [None, None, None]
