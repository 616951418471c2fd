"""The interface of sinks, and the registry of kinds."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from typing_extensions import override

from dpstream.accounting.errors import PolicyError, RunError
from dpstream.pipelines.connectors.files.sink import FileSink
from dpstream.pipelines.connectors.files.source import FilesInput
from dpstream.pipelines.connectors.registry import input_of, sink_of
from dpstream.pipelines.connectors.sink import (
    ReadableSink,
    RunManifest,
    SealMessage,
    WriteOnlySink,
    digest_of,
    is_row,
    manifest_key,
    messages_of,
    seal_key,
)
from dpstream.pipelines.connectors.write import dead_letter_folder
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.project.job_section import SinkSection
from dpstream.pipelines.project.source import Source
from dpstream.pipelines.report.data import inventory
from tests.golden.refusals import Refused
from tests.pipelines.connectors.files.test_sink import release
from tests.published import Published

KAFKA = 'kind = "kafka"\ntopic = "t"\nservers = "b:9092"'
PUBSUB = 'kind = "pubsub"\ntopic = "projects/p/topics/t"'
BIGQUERY = 'kind = "bigquery"\ntable = "p.d.t"'
FILES = 'kind = "csv"\npath = "out"'


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return Published(tmp_path_factory.mktemp("tables"))


@pytest.mark.parametrize(
    "sink",
    [
        f'{FILES}\ntopic = "t"',
        f'{KAFKA}\npath = "out"',
        f'{PUBSUB}\nservers = "b"',
        f'{BIGQUERY}\noptions = {{ a = "b" }}',
        'kind = "csv"',
        'kind = "kafka"\ntopic = "t"',
        'kind = "pubsub"\ntopic = "t"',
        'kind = "bigquery"\ntable = "d.t"',
        'kind = "bigquery"\ntable = "p.d.t`x"',
    ],
)
def test_fields_of_other_kinds_are_refused(place: Published, sink: str, refused: Refused) -> None:
    refused(place.job, sink)


@pytest.mark.parametrize(
    ("sink", "words"),
    [
        (KAFKA, "Kafka's topic t"),
        (PUBSUB, "Pub/Sub's topic projects/p/topics/t"),
        (BIGQUERY, "BigQuery's table p.d.t"),
    ],
)
def test_every_kind_says_where_it_is(
    place: Published, sink: str, words: str, refused: Refused
) -> None:
    job = place.job(sink)
    assert sink_of(job).description == words and job.sink.folder is None
    assert job.sink.file_kind == "parquet"
    assert dead_letter_folder(job) == job.path.parent / "dead_letter" / "pages"
    refused(inventory, job)


def test_files_are_as_before(place: Published) -> None:
    job = place.job(FILES)
    assert sink_of(job).description == f"csv files below {job.path.parent / 'out'}"
    assert dead_letter_folder(job) == job.path.parent / "dead_letter" / "pages"
    assert job.sink.folder == Path(job.sink.path) and job.sink.file_kind == "csv"


@pytest.mark.parametrize("sink", [PUBSUB, BIGQUERY])
def test_what_cannot_be_read_back_says_so(place: Published, sink: str, refused: Refused) -> None:
    target = sink_of(place.job(sink))
    assert not isinstance(target, ReadableSink)
    assert target.used() is None and target.manifests() == []
    assert [*target.published(), *target.unsealed()] == []
    refused(lambda: target.holds(pa.record_batch({})))
    refused(target.prepare, restoring=True)


class Noted(WriteOnlySink):
    """Keeps what it is given, in order."""

    kind = "pubsub"
    field = "sink.topic"
    called, place = "topic", "t"

    def __init__(self, run_id: str | None = None) -> None:
        super().__init__(run_id)
        self.put: list[Any] = []

    @override
    def _put_rows(self, run_id: str, releases: Sequence[Any]) -> None:
        self.put += [(run_id, key) for release in releases for key in release.keys]

    @override
    def _put_control_messages(self, messages: Sequence[Any]) -> None:
        self.put += [m.name for m in messages]

    @override
    def close(self) -> None:
        pass


def test_each_row_has_its_release_id_for_a_name() -> None:
    batch = release(12, 5, ["a"])
    messages = messages_of(batch)
    assert messages.name == (12, 5) and messages.keys == [bytes(range(7, 23)).hex()]
    assert is_row(messages.keys[0]) and not is_row(seal_key((12, 5)))
    assert msgspec.json.decode(messages.values[0])["key"] == "a"
    assert messages.seal == SealMessage(
        "seal", 12, 5, 1, digest_of([(messages.keys[0], messages.values[0])])
    )
    assert messages_of(release(12, 6, [])).seal.rows == 0


def test_the_digest_is_of_the_set_of_rows() -> None:
    rows = [("b", b"1"), ("a", b"2")]
    assert digest_of(rows) == digest_of(rows[::-1])
    assert len({digest_of(rows), digest_of(rows[:1]), digest_of([("b", b"1"), ("c", b"3")])}) == 3
    assert digest_of([("a", b"12")]) != digest_of([("a", b"1"), ("b", b"2")])


def test_names_of_seals_and_manifests() -> None:
    assert seal_key((12, 5)) == "seal-000012-000005"
    assert (manifest_key(0), manifest_key(1)) == ("run", "run-epoch-1")


def test_a_seal_is_written_when_all_rows_are_there(refused: Refused) -> None:
    sink = Noted()
    refused(lambda: sink.write([release(0, 1, ["a"])]))
    sink.put_manifest(RunManifest(1, "r1", 2, "hash", "pubsub"))
    row = bytes(range(7, 23)).hex()
    assert sink.write([release(0, 1, ["a"]), release(0, 2, [])]) == [(0, 1), (0, 2)]
    assert sink.put == [
        "r1/run-epoch-2", ("r1", row), "r1/seal-000000-000001", "r1/seal-000000-000002",
    ]  # fmt: skip


def test_what_cannot_be_read_back_cannot_be_compared() -> None:
    sink = Noted("r1")
    sink.prepare()
    for refused in (lambda: sink.prepare(restoring=True), lambda: sink.write([], True)):
        with pytest.raises(PolicyError) as error:
            refused()
        assert error.value.field == "sink.kind"
    assert sink.put == []


def test_a_batch_says_its_release_or_is_none() -> None:
    with pytest.raises((KeyError, TypeError, RunError)):
        messages_of(pa.RecordBatch.from_pydict({"x": [1]}))


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
def test_files_are_one_class_for_all_kinds(kind: str, make_job: Callable[..., Job]) -> None:
    job = make_job(kind, sink=kind)
    assert type(input_of(job)) is FilesInput and input_of(job).bounded
    sink = sink_of(job)
    assert type(sink) is FileSink and sink.kind == kind


@pytest.mark.parametrize(
    ("table", "name"),
    [(SinkSection("kafka", topic="t", servers="h:1"), "KafkaSink"),
     (SinkSection("pubsub", topic="projects/p/topics/t"), "PubsubSink"),
     (SinkSection("bigquery", table="p.d.t"), "BigQuerySink")],
)  # fmt: skip
def test_services_have_a_class_each(
    table: SinkSection, name: str, make_job: Callable[..., Job]
) -> None:
    sink = sink_of(msgspec.structs.replace(make_job(), sink=table))
    assert type(sink).__name__ == name and sink.kind == table.kind


def test_kafka_without_its_client(
    make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    source = Source("kafka", topic="t", servers="h:1")
    job = msgspec.structs.replace(make_job(), source=source)
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    for name in [n for n in sys.modules if n.startswith("dpstream.pipelines.connectors.kafka.")]:
        monkeypatch.delitem(sys.modules, name)
    refused(input_of, job)
