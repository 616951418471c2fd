"""Small jobs on generated files, for the tests of sources, sinks and the command line."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dpstream.pipelines.jobs.job import Job, load_job
from tests.kafka_broker import Broker

if TYPE_CHECKING:
    from tests.pipelines.kafka_jobs import Driver

TEMPLATE = """
[source]
kind = "{kind}"
path = "{pattern}"
[schema]
unit = {{ column = "user" }}
key = [{{ column = "key" }}]
event_time = {{ column = "time" }}
[[aggregate]]
name = "records"
kind = "count"
[[aggregate]]
name = "total"
kind = "sum"
column = "value"
clamp = [0, 10]
[time]
start = "2024-01-01T00:00:00Z"
end = "2024-01-02T00:00:00Z"
window = "1d"
trigger_every = "6h"
[privacy]
epsilon = 6.0
delta = 1e-9
contributions = 4
insecure_test_key = "{key}"
[sink]
kind = "{sink}"
path = "releases"
[performance]
batch_rows = {batch_rows}
"""


@pytest.fixture
def make_job(tmp_path: Path) -> Callable[..., Job]:
    """``make_job(kind, sink=..., batch_rows=...)`` writes and loads a job file."""

    def make(
        kind: str = "csv", pattern: str = "", sink: str = "parquet", batch_rows: int = 1000
    ) -> Job:
        text = TEMPLATE.format(
            kind=kind,
            pattern=pattern or f"in/*.{kind}",
            sink=sink,
            batch_rows=batch_rows,
            key="0f" * 32,
        )
        (tmp_path / "job.toml").write_text(text)
        (tmp_path / "in").mkdir(exist_ok=True)
        return load_job(tmp_path / "job.toml")

    return make


@pytest.fixture
def drive(kafka: Broker, tmp_path: Path) -> Callable[..., "Driver"]:
    """``drive(topic, partition, start, begin, **job)``: the source's reader of a partition."""
    from dpstream.pipelines.connectors.kafka.source import KafkaInput, _ReadPartition
    from tests.pipelines.kafka_jobs import Driver, kafka_job

    def make(
        topic: str, partition: int = 0, start: int | None = None, begin: int = 0, **job: Any
    ) -> Driver:
        made = kafka_job(tmp_path, kafka.servers, topic, **job)
        settle = int(made.source.settle.removesuffix("ms")) * 1_000
        dofn = _ReadPartition(made, KafkaInput(made).kafka, settle, begin)
        return Driver(dofn, partition, start)

    return make
