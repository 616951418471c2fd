"""Rows of BigQuery's tables: types, bytes, parts of a request, and tables that do not fit."""

from types import SimpleNamespace

import pyarrow as pa
import pytest

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.connectors.bigquery import table as module
from dpstream.pipelines.connectors.bigquery.table import (
    UPSERT,
    _misfits,
    _parts,
    _stream,
    _which,
    bigquery_type,
    message_type,
    rows_of,
)
from tests.pipelines.connectors.files.test_sink import SCHEMA, release


def test_types_and_what_has_none() -> None:
    assert bigquery_type(pa.int32()) == ("INT64", "INT64", "TYPE_INT64")
    assert bigquery_type(pa.binary(16)).sql == bigquery_type(pa.string()).sql == "STRING"
    with pytest.raises(UsageError) as error:
        bigquery_type(pa.list_(pa.int8()))
    assert error.value.field == "key"


def test_rows_are_upserts_and_the_same_for_the_same_row() -> None:
    batch = release(0, 1, ["a", "b"])
    first, second = rows_of(batch)
    assert rows_of(batch.slice(1)) == [second]
    row = message_type(SCHEMA).FromString(first)
    assert (row.key, row.trigger, row.window_start) == ("a", 1, 10**15)
    assert row.release_id == bytes(range(7, 23)).hex()
    assert getattr(row, "_CHANGE_TYPE") == UPSERT  # noqa: B009
    missing = pa.RecordBatch.from_pydict({"x": pa.array([None], pa.int64())})
    assert not message_type(missing.schema).FromString(rows_of(missing)[0]).HasField("x")


def test_no_request_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REQUEST_BYTES", 10)
    rows = [b"x" * n for n in (4, 6, 1, 20, 3)]
    parts = list(_parts(rows))
    assert parts == [rows[:2], rows[2:3], rows[3:4], rows[4:]]
    assert list(_parts([])) == []


def column(name: str, kind: str, mode: str = "NULLABLE") -> SimpleNamespace:
    def named(text: str) -> SimpleNamespace:
        return SimpleNamespace(name=text)

    return SimpleNamespace(name=name, type_=named(kind), mode=named(mode))


def test_what_hinders_a_table() -> None:
    schema = pa.schema([("key", pa.string()), ("n", pa.int64())])
    fits = [column("KEY", "STRING"), column("n", "INT64")]
    assert _misfits(schema, fits) == ""
    assert _misfits(schema, [*fits, column("more", "BOOL")]) == ""
    assert "requires a column" in _misfits(schema, [*fits, column("more", "BOOL", "REQUIRED")])
    assert _misfits(schema, fits[:1]) == "no column n"
    assert _misfits(schema, [fits[0], column("n", "STRING")]) == "n is no INT64"
    assert "key is no STRING" in _misfits(schema, [column("key", "STRING", "REPEATED"), fits[1]])


def test_names() -> None:
    assert _stream("p.d.t") == "projects/p/datasets/d/tables/t/streams/_default"
    assert (_which("p.d.t"), _which("p.d.t_seals")) == ("", "TABLE_seals ")
