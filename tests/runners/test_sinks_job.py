"""Releases into Kafka and Pub/Sub from streaming engines: what the bounded run's files hold.

Flink is in the longer run.
"""

from collections.abc import Iterator

import pyarrow as pa
import pytest

from dpstream.pipelines.connectors.kafka.sink import read_kafka_releases
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.stream.run import run_job
from dpstream.state import open as stores
from tests import pubsub_emulator
from tests.kafka_broker import Broker
from tests.pipelines.connectors.pubsub.test_sink import as_documented, received, sink_table
from tests.pipelines.kafka_sinks import fresh, made, one_value_per_name, table, topic_of
from tests.published import Published
from tests.runners.flink import LOCAL, local
from tests.runners.prism import binary

__all__ = ["fresh", "local", "made"]
Made = tuple[Published, pa.Table]
on_both = pytest.mark.parametrize(
    "runner", ["PrismRunner", pytest.param("FlinkRunner", marks=pytest.mark.slow)]
)


@pytest.fixture
def flags(runner: str, request: pytest.FixtureRequest) -> list[str]:
    """What the engine needs."""
    if runner == "FlinkRunner":
        request.getfixturevalue("local")
        return LOCAL
    return [f"--prism_location={binary()}", "--prism_log_level=warn"]


@pytest.fixture
def topic() -> Iterator[tuple[str, str]]:
    """A Pub/Sub topic and a subscription that keeps its order."""
    with pubsub_emulator.running() as started:
        yield started.subscription(enable_message_ordering=True)


def run_twice(job: Job, runner: str, flags: list[str]) -> None:
    """The second run goes on where nothing is left to do."""
    for _ in range(2):
        run_job(job, runner, flags)
        stores.close_all()


@on_both
def test_kafka(kafka: Broker, fresh: Published, made: Made, runner: str, flags: list[str]) -> None:
    job = fresh.job(table(kafka, topic_of(kafka)))
    run_twice(job, runner, flags)
    one_value_per_name(job)
    assert read_kafka_releases(job).equals(made[1]) and made[1].num_rows > 10


@on_both
def test_pubsub(
    topic: tuple[str, str], fresh: Published, made: Made, runner: str, flags: list[str]
) -> None:
    job = fresh.job(sink_table(topic[0]))
    run_twice(job, runner, flags)
    assert as_documented(received(topic[1]), job).equals(made[1])
