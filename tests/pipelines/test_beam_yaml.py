"""Rows of Beam YAML as batches: a value's type decides about its own row (runs in tests/deploy)."""

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pytest
from apache_beam.utils.timestamp import Timestamp

from dpstream.pipelines.beam_yaml import TYPES, plain_type, to_batch

KINDS = {"x": pa.int64()}


@pytest.mark.parametrize(
    ("kind", "value", "becomes"),
    [
        (pa.int64(), 7, 7),
        (pa.int64(), True, None),
        (pa.int64(), 1.5, None),
        (pa.int64(), 1 << 70, None),
        (pa.int64(), np.int32(7), 7),
        (pa.float64(), 7, 7.0),
        (pa.float64(), "7", None),
        (pa.string(), "x", "x"),
        (pa.string(), b"x", None),
        (pa.bool_(), 1, None),
        (pa.string(), "\ud800", None),
    ],
)
def test_a_value_of_another_type_is_null(kind: pa.DataType, value: object, becomes: object) -> None:
    for around in ([], [None], ["other", 3, 2.5]):
        rows = [beam.Row(x=v) for v in (value, *around)]
        assert to_batch(rows, {"x": kind})["x"].to_pylist()[0] == becomes


def test_times_are_instants() -> None:
    rows = [beam.Row(x=Timestamp(micros=5)), beam.Row(x=5)]
    column = to_batch(rows, {"x": TYPES[Timestamp]})["x"]
    assert column.cast(pa.int64()).to_pylist() == [5, None]


def test_optional_types_and_numpys_are_pythons() -> None:
    from apache_beam.typehints import Optional

    assert (
        plain_type(Optional[str]) is str
        and plain_type(np.int64) is int
        and plain_type(np.float32) is float
    )
    assert plain_type(list) is list
