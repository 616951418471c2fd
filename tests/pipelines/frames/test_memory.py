"""Rows of a table stand where they stand."""

from pathlib import Path
from typing import Any

import apache_beam as beam
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from apache_beam.testing.util import assert_that

import dpstream
from dpstream.accounting.errors import UsageError
from dpstream.dp_transforms.ingest.records import positions
from tests.pipelines.frames.rows import a_job, dicts


def test_batches_are_numbered_through(tmp_path: Path) -> None:
    job, rows = a_job(tmp_path, more="batch_rows = 100\n"), dicts(250)

    def check(batches: list[pa.RecordBatch]) -> None:
        places = dict[int, Any]()
        for batch in batches:
            partition, offset = positions(batch)
            assert not partition.any()
            places |= dict(zip(offset.tolist(), batch.column("user").to_pylist(), strict=True))
        assert places == {row["id"]: row["user"] for row in rows} and len(batches) == 3

    with beam.Pipeline(runner="FnApiRunner") as p:
        assert_that(p | dpstream.ReadTable(pd.DataFrame(rows), job), check)


def test_the_identity_is_of_the_rows_in_their_order(tmp_path: Path) -> None:
    job, rows = a_job(tmp_path), dicts(50)

    def identity(data: object) -> list[bytes]:
        return dpstream.ReadTable(data, job).identity

    first = identity(pd.DataFrame(rows))
    assert identity(pd.DataFrame(rows)) == first and len(first[1]) == 16
    changed = [dict(row) for row in rows]
    changed[7]["seconds"] += 1
    others = (rows[::-1], rows[1:], changed)
    assert first not in [identity(pd.DataFrame(other)) for other in others]
    # A column that no plan reads is no part of it.
    assert identity(pd.DataFrame(rows).assign(more=1)) == first
    assert identity(pl.DataFrame(rows)) != identity(pl.DataFrame(rows[1:]))


def test_a_table_without_a_column_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="names no column 'page'"):
        dpstream.ReadTable(pd.DataFrame(dicts(3)).drop(columns="page"), a_job(tmp_path))
    with pytest.raises(UsageError, match="no table"):
        dpstream.ReadTable("visits.csv", a_job(tmp_path))


def test_no_rows_are_no_batches(tmp_path: Path) -> None:
    empty = pd.DataFrame(dicts(3)).iloc[:0]
    with beam.Pipeline(runner="FnApiRunner") as p:
        assert_that(
            p | dpstream.ReadTable(empty, a_job(tmp_path)), lambda batches: batches == [] or 1 / 0
        )
