"""The index of a recording: due times never fall in a piece, parts follow them across pieces."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpstream.pipelines.connectors.replay.index import (
    NEVER,
    due_times,
    index_of,
    part_at,
    recording_of,
    replay_bounds,
)
from dpstream.pipelines.jobs.job import Job

HOUR = 3_600_000_000


@pytest.mark.parametrize(
    ("least", "behind", "due"),
    [([3, 1, 2], NEVER, [1, 1, 2]), ([1, 2, 3], 2, [1, 2, 2]), ([5, NEVER], NEVER, [5, 5]),
     ([NEVER], NEVER, [0]), ([NEVER, 4], NEVER, [4, 4])],
)  # fmt: skip
def test_due_is_the_least_of_all_that_follows(
    least: list[int], behind: int, due: list[int]
) -> None:
    assert due_times(np.array(least), behind, 0).tolist() == due


@pytest.fixture
def job(make_job: Callable[..., Job], tmp_path: Path) -> Job:
    made = make_job("parquet", batch_rows=2)
    start = made.plan.timeline.start
    for name, hours in (("a", [1, 2, 8, 9]), ("b", [0, 7, 3, 30])):
        stamps = pa.array([start + h * HOUR for h in hours]).view(pa.timestamp("us", "UTC"))
        columns = {"user": ["u"] * 4, "key": ["k"] * 4, "value": [1.0] * 4, "time": stamps}
        pq.write_table(pa.table(columns), tmp_path / "in" / f"{name}.parquet")
    return made


def test_parts_are_in_the_order_of_their_due_times(job: Job) -> None:
    index, start = index_of(recording_of(job, 3600.0)), job.plan.timeline.start
    assert (np.diff(index.due) >= 0).all()
    for piece in (0, 1):  # of one piece, from front to back
        assert (np.diff(index.row[index.piece == piece]) > 0).all()
    assert index.start.tolist() == [0, *np.cumsum(index.end - index.row)[:-1].tolist()]
    end = job.plan.timeline.instant_of(job.plan.timeline.last_trigger_time)
    assert index.bounds == (start, end)  # what lies beyond the job's time is clipped
    assert replay_bounds(job) == index.bounds


def test_every_global_row_has_its_part(job: Job) -> None:
    index = index_of(recording_of(job, None))
    for row in range(index.rows):
        at = part_at(index, row)
        assert index.start[at] <= row < index.start[at] + index.end[at] - index.row[at]
