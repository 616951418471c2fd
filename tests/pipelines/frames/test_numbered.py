"""Rows get numbers that come with them, or none.

A value becomes what it is by itself, whatever stands beside it.
"""

import datetime
import decimal
from pathlib import Path
from typing import Any

import apache_beam as beam
import msgspec
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from apache_beam.utils.timestamp import Timestamp
from hypothesis import given
from hypothesis import strategies as st

import dpstream
from dpstream.accounting.errors import UsageError
from dpstream.dp_transforms.batches import OFFSET, PARTITION
from dpstream.dp_transforms.ingest.records import positions
from dpstream.pipelines.frames.numbered import (
    INSTANT,
    Gather,
    ToBatch,
    column_of,
    instants_of,
    kinds_of,
    runs,
)
from tests.pipelines.frames.rows import a_job, dicts

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


def test_stamps_are_times_as_event_times_are(tmp_path: Path) -> None:
    plan = msgspec.structs.replace(a_job(tmp_path).plan, stamp="arrived")
    row = {"user": 1, "page": "a", "seconds": 2.0, "at": _NOON, "arrived": "2024-01-02T12:00:00Z"}
    batch = ToBatch(plan, None, None)([row])
    assert batch["arrived"].equals(batch["at"]) and batch["at"].null_count == 0


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


@pytest.mark.parametrize(
    ("record_id", "given", "field"),
    [
        (False, {}, "records"), (False, {"partition": "part"}, "records"),
        (True, {"offset": "line"}, "offset"), (True, {"partition": "part"}, "offset"),
    ],
)  # fmt: skip
def test_what_nothing_numbers_is_refused(
    record_id: bool, given: dict[str, str], field: str, tmp_path: Path
) -> None:
    job = a_job(tmp_path, record_id)
    for of in (job, job.plan):
        with pytest.raises(UsageError) as error:
            dpstream.Rows(of, **given)
        assert error.value.field == field and error.value.fix


def test_the_refusal_names_every_way_to_number_rows(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        dpstream.Rows(a_job(tmp_path))
    for way in ("table.record_id", "offset=", "dpstream.ReadTable"):
        assert way in error.value.fix


def bundle(gather: Gather, elements: list[Any]) -> list[tuple[pa.RecordBatch, Any]]:
    """The batches of one bundle with their times; elements come at times that fall."""
    gather.start_bundle()
    made = [sent for number, element in enumerate(elements)
            for sent in gather.process(element, Timestamp(1_000 - number))]  # fmt: skip
    made += list(gather.finish_bundle())
    return [(getattr(sent, "value", sent), getattr(sent, "timestamp", None)) for sent in made]


def test_a_batch_is_as_early_as_its_earliest_row(tmp_path: Path) -> None:
    """So that no step that waits for one of its rows runs before it is there."""
    gather = Gather(ToBatch(a_job(tmp_path).plan, None, "id"), 20)
    sizes = [(batch.num_rows, int(at)) for batch, at in bundle(gather, dicts(50))]
    assert sizes == [(20, 981), (20, 961), (10, 951)]


ELEMENTS: dict[str, Any] = {
    "dicts": lambda rows: rows, "rows": lambda rows: [beam.Row(**row) for row in rows],
    "pandas": lambda rows: [pd.DataFrame(rows[:7]), pd.DataFrame(rows[7:])],
    "polars": lambda rows: [pl.DataFrame(rows)],
    "batches": lambda rows: pa.Table.from_pylist(rows).to_batches(),
}  # fmt: skip


@pytest.mark.parametrize("kind", ELEMENTS)
def test_every_kind_of_element_is_the_same_batch(kind: str, tmp_path: Path) -> None:
    rows, plan = dicts(60), a_job(tmp_path).plan
    gather = Gather(ToBatch(plan, "part", "line"), 25)
    made = [batch for batch, _ in bundle(gather, ELEMENTS[kind](rows))]
    placed_rows = []
    for batch in made:
        assert batch.schema.names == list(kinds_of(plan))
        partition, offset = positions(batch)
        for row, part, line in zip(batch.to_pylist(), partition, offset, strict=True):
            placed_rows.append({**row, "part": part, "line": line})
    wanted = [{name: row[name] for name in (*kinds_of(plan), "part", "line")} for row in rows]
    by = lambda row: (row["part"], row["line"])  # noqa: E731
    at = [{**row, "at": pd.Timestamp(row["at"]).tz_convert("UTC") if row["at"].tzinfo else None}
          for row in placed_rows]  # fmt: skip
    assert sorted(at, key=by) == sorted(wanted, key=by)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), max_size=20))
def test_runs_say_where_every_row_stands(places: list[tuple[int, int]]) -> None:
    partition = np.array([p for p, _ in places], np.int64)
    offset = np.array([o for _, o in places], np.int64)
    batch = pa.record_batch({"x": pa.array([0] * len(places))})
    if places:
        row_positions = positions(batch.replace_schema_metadata(runs(partition, offset)))
        assert [tuple(p) for p in np.stack(row_positions, axis=1)] == places


def test_with_a_record_id_a_bundle_cut_otherwise_is_the_same_records(tmp_path: Path) -> None:
    plan, rows = a_job(tmp_path, True).plan, dicts(40)

    def batches(elements: list[Any], size: int) -> list[Any]:
        return [batch for batch, _ in bundle(Gather(ToBatch(plan, None, None), size), elements)]

    once = batches(rows, 40)
    again = batches(rows[:13], 5) + batches(rows[13:], 9)
    assert [row for b in again for row in b.to_pylist()] == once[0].to_pylist()
    assert {b.schema.metadata[PARTITION] for b in again} == {b"0"}
    assert [int(b.schema.metadata[OFFSET]) for b in batches(rows, 15)] == [0, 15, 30]


@pytest.mark.parametrize(
    ("column", "value", "field"),
    [("line", None, "offset"), ("line", -1, "offset"), ("line", "x", "offset"),
     ("part", 1 << 31, "partition"), ("part", None, "partition")],
)  # fmt: skip
def test_rows_without_a_place_end_the_run(
    column: str, value: Any, field: str, tmp_path: Path
) -> None:
    rows = dicts(5)
    rows[3][column] = value
    with pytest.raises(UsageError) as error:
        ToBatch(a_job(tmp_path).plan, "part", "line")(rows)
    assert error.value.field == field


def test_a_dataframe_without_a_column_is_refused_by_name(tmp_path: Path) -> None:
    frame = pd.DataFrame(dicts(5)).rename(columns={"page": "pag"})
    with pytest.raises(UsageError, match="no column 'page'"):
        ToBatch(a_job(tmp_path).plan, None, "line")(frame)


def test_missing_and_mistyped_cells_are_null(tmp_path: Path) -> None:
    rows = dicts(4)
    del rows[0]["page"]
    rows[1]["user"], rows[2]["at"], rows[3]["seconds"] = "seven", "noon", None
    batch = ToBatch(a_job(tmp_path).plan, None, "id")(rows)
    nulls = {
        name: batch.column(name).is_null().to_pylist().index(True) for name in batch.schema.names
    }
    assert nulls == {"page": 0, "user": 1, "at": 2, "seconds": 3}
