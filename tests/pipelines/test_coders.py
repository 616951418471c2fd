"""Between stages records are written by the coder of batches; nothing that holds one is pickled."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow as pa
import pytest
from apache_beam import coders
from apache_beam.options.pipeline_options import PipelineOptions

from dpstream.dp_transforms import flow
from dpstream.dp_transforms.batches import ArrowBatchCoder, record_schema
from dpstream.dp_transforms.beam.workers import SplitByShard
from dpstream.pipelines.connectors.files.stream import StreamFiles
from dpstream.pipelines.connectors.kafka.source import KafkaInput
from dpstream.pipelines.connectors.pubsub import source as pubsub_client
from dpstream.pipelines.connectors.registry import input_of, sink_of
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.runners.table import RUNNERS, Engine
from dpstream.pipelines.stream import run as stream
from dpstream.pipelines.stream.begin import begin
from dpstream.state import open as stores
from tests.pipelines.cli.test_unbounded_cli import JOB, job_file

#: Coders that say what they write.  All others of Beam's fall back on pickles.
UNPICKLED = (
    ArrowBatchCoder,
    coders.BytesCoder,
    coders.IterableCoder,
    coders.coders.ListCoder,
    coders.coders.PaneInfoCoder,
    coders.StrUtf8Coder,
    coders.TupleCoder,
    coders.VarIntCoder,
)
#: Producers without records: the time stamps that Beam's reshuffle keeps, and the files of a
#: folder (names and places).
WITHOUT_RECORDS = ("/ReshufflePerKey/", "Source/Watch", "Source/Pieces", "Source/SpreadFiles/",
                   "Source/SpreadPieces/")  # fmt: skip
#: Stages whose outputs are batches.
BATCHES = ("Source/Read/", "DPStream/Records", "ByUnit", "UnitInput", "Bound/Bound", "KeyInput",
           "Release/Release", "Gather", "Seal", "AllDead")  # fmt: skip


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    stores.close_all()


def a_job(folder: Path, kind: str) -> Job:
    """A job on a source that need not be there."""
    path = job_file(folder, kind if kind in ("kafka", "pubsub") else "folder")
    if kind not in ("kafka", "pubsub", "folder"):
        path.write_text(
            JOB.format(table='path = "in/*.csv"', covers="1d", more='end = "2024-01-02T00:00:00Z"')
        )
        (folder / "in" / "a.csv").write_text("user,page,time,value\nu,p,2024-01-01T00:00:00Z,1\n")
    return load_job(path)


def collections(job: Job, kind: str) -> dict[str, list[Any]]:
    """Of each collection of a job's pipeline, by its producer: all coders in its coder."""
    source, ends = input_of(job), kind != "flink"
    run, _ = begin(job, source=[b"here"])
    reader: Any = None
    if source.bounded:
        reader = source.read() if kind == "files" else StreamFiles(job)
    engine = RUNNERS["FlinkRunner"]._replace(ends=ends, spreads=ends)
    pipeline, fitted = beam.Pipeline(), Engine(engine, None, PipelineOptions([])).fitted
    ends = source.bounded and ends
    stream._connect(pipeline, job, sink_of(job, run), run, source, reader, ends, fitted, None)
    proto, context = pipeline.to_runner_api(return_context=True)
    coder_parts: dict[str, list[Any]] = {}
    for transform in proto.components.transforms.values():
        for tag, name in transform.outputs.items():
            if not transform.subtransforms:
                coder = context.coders.get_by_id(proto.components.pcollections[name].coder_id)
                coder_parts[f"{transform.unique_name}[{tag}]"] = list(parts_of(coder))
    return coder_parts


def parts_of(coder: Any) -> Iterator[Any]:
    yield coder
    for part in coder._get_component_coders() or ():
        yield from parts_of(part)


def pickled(coder_parts: dict[str, list[Any]]) -> set[str]:
    """Producers of collections that a coder without a type writes."""
    return {
        name
        for name, parts in coder_parts.items()
        if not all(isinstance(part, UNPICKLED) for part in parts)
        and not any(without in name for without in WITHOUT_RECORDS)
    }


@pytest.fixture(autouse=True)
def no_services(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipeline can be looked at where no broker is."""
    monkeypatch.setattr(KafkaInput, "_topic_id", lambda self: "an id")
    described = ("t", 60)
    monkeypatch.setattr(pubsub_client, "described", lambda subscription: described)
    monkeypatch.setattr(pubsub_client, "seek", lambda subscription, begin: None)


@pytest.mark.parametrize("kind", ["files", "replay", "flink", "folder", "kafka", "pubsub"])
def test_no_record_is_pickled_between_stages(tmp_path: Path, kind: str) -> None:
    coder_parts = collections(a_job(tmp_path, kind), kind)
    for stage in BATCHES:
        here = [parts for name, parts in coder_parts.items() if stage in name]
        assert here, stage
        assert all(any(isinstance(p, ArrowBatchCoder) for p in parts) for parts in here), stage
    assert pickled(coder_parts) == set()


def test_a_lost_type_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(self: flow.Bound, pcolls: Any) -> Any:
        records, clock_ticks = pcolls
        schema = record_schema(self._run.plan)
        split = beam.ParDo(SplitByShard("unit", self._run.shards, schema))
        return (
            (records | "ByUnit" >> split, clock_ticks | "P" >> flow._to_shards(self._run, schema))
            | "UnitInput" >> beam.Flatten()
            | "Bound" >> beam.ParDo(self.buffer()).with_output_types(tuple[int, pa.RecordBatch])
        )

    monkeypatch.setattr(flow.Bound, "expand", lost)
    coder_parts = collections(a_job(tmp_path, "files"), "files")
    names = {name.split("/")[-1] for name in pickled(coder_parts)}
    assert names == {"ByUnit[None]", "UnitInput[None]"}
