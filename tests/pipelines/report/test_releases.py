"""What a report reads of releases: the newest row of each key, and no foreign releases."""

import logging
from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest

from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.report import releases
from dpstream.pipelines.report.data import collect
from dpstream.pipelines.report.releases import inventory, newest
from tests.reports import edit, put, row

MakeJob = Callable[..., Job]


@pytest.fixture(autouse=True)
def keep_logging() -> Iterator[None]:
    """The command line silences the process's logs; other tests need theirs."""
    yield
    logging.disable(logging.NOTSET)


def values_of(job: Job) -> dict[str, float]:
    listing = inventory(job)
    table = pa.concat_tables(newest(job.plan, listing.releases))
    return dict(zip(table["key"].to_pylist(), table["records"].to_pylist(), strict=True))


def test_newest_values_between_refreshes(make_job: MakeJob) -> None:
    job = edit(make_job(), ("contributions = 4", "contributions = 4\nmechanism.refresh_every = 2"))
    put(job, 1, [row("early", 1.0)])
    put(job, 2, [row("early", 2.0), row("mid", 2.0)])
    put(job, 3, [row("late", 3.0)])
    assert values_of(job) == {"early": 2.0, "mid": 2.0, "late": 3.0}
    findings = collect(job.plan, inventory(job))
    assert findings.keys.tolist() == [3] and findings.last_trigger.tolist() == [3]
    assert [t["trigger"].to_pylist() for t in findings.series] == [[3], [1, 2], [2]]


@pytest.mark.parametrize("held", [1, 1_000_000])
def test_newest_values_of_rounds(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, held: int
) -> None:
    monkeypatch.setattr(releases, "_HELD_ROWS", held)
    job = edit(make_job(), ("contributions = 4", 'contributions = 4\nmechanism.mode = "rounds"'))
    put(job, 1, [row("a", 1.0), row("b", 1.0)])
    put(job, 2, [row("a", 2.0)])
    put(job, 3, [{**row("b", 3.0), "total": None}])
    assert values_of(job) == {"a": 2.0, "b": 3.0}
    table = pa.concat_tables(newest(job.plan, inventory(job).releases)).sort_by("key")
    assert table["total"].to_pylist() == [6.0, None]  # not the older 3.0 of b
