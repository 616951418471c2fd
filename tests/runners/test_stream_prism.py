"""Files as a stream on Prism: every row once, and at a speed by the tests' own reader."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dpstream.pipelines.connectors.files.stream import StreamFiles
from dpstream.pipelines.jobs.job import Job
from tests.drive import letters_of, rows_of
from tests.paced import Paced, paced
from tests.pipelines.conftest import make_job
from tests.pipelines.connectors.files.test_stream import (
    SECOND,
    START,
    bounded,
    messy,
    table,
    write,
)
from tests.runners.prism import running, wait_for

MakeJob = Callable[..., Job]
__all__ = ["make_job"]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_the_rows_of_the_bounded_source(tmp_path: Path, make_job: MakeJob, kind: str) -> None:
    job = make_job(kind, batch_rows=100)
    messy(tmp_path / "in", kind)
    with running(StreamFiles(job)) as (seen, result):
        result.wait_until_finish()
        outputs = rows_of(seen.batches()), letters_of(seen.batches("dead"))
    assert outputs == bounded(job)


def test_a_minute_in_two_seconds(tmp_path: Path, make_job: MakeJob) -> None:
    job = make_job("parquet")
    write(tmp_path / "in" / "a.parquet", "parquet", table([i * SECOND // 10 for i in range(600)]))
    with paced(30.0), running(Paced(job)) as (seen, result):
        wait_for(lambda: seen.rows() > 0)
        result.wait_until_finish()
        left = [(at, row) for at, batch in seen.records for row in batch["time"].to_pylist()]
    assert len(left) == 600
    first = min(at - (row.timestamp() - START / 1e6) / 30 for at, row in left)
    late = [at - first - (row.timestamp() - START / 1e6) / 30 for at, row in left]
    assert max(late) < 1.0, "rows come when they are due"
    assert left[-1][0] - left[0][0] == pytest.approx(2.0, abs=0.7)
