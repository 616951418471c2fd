"""Jobs that read a Kafka topic, and bundles of the reader driven by hand."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pyarrow as pa
import pytest
from apache_beam.utils.timestamp import MAX_TIMESTAMP, MIN_TIMESTAMP
from typing_extensions import override

from dpstream.pipelines.connectors.inputs import Progress
from dpstream.pipelines.connectors.kafka.client import KafkaTopic
from dpstream.pipelines.connectors.kafka.source import TopicProgress
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.state import open as stores
from tests.drive import Bundle, Drive, letters_of, rows_of
from tests.kafka_broker import Broker, running
from tests.published import Published

_numbers = itertools.count()
_TEXT = """
version = 1

[data_set.shop]
unit = {{ name = "user" }}
insecure_test_secret = "{secret}"

[table.visits]
servers = "{servers}"
topic = "{topic}"
settle = "{settle}"
unit_column = "user"
time_column = "time"
{more}

[job.{name}]
table = "visits"
key = ["key"]
aggregate.records = {{ kind = "count" }}
start = "2024-01-01T00:00:00Z"
window = "1d"
release_every = "6h"
budget = {{ epsilon = 6.0, delta = 1e-9, covers = "lifetime" }}
contributions = 4
sink = {{ kind = "parquet", path = "releases" }}
"""


def kafka_job(
    folder: Path,
    servers: str,
    topic: str,
    more: str = "",
    settle: str = "100ms",
    batch_rows: int = 1000,
) -> Job:
    """A job on a topic, in a project file of its own; ``more`` are further lines of its table."""
    name = f"kafka{next(_numbers)}"
    path = folder / f"{name}.toml"
    path.write_text(
        _TEXT.format(
            name=name, servers=servers, topic=topic, more=more, settle=settle, secret="0f" * 32,
        )
    )  # fmt: skip
    return msgspec.structs.replace(load_job(path), batch_rows=batch_rows)


def record(i: int) -> dict[str, str]:
    """A message."""
    return {"user": f"u{i}", "key": f"k{i % 3}", "time": "2024-01-01T00:00:00Z"}


Positions = dict[tuple[int, int], str]


class Driver(Drive):
    """Bundles of one partition, one after the other; what all of them gave."""

    def __init__(self, dofn: Any, partition: int = 0, start: int | None = None) -> None:
        super().__init__(dofn, "_append_time", element=partition)
        if start is not None:
            parts = {partition: (start - 1, MIN_TIMESTAMP.micros)}
            self.progress = Progress(TopicProgress(parts, MAX_TIMESTAMP.micros), 0)
        self.records: list[pa.RecordBatch] = []
        self.letters: list[pa.RecordBatch] = []

    @override
    def bundle(self, **more: Any) -> Bundle:
        bundle = super().bundle(**more)
        self.records += bundle.records
        self.letters += bundle.dead
        return bundle

    def until(self, rows: int, bundles: int = 200) -> "Driver":
        """Bundles until so many rows and dead letters are there."""
        for _ in range(bundles):
            self.bundle()
            if sum(batch.num_rows for batch in self.records + self.letters) >= rows:
                break
        return self

    @property
    def after(self) -> int | None:
        """The last offset of its partition that is done."""
        last: int | None = self.progress.after.parts[self.element][0]
        return last

    @property
    def users(self) -> Positions:
        """User by position; a position that came twice fails."""
        return users_of(self.records)

    @property
    def dead(self) -> list[tuple[int, int, str]]:
        """Dead letters."""
        return sorted(letters_of(self.letters))

    @property
    def stamps(self) -> list[int]:
        """Stamps in micros, in the order of delivery."""
        columns = [batch.column("_append_time").cast("int64") for batch in self.records]
        return [stamp for column in columns for stamp in column.to_pylist()]

    @property
    def watermark(self) -> int:
        """Where the watermark stands."""
        now = self.estimator.current_watermark()
        return -1 if now is None else int(now.micros)


def users_of(batches: list[pa.RecordBatch]) -> Positions:
    """User by position; a position that came twice fails."""
    return {position: row["user"] for position, row in rows_of(batches).items()}


# Jobs that publish to a topic of a real broker; what the tests of that sink share.


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
