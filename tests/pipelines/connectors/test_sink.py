"""The sink of a job: fields of its kind and no others; where dead letters go."""

from pathlib import Path

import pyarrow as pa
import pytest

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.pipelines.connectors.registry import sink_of
from dpstream.pipelines.connectors.sink import (
    ReadableSink,
    holds_release,
    manifests_of,
    releases_of,
    unsealed_of,
)
from dpstream.pipelines.connectors.write import dead_letter_folder
from dpstream.pipelines.report.releases import inventory
from tests.published import Published

KAFKA = 'kind = "kafka"\ntopic = "t"\nservers = "b:9092"'
PUBSUB = 'kind = "pubsub"\ntopic = "projects/p/topics/t"'
BIGQUERY = 'kind = "bigquery"\ntable = "p.d.t"'
FILES = 'kind = "csv"\npath = "out"'


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return Published(tmp_path_factory.mktemp("tables"))


@pytest.mark.parametrize(
    ("sink", "field", "words"),
    [
        (f'{FILES}\ntopic = "t"', "sink.topic", "is not for kind 'csv'"),
        (f'{KAFKA}\npath = "out"', "sink.path", "is not for kind 'kafka'"),
        (f'{PUBSUB}\nservers = "b"', "sink.servers", "is not for kind 'pubsub'"),
        (f'{BIGQUERY}\noptions = {{ a = "b" }}', "sink.options", "is not for kind 'bigquery'"),
        ('kind = "csv"', "sink.path", "must not be empty"),
        ('kind = "kafka"\ntopic = "t"', "sink.servers", "must not be empty"),
        ('kind = "pubsub"\ntopic = "t"', "sink.topic", "write projects/P/topics/T"),
        ('kind = "bigquery"\ntable = "d.t"', "sink.table", "write project.dataset.table"),
        ('kind = "bigquery"\ntable = "p.d.t`x"', "sink.table", "is no full name"),
    ],
)
def test_fields_of_other_kinds_are_refused(
    place: Published, sink: str, field: str, words: str
) -> None:
    with pytest.raises(UsageError) as caught:
        place.job(sink)
    assert caught.value.field == f"job.pages.{field}" and words in str(caught.value)


@pytest.mark.parametrize(
    ("sink", "words"),
    [
        (KAFKA, "Kafka's topic t"),
        (PUBSUB, "Pub/Sub's topic projects/p/topics/t"),
        (BIGQUERY, "BigQuery's table p.d.t"),
    ],
)
def test_every_kind_says_where_it_is(place: Published, sink: str, words: str) -> None:
    job = place.job(sink)
    assert sink_of(job).description == words and job.sink.folder is None
    assert job.sink.file_kind == "parquet"
    assert dead_letter_folder(job) == job.path.parent / "dead_letter" / "pages"
    with pytest.raises(UsageError, match="a report reads files"):
        inventory(job)


def test_files_are_as_before(place: Published) -> None:
    job = place.job(FILES)
    assert sink_of(job).description == f"csv files below {job.path.parent / 'out'}"
    assert dead_letter_folder(job) == job.path.parent / "dead_letter" / "pages"
    assert job.sink.folder == Path(job.sink.path) and job.sink.file_kind == "csv"


@pytest.mark.parametrize("sink", [PUBSUB, BIGQUERY])
def test_what_cannot_be_read_back_says_so(place: Published, sink: str) -> None:
    target = sink_of(place.job(sink))
    assert not isinstance(target, ReadableSink)
    assert manifests_of(target) == [] and releases_of(target) == [] and unsealed_of(target) == []
    with pytest.raises(PolicyError, match="cannot be read back"):
        holds_release(target, pa.record_batch({}))
    with pytest.raises(PolicyError, match="--abandon"):
        target.prepare(restoring=True)
