"""Jobs that publish to a topic of a real broker; what the tests of that sink share."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest

from dpstream.pipelines.connectors.kafka.client import KafkaTopic
from dpstream.pipelines.jobs.job import Job
from dpstream.state import open as stores
from tests.kafka_broker import Broker, running
from tests.published import Published


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with running(tmp_path_factory.mktemp("kafka")) as started:
        yield started


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Published, pa.Table]:
    published = Published(tmp_path_factory.mktemp("made"))
    return published, published.files()[1]


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Published]:
    yield Published(tmp_path / "place")
    stores.close_all()


def table(broker: Broker, topic: str, **options: str) -> str:
    """A ``[sink]`` of a topic."""
    given = ", ".join(f'"{name}" = "{value}"' for name, value in options.items())
    where = f'kind = "kafka"\ntopic = "{topic}"\nservers = "{broker.servers}"'
    return f"{where}\noptions = {{ {given} }}"


def topic_of(broker: Broker, partitions: int = 3, policy: str = "compact") -> str:
    return broker.topic(partitions, cleanup_policy=policy)


def contents(job: Job) -> dict[str, list[bytes]]:
    """Every message of a job's topic as it stands there: name -> its values."""
    by_key = defaultdict(list)
    topic = KafkaTopic(job.sink.servers or "", job.sink.topic or "", {})
    for key, value in topic.read(range(topic.describe()[0])):
        by_key[key].append(value)
    return by_key


def run_name(job: Job) -> str:
    """Name of the one manifest in a job's topic."""
    (name,) = (key for key in contents(job) if key.startswith("run"))
    return name


def one_value_per_name(job: Job) -> None:
    for key, values in contents(job).items():
        assert len(set(values)) == 1, key


def gone(broker: Broker, job: Job, partition: int, before: int) -> None:
    """Messages before an offset (-1: all) are deleted."""
    from confluent_kafka import TopicPartition

    broker.admin_do("delete_records", [TopicPartition(job.sink.topic, partition, before)])


def meanwhile(nth: int, does: Callable[[], Any]) -> Any:
    """Something happens just before the nth sending from now on."""
    real, left = KafkaTopic.send, [nth]

    def send(topic: KafkaTopic, messages: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            does()
        real(topic, messages)

    return mock.patch.object(KafkaTopic, "send", send)
