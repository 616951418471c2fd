"""Columns of whatever table somebody has, or an error that says what to do and quotes no value."""

import datetime
import decimal
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.frames.table import check_numbers, columns_of, kind_of
from tests.pipelines.frames.visits import LIBRARIES, as_pandas, as_polars, visits

SECRET = "alice@example.org"


@pytest.mark.parametrize("library", LIBRARIES)
def test_columns_of_each_library_are_the_same(library: str) -> None:
    table = visits()
    columns = columns_of(LIBRARIES[library](table), {"unit": ["user"], "key": ["page"]})
    assert list(columns) == ["user", "page"]
    assert columns["user"].to_pylist() == table.column("user").to_pylist()
    assert columns["page"].cast(pa.string()).to_pylist() == table.column("page").to_pylist()


def test_other_columns_are_not_looked_at() -> None:
    data = as_pandas(visits(100)).assign(what=[object()] * 100)
    data.index = pd.Index([object() for _ in range(100)])
    assert len(columns_of(data, {"key": ["page"]})["page"]) == 100


def test_batches_readers_and_streams_are_tables() -> None:
    table = visits(50)
    [batch] = table.combine_chunks().to_batches()
    for data in (
        batch,
        table.to_reader(),
        pa.RecordBatchReader.from_batches(table.schema, [batch]),
    ):
        assert columns_of(data, {"key": ["page"]})["page"].to_pylist() == table["page"].to_pylist()


@pytest.mark.parametrize(
    ("data", "fix"),
    [
        ("visits.csv", "read_table"), (None, "DataFrame"), ({"user": [1]}, "pyarrow.table"),
        ([1], "DataFrame"), (as_polars(visits(5)).lazy(), "collect()"),
        (as_pandas(visits(5))["user"], "DataFrame"), (pl.Series([1]), "DataFrame"),
        (pa.array([1]), "DataFrame"),
    ],
)  # fmt: skip
def test_what_is_no_table_is_refused(data: Any, fix: str) -> None:
    with pytest.raises(UsageError, match="data: is n") as error:
        columns_of(data, {"unit": ["user"]})
    assert fix in error.value.fix


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_column_that_is_not_there_is_named_with_the_one_that_is_meant(library: str) -> None:
    with pytest.raises(UsageError) as error:
        columns_of(LIBRARIES[library](visits(5)), {"key": ["pag"]})
    assert error.value.field == "key" and "did you mean 'page'" in error.value.fix


def test_names_of_columns_that_may_be_values_are_not_told() -> None:
    data = pd.DataFrame({"user": [SECRET, "b"], "page": [SECRET, "c"], "n": [1, 2]})
    with pytest.raises(UsageError, match="names no column 'user'") as error:
        columns_of(data.pivot_table(index="user", columns="page", values="n"), {"unit": ["user"]})
    assert SECRET not in str(error.value) and "reset_index" in error.value.fix


def test_a_column_that_is_there_twice_is_refused() -> None:
    data = pd.DataFrame([[1, 2]], columns=["user", "user"])
    with pytest.raises(UsageError, match="twice"):
        columns_of(data, {"unit": ["user"]})


def test_values_of_several_types_are_refused_without_being_quoted() -> None:
    data = pd.DataFrame({"user": [1, SECRET], "page": ["a", "b"]})
    with pytest.raises(UsageError) as error:
        columns_of(data, {"unit": ["user"], "key": ["page"]})
    assert error.value.field == "unit" and SECRET not in str(error.value)
    assert error.value.__context__ is None or SECRET not in str(error.value.__context__)


@pytest.mark.parametrize(
    "other",
    [b"b", decimal.Decimal("1E+40"), datetime.date(2024, 1, 1), 7, 2.5, True, SECRET.encode()],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["object", "category"])
def test_a_row_of_a_pandas_column_of_objects_does_not_decide_its_type(
    other: Any, dtype: str
) -> None:
    """Bytes among texts would make bytes of all, whose spellings are not made one."""
    texts = ["a", "e\u0301", None]
    data = pd.DataFrame({"user": pd.Series(texts, dtype="object").astype(dtype)})
    columns = columns_of(data, {"unit": ["user"]})
    assert columns["user"].cast(pa.string()).to_pylist() == texts
    alone = [[other], [other, None]] if dtype == "object" else []  # pandas types its categories
    for values in ([*texts, other], [other, *texts], *alone):
        data = pd.DataFrame({"user": pd.Series(values, dtype="object").astype(dtype)})
        with pytest.raises(UsageError) as error:
            columns_of(data, {"unit": ["user"]})
        assert error.value.field == "unit" and SECRET not in str(error.value)


def test_objects_of_polars_are_refused_not_their_addresses() -> None:
    data = pl.DataFrame({"user": [1], "page": pl.Series([object()], dtype=pl.Object)})
    with pytest.raises(UsageError, match="does not know"):
        columns_of(data, {"key": ["page"]})


def test_names_that_are_no_text_are_no_trouble() -> None:
    data = pd.DataFrame([[1, "a", 2]], columns=["user", "page", 7])
    with pytest.raises(UsageError, match="names no column 'x'"):
        columns_of(data, {"unit": ["x"]})


@pytest.mark.parametrize(
    ("kind", "identity_type"),
    [
        (pa.string(), "string"), (pa.large_string(), "string"), (pa.string_view(), "string"),
        (pa.null(), "string"), (pa.dictionary(pa.int32(), pa.string()), "string"),
        (pa.binary(4), "bytes"), (pa.uint8(), "int"), (pa.bool_(), "bool"), (pa.date32(), "date"),
        (pa.timestamp("ns", "UTC"), "timestamp"), (pa.decimal128(9, 2), "decimal"),
    ],
)  # fmt: skip
def test_kinds_of_identities(kind: pa.DataType, identity_type: str) -> None:
    assert kind_of("key", kind) == identity_type


def test_floats_and_nested_values_are_no_identities() -> None:
    with pytest.raises(UsageError, match="Int64"):
        kind_of("unit", pa.float64())
    with pytest.raises(UsageError) as error:
        kind_of("key", pa.struct([("alice", pa.int8())]))
    assert "alice" not in str(error.value) and "struct" in error.value.rule


def test_numbers_are_numbers() -> None:
    for kind in (pa.int8(), pa.float32(), pa.decimal128(5, 1), pa.null()):
        check_numbers("value", kind)
    for kind in (pa.string(), pa.bool_(), pa.timestamp("s")):
        with pytest.raises(UsageError, match="not of numbers"):
            check_numbers("value", kind)


def test_polars_kinds() -> None:
    data = pl.DataFrame({
        "day": [datetime.date(2024, 1, 1)], "sum": [decimal.Decimal("1.5")], "ok": [True],
    })  # fmt: skip
    columns = columns_of(data, {"key": ["day", "sum", "ok"]})
    assert [kind_of("key", columns[name].type) for name in data.columns] == [
        "date",
        "decimal",
        "bool",
    ]
