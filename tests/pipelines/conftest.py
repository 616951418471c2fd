"""Small jobs on generated files, for the tests of sources, sinks and the command line."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from dpstream.pipelines.jobs.job import Job, load_job
from tests.kafka_broker import Broker

if TYPE_CHECKING:
    from tests.pipelines.kafka_jobs import Driver

TEMPLATE = """\
version = 1

[data_set.shop]
unit = {{ name = "user" }}
insecure_test_secret = "0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f"

[table.visits]
path = "{pattern}"
format = "{kind}"
unit_column = "user"
time_column = "time"

[job.daily]
table = "visits"
key = ["key"]
aggregate.records = {{ kind = "count" }}
aggregate.total = {{ kind = "sum", column = "value", bounds = [0, 10] }}
start = "2024-01-01T00:00:00Z"
end = "2024-01-02T00:00:00Z"
window = "1d"
release_every = "6h"
budget = {{ epsilon = 6.0, delta = 1e-9, covers = "lifetime" }}
contributions = 4
sink = {{ kind = "{sink}", path = "releases" }}
"""


@pytest.fixture
def make_job(tmp_path: Path) -> Callable[..., Job]:
    """``make_job(kind, sink=..., batch_rows=...)`` writes a project file and loads its job."""

    def make(
        kind: str = "csv", pattern: str = "", sink: str = "parquet", batch_rows: int = 1000
    ) -> Job:
        text = TEMPLATE.format(kind=kind, pattern=pattern or f"in/*.{kind}", sink=sink)
        (tmp_path / "dpstream.toml").write_text(text)
        (tmp_path / "in").mkdir(exist_ok=True)
        return msgspec.structs.replace(load_job(tmp_path), batch_rows=batch_rows)

    return make


@pytest.fixture
def spanner_job(make_job: Callable[..., Job]) -> Job:
    """A job of 16 shards whose store is on Spanner; nothing is there."""
    job = make_job()
    state = msgspec.structs.replace(job.state, store="spanner://p/i/d", shards=16)
    return msgspec.structs.replace(job, state=state)


@pytest.fixture
def drive(kafka: Broker, tmp_path: Path) -> Callable[..., "Driver"]:
    """``drive(topic, partition, start, begin, **job)``: the source's reader of a partition."""
    from dpstream.pipelines.connectors.kafka.source import KafkaInput, ReadPartition
    from tests.pipelines.kafka_jobs import Driver, kafka_job

    def make(
        topic: str, partition: int = 0, start: int | None = None, begin: int = 0, **job: Any
    ) -> Driver:
        made = kafka_job(tmp_path, kafka.servers, topic, **job)
        settle = int(made.source.settle.removesuffix("ms")) * 1_000
        dofn = ReadPartition(made, KafkaInput(made).kafka, settle, begin)
        return Driver(dofn, partition, start)

    return make
