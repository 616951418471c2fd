"""Tables by their path or address, and the types of their columns, without a row read."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.tables.columns import MAX_COLUMNS, file_columns, kind_of, sql_type

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


@pytest.mark.parametrize(
    ("path", "uri", "field"),
    [(None, None, "table t"), ("a.csv", "sqlite:x", "table t"), ("a.xls", None, "table t.path"),
     ("a\0.csv", None, "table t.path"), (None, "mysql://h/d", "table t.uri")],
)  # fmt: skip
def test_what_is_no_place(path: str | None, uri: str | None, field: str) -> None:
    with pytest.raises(UsageError) as error:
        kind_of("table t", path, uri, HERE)
    assert error.value.field == field


def test_declared_types_are_in_one_case() -> None:
    assert file_columns("t", "csv", "", {"Uid": "int64"}) == {"uid": "INT64"}


@pytest.mark.parametrize(
    "declared",
    [None, {}, {"a": "INT64", "A": "INT64"}, {"a.b": "INT64"}, {"a": "JSON"}, {"a:b": "STRING"},
     {"": "INT64"}, {" a": "INT64"}, {'a"b': "INT64"}, {"a`b": "INT64"},
     {"Row Number": "INT64"}, {"Ärzte": "INT64"},
     {f"c{n}": "BOOL" for n in range(MAX_COLUMNS + 1)}],
)  # fmt: skip
def test_declared_types_that_cannot_be_used(declared: dict[str, str] | None) -> None:
    with pytest.raises(UsageError) as error:
        file_columns("t", "csv", "", declared)
    assert error.value.field == "t.columns"


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
    path.write_bytes(b"no parquet")
    for place in (path, tmp_path / "none.parquet"):
        with pytest.raises(UsageError) as error:
            file_columns("t", "parquet", str(place), None)
        assert error.value.field == "t.path"


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
