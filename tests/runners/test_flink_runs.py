"""Runs of a store that is not new, on Flink: the sink was lost, or the store was restored.

Flink's pipelines do not end by themselves: each must be seen to its own end, not to that of the
run before it.
"""

import shutil
from pathlib import Path

import pytest

from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.operate import state_admin
from dpstream.pipelines.stream.run import run_job
from tests.bench.paper.synth import Synth, generate
from tests.bench.stream import job_of
from tests.faults.flink import job_at, letters, poisoned, published, undisturbed
from tests.runners.flink import LOCAL, local
from tests.runners.golden import digest, write_stream
from tests.runners.golden import published as releases

__all__ = ["local"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("local"),
]


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    write_stream(folder, users=600)
    poisoned(folder)
    return folder


@pytest.fixture(scope="module")
def right(stream: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return undisturbed(tmp_path_factory.mktemp("right") / "job", stream)


def run_on_flink(job: Job, right: Job) -> None:
    run_job(job, "FlinkRunner", LOCAL)
    assert published(job) == published(right)
    assert letters(job) == letters(right) and len(letters(job)) > 20


def test_a_lost_sink_is_written_again(stream: Path, right: Job, tmp_path: Path) -> None:
    """From the store: a run that is finished reads no input again, so dead letters stay as are."""
    job = job_at(tmp_path / "job", stream)
    run_on_flink(job, right)
    shutil.rmtree(job.sink.path)
    run_on_flink(job, right)


def test_a_restored_store_catches_up(stream: Path, right: Job, tmp_path: Path) -> None:
    """The backup is of a run that was complete: what it delivered does not count any more."""
    job = job_at(tmp_path / "job", stream)
    run_on_flink(job, right)
    state_admin.backup(job, tmp_path / "backup")
    state_admin.restore(job, tmp_path / "backup", replace=True)
    for path in sorted(Path(job.sink.path).glob("window-*/*"))[-20:]:
        path.unlink()
    run_on_flink(job, right)


def test_more_records_wait_than_fit_into_a_checkpoint_in_memory(tmp_path: Path) -> None:
    """Flink's checkpoints in memory end at 5 MiB: 100,000 records of a worker.  By reference they
    hold none."""
    data, digests = tmp_path / "data", []
    data.mkdir()
    generate(Synth(users=170_000, keys=1_000, row_group_rows=20_000), data / "z.parquet")
    for runner, flags in (
        ("DirectRunner", []),
        ("FlinkRunner", LOCAL),
        ("FlinkRunner", [*LOCAL, "--number_of_execution_retries=3"]),
    ):
        job = job_of(tmp_path / runner, data, shards=2, triggers=48)
        run_job(job, runner, flags)
        digests.append(digest(releases(job)))
    assert len({*digests}) == 1
