"""A table of several chunks, as of more text than one array can hold, is the same rows."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from dpstream.pipelines.formats.rows import Rows
from dpstream.pipelines.jobs.job import Job
from tests.audit.blackbox import run as module
from tests.audit.blackbox.run import Fixed, Runner, TrialInput, TrialRows, table_of
from tests.audit.blackbox.values import inputs_of

UNITS, KEYS = 300, 4


def table(job: Job) -> pa.Table:
    """Each unit has a row of each key, in an order by keys."""
    unit, key = np.tile(np.arange(UNITS), KEYS), np.repeat(np.arange(KEYS), UNITS)
    event = np.full(UNITS * KEYS, job.plan.timeline.start)
    rows = TrialRows(unit, key, event, np.zeros(len(unit), np.bool_))
    return table_of(job.plan, rows, inputs_of(job.plan))


def chunked(rows: pa.Table) -> pa.Table:
    """The rows in a chunk of each key: a unit stands in all of them at the same place."""
    return pa.concat_tables([rows.slice(k * UNITS, UNITS) for k in range(KEYS)])


def released(job: Job, folder: Path, given: pa.Table) -> pa.Table:
    folder.mkdir()
    runner = Runner(job, folder, False, Fixed("0f" * 32, "0" * 32))
    return runner.run(TrialInput(given, np.zeros(0, np.int64)))


def test_chunks_change_no_release(make_job: Callable[..., Job], tmp_path: Path) -> None:
    rows = table(job := make_job())
    several = chunked(rows)
    assert several.column(0).num_chunks == KEYS and several.equals(rows)
    one = released(job, tmp_path / "one", rows)
    assert len(set(one["key"].to_pylist())) == KEYS
    assert released(job, tmp_path / "several", several).equals(one)


def test_chunks_that_all_begin_at_the_first_position_lose_records(
    make_job: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = table(job := make_job())
    one = released(job, tmp_path / "one", rows)
    monkeypatch.setattr(module, "Rows", lambda offset, batch: Rows(0, batch))
    assert not released(job, tmp_path / "several", chunked(rows)).equals(one)
