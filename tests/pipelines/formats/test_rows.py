"""Parts of a file: runs of consecutive rows, refused positions, text that is not UTF-8."""

import numpy as np
import pyarrow as pa
import pytest

from dpstream.pipelines.formats.rows import (
    Reason,
    Refused,
    Rows,
    after,
    refuse,
    repair_text,
    runs,
)


@pytest.mark.parametrize(
    ("offsets", "begins"),
    [([], []), ([7], [7]), ([1, 2, 3], [1]), ([1, 3], [1, 3]), ([1, 2, 5, 9, 10], [1, 5, 9])],
)
def test_runs_are_consecutive_and_together_everything(
    offsets: list[int], begins: list[int]
) -> None:
    batch = pa.RecordBatch.from_pydict({"x": pa.array(offsets, pa.int64())})
    row_runs = list(runs(np.array(offsets, np.int64), batch))
    assert [rows.offset for rows in row_runs] == begins
    for rows in row_runs:
        at = rows.batch["x"].to_pylist()
        assert at == list(range(rows.offset, rows.offset + len(at)))
    assert sum(rows.batch.num_rows for rows in row_runs) == len(offsets)


def test_what_comes_after_a_part() -> None:
    assert after(Rows(4, pa.RecordBatch.from_pydict({"x": [1, 2]}))) == 6
    assert after(Refused(np.array([4, 9]), ["empty", "empty"])) == 10
    one = refuse(3, Reason.EMPTY)
    assert (one.offsets.tolist(), one.reasons) == ([3], ["empty"])


@pytest.mark.parametrize("large", [False, True])
def test_text_that_is_not_utf8_is_null(large: bool) -> None:
    raw = pa.array(
        [b"ok", b"\xff", None, "é".encode()], pa.large_binary() if large else pa.binary()
    )
    column = raw.view(pa.large_string() if large else pa.string())
    fixed = repair_text(column)
    assert fixed.to_pylist() == ["ok", None, None, "é"] and fixed.type == column.type


def test_good_text_and_numbers_are_not_copied() -> None:
    for column in (pa.array(["a"]), pa.array([1])):
        assert repair_text(column) is column
