"""Exact counts and the paper's errors against them, on a handful of records."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpstream.pipelines.demo import first_of_each
from tests.bench.paper.synth import DAY_MICROS, Synth
from tests.bench.paper.truth import (
    Columns,
    Scoreboard,
    Truth,
    errors,
    first_of_pair,
    load,
)

HALF = DAY_MICROS // 2


def columns() -> Columns:
    return Columns(
        pa.array(["a", "b"]), np.array([0, 1, 0], np.int32), np.array([0, 1, HALF]),
        np.array([0, 0, 1], np.int32),
    )  # fmt: skip


def test_records_are_read_in_order_of_time(tmp_path: Path) -> None:
    start = Synth().start
    time = pa.array([start + 9, start + 3]).view(pa.timestamp("us", "UTC"))
    pq.write_table(pa.table({"user": [7, 5], "key": ["x", "y"], "time": time}), tmp_path / "x")
    data = load(tmp_path / "x")
    assert data.time.tolist() == [3, 9] and data.names.take(data.key).to_pylist() == ["y", "x"]
    assert len(load(tmp_path / "x", users=False).user) == 0 and len(data) == 2


def test_counts_by_trigger_and_errors() -> None:
    truth = Truth(columns(), 2)
    assert [truth.added(t).tolist() for t in (1, 2)] == [[1, 1], [1, 0]]
    releases = pa.table({"key": ["a", "a", "b"], "trigger": [1, 2, 2], "count": [3.0, 2.0, 4.0]})
    scores = errors(truth, releases)
    assert scores == {"keys": 2, "l1": 3.0, "l2": 3.0, "linf": 3.0, "l1_average": 3.0, "updates": 3}


def test_what_cannot_be_measured() -> None:
    truth = Truth(columns(), 2)
    with pytest.raises(ValueError, match="does not occur"):
        truth.codes_of(pa.chunked_array([["z"]]))
    with pytest.raises(ValueError, match="not every trigger"):
        Scoreboard(truth).errors()


def test_first_rows() -> None:
    group = np.array([2, 1, 2, 2, 1])
    assert first_of_each(group, 2).tolist() == [True, True, True, False, True]
    user, key = np.array([0, 0, 1, 0], np.int32), np.array([5, 5, 5, 6], np.int32)
    assert first_of_pair(user, key).tolist() == [True, False, True, True]
    steps = np.array([1, 2, 2, 2], np.int32)
    assert first_of_pair(user, key, steps).all()
