"""Recorded files in the place of a source: their kind by their names, errors by their option."""

from collections.abc import Callable
from typing import Literal

import msgspec
import pytest

from dpstream.accounting.errors import RunError, UsageError
from dpstream.pipelines.connectors.files.recorded import named_by, recorded
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.project.job_parts import SourceConfig


def endless(job: Job, form: Literal["parquet", "csv", "jsonl", "json"] | None = None) -> Job:
    source = SourceConfig("folder", "/in", format=form)
    plan = msgspec.structs.replace(job.plan, stamp="_manifest")
    return msgspec.structs.replace(job, source=source, plan=plan)


@pytest.mark.parametrize(
    ("pattern", "kind"),
    [("/x/*.parquet", "parquet"), ("/x/a.CSV", "csv"), ("/x/a.jsonl.gz", "jsonl"),
     ("/x/a.jsonl", "jsonl")],
)  # fmt: skip
def test_the_kind_is_the_names(pattern: str, kind: str, make_job: Callable[..., Job]) -> None:
    files_job = recorded(endless(make_job()), pattern, "--proxy")
    assert (files_job.source.kind, files_job.source.path) == (kind, pattern)
    # No file has a stamp of the source's own: there the event time is the stamp.
    assert files_job.plan.stamp == files_job.source.stamp == "event_time"


def test_without_an_ending_the_folders_format_counts(make_job: Callable[..., Job]) -> None:
    assert recorded(endless(make_job(), "csv"), "/x/*", "--proxy").source.kind == "csv"
    with pytest.raises(UsageError) as error:
        recorded(endless(make_job()), "/x/*", "--proxy")
    assert error.value.field == "--proxy"


def test_a_job_of_files_keeps_its_kind(make_job: Callable[..., Job]) -> None:
    job = make_job("csv")
    files_job = recorded(job, "/y/*.parquet", "--truth")
    assert files_job.source == msgspec.structs.replace(job.source, path="/y/*.parquet")
    assert files_job.plan is job.plan


def test_errors_of_the_path_are_the_options() -> None:
    with pytest.raises(RunError) as error, named_by("--truth"):
        raise RunError("table.path", "rule", "fix")
    assert (error.value.field, error.value.rule) == ("--truth", "rule")
    with pytest.raises(UsageError) as unchanged, named_by("--truth"):
        raise UsageError("table.unit_column", "rule", "fix")
    assert unchanged.value.field == "table.unit_column"
