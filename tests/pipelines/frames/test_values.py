"""A value becomes what it is by itself, whatever stands beside it."""

import datetime
import decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from apache_beam.utils.timestamp import Timestamp

from dpstream.pipelines.frames.values import INSTANT, column_of, instants_of

_NOON = datetime.datetime(2024, 1, 2, 12)
_EAST = datetime.timezone(datetime.timedelta(hours=5))
#: Each of them and what it is: noon of that day, or nothing.
TIMES: list[tuple[Any, bool]] = [
    (_NOON, True), (_NOON.replace(tzinfo=datetime.UTC), True),
    (_NOON.replace(hour=17, tzinfo=_EAST), True), (pd.Timestamp(_NOON), True),
    (np.datetime64("2024-01-02T12:00:00"), True), (np.datetime64("2024-01-02T12", "ns"), True),
    (Timestamp.from_rfc3339("2024-01-02T12:00:00Z"), True), ("2024-01-02T12:00:00Z", True),
    ("2024-01-02 17:00:00+05:00", True), (1704196800000000, True),
    (np.int64(1704196800000000), True), (None, False), (pd.NaT, False), (True, False),
    (1.5, False), ("noon", False), ("\ud800", False), (1 << 80, False), (object(), False),
]  # fmt: skip


def test_times_of_every_kind_are_instants_together() -> None:
    values = [value for value, _ in TIMES]
    instants = instants_of(values)
    assert instants.type == INSTANT
    noon = _NOON.replace(tzinfo=datetime.UTC)
    assert instants.to_pylist() == [noon if good else None for _, good in TIMES]


@pytest.mark.parametrize("place", range(len(TIMES)))
def test_a_time_by_itself_is_what_it_is_among_others(place: int) -> None:
    value, good = TIMES[place]
    assert instants_of([value]).null_count == (not good)
    assert (
        instants_of([value, value]).to_pylist() == instants_of([value, value, "x"]).to_pylist()[:2]
    )


@pytest.mark.parametrize(
    ("kind", "value", "becomes"),
    [
        (pa.string(), "x", "x"), (pa.string(), 7, None), (pa.int64(), "7", None),
        (pa.int64(), np.int64(7), 7), (pa.int64(), True, None), (pa.float64(), 7, 7.0),
        (pa.float64(), decimal.Decimal("7"), None), (pa.bool_(), 1, None), (pa.binary(), "x", None),
        (pa.float64(), np.float32(1.5), 1.5), (pa.int64(), 1 << 70, None),
    ],
)  # fmt: skip
def test_neighbours_decide_nothing(kind: pa.DataType, value: Any, becomes: Any) -> None:
    for around in ([], [None], ["other", 3, 2.5]):
        assert column_of([value, *around], kind).to_pylist()[0] == becomes


def test_no_values() -> None:
    assert len(instants_of([])) == 0 and len(column_of([], pa.string())) == 0
