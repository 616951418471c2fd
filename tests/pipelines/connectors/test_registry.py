"""Each kind of source and sink has its class, and a missing client is told."""

import sys
from collections.abc import Callable

import msgspec
import pytest

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.connectors.files.sink import FileSink
from dpstream.pipelines.connectors.files.source import FilesInput
from dpstream.pipelines.connectors.registry import input_of, sink_of
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.project.job_parts import SinkConfig, SourceConfig


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
def test_files_are_one_class_for_all_kinds(kind: str, make_job: Callable[..., Job]) -> None:
    job = make_job(kind, sink=kind)
    assert type(input_of(job)) is FilesInput and input_of(job).bounded
    sink = sink_of(job)
    assert type(sink) is FileSink and sink.kind == kind


@pytest.mark.parametrize(
    ("table", "name"),
    [(SinkConfig("kafka", topic="t", servers="h:1"), "KafkaSink"),
     (SinkConfig("pubsub", topic="projects/p/topics/t"), "PubsubSink"),
     (SinkConfig("bigquery", table="p.d.t"), "BigQuerySink")],
)  # fmt: skip
def test_services_have_a_class_each(
    table: SinkConfig, name: str, make_job: Callable[..., Job]
) -> None:
    sink = sink_of(msgspec.structs.replace(make_job(), sink=table))
    assert type(sink).__name__ == name and sink.kind == table.kind


def test_kafka_without_its_client(
    make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = SourceConfig("kafka", topic="t", servers="h:1")
    job = msgspec.structs.replace(make_job(), source=source)
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    for name in [n for n in sys.modules if n.startswith("dpstream.pipelines.connectors.kafka.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UsageError) as error:
        input_of(job)
    assert error.value.field == "table.format" and "[kafka]" in error.value.fix
