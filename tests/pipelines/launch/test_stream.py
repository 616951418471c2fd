"""The launcher on Dataflow: nothing stays on its disk, and Beam gets what the flow rests on."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from dpstream.accounting.errors import UsageError
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.launch.stream import check_remote
from dpstream.pipelines.project.job_parts import SinkConfig, SourceConfig


@pytest.fixture
def remote(make_job: Callable[..., Job]) -> Job:
    job, replace = make_job(), msgspec.structs.replace
    return replace(
        job,
        source=SourceConfig("pubsub", subscription="projects/p/subscriptions/s"),
        privacy=replace(job.privacy, secret=SecretSource("gcp:projects/p/secrets/s/versions/1")),
        state=replace(job.state, store="spanner://p/i/d"),
        sink=SinkConfig(
            "pubsub",
            topic="projects/p/topics/t",
            dead_letter=str(job.path.parent / "dead_letter" / job.name),
        ),
    )


def test_a_job_with_nothing_on_the_launcher(remote: Job) -> None:
    check_remote(remote)


@pytest.mark.parametrize(
    ("table", "change", "field"),
    [
        ("state", {"store": "sqlite:/x.db"}, "store"),
        ("privacy", {"secret": SecretSource("env:K")}, "secret"),
        ("source", {"kind": "csv"}, "table.path"),
        ("source", {"kind": "folder", "path": "/in"}, "table.path"),
        ("sink", {"kind": "csv"}, "sink.path"),
        ("sink", {"dead_letter": "/dead"}, "dead_letter"),
    ],
)
def test_what_lies_on_its_disk(table: str, change: dict[str, Any], field: str, remote: Job) -> None:
    changed = msgspec.structs.replace(getattr(remote, table), **change)
    with pytest.raises(UsageError) as error:
        check_remote(msgspec.structs.replace(remote, **{table: changed}))
    assert error.value.field == field
