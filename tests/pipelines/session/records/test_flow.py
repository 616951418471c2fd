"""The pipeline of a batch: sums in batches, no record, and no secret in it."""

import pickle
from pathlib import Path
from typing import Any

import apache_beam as beam
import msgspec
import pyarrow as pa
import pytest

from dpstream.accounting.errors import RunError
from dpstream.dp_transforms.batches import ArrowBatchCoder
from dpstream.dp_transforms.session import encoded
from dpstream.dp_transforms.session.batches import gathered
from dpstream.pipelines.session.records import flow
from dpstream.pipelines.session.records.batch import here
from dpstream.pipelines.session.records.flow import (
    ANSWER,
    Begin,
    Digest,
    Gather,
    Measure,
    Release,
    Tally,
    Task,
    build,
)
from dpstream.pipelines.session.records.manifest import read_manifest
from dpstream.state.ledger.events import packed
from tests.pipelines.session.batching import KEY, RUN, Made, made, secret_file
from tests.pipelines.test_coders import UNPICKLED
from tests.pipelines.test_coders import parts_of as coders_of


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    return made(tmp_path, monkeypatch)


def task_of(table: Made, folder: Path, shards: int = 3) -> Task:
    (folder / "draft").mkdir(exist_ok=True)
    return Task(
        table.table, str(table.folder), table.question(), packed(table.boxes), RUN,
        str(folder / "draft"), shards, secret_file(folder),
    )  # fmt: skip


def parts_of(table: Made) -> list[str]:
    parts = read_manifest(table.folder, table.table).usable()
    return [msgspec.json.encode(part).decode() for part in parts]


def built(task: Task, table: Made) -> Any:
    pipeline = beam.Pipeline()
    build(pipeline, task, read_manifest(table.folder, table.table).usable())
    return pipeline.to_runner_api(return_context=True)


def strange(task: Task, table: Made) -> list[str]:
    """Collections that are neither batches nor of a coder that is known."""
    proto, context = built(task, table)
    out = []
    for transform in proto.components.transforms.values():
        for name in transform.outputs.values():
            if not transform.subtransforms and "/ReshufflePerKey/" not in transform.unique_name:
                coder = context.coders.get_by_id(proto.components.pcollections[name].coder_id)
                if not all(isinstance(part, UNPICKLED) for part in coders_of(coder)):
                    out.append(transform.unique_name)
    return out


def test_sums_travel_as_batches(
    table: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = task_of(table, tmp_path)
    assert ArrowBatchCoder in UNPICKLED and strange(task, table) == []
    monkeypatch.setattr(flow, "Routed", Any)
    assert strange(task, table)  # a lost type is found


def test_neither_key_nor_record_is_in_the_pipeline(table: Made, tmp_path: Path) -> None:
    task = task_of(table, tmp_path)
    proto = built(task, table)[0].SerializeToString() + pickle.dumps(task)
    assert KEY.encode() not in proto and bytes.fromhex(KEY) not in proto
    assert len(proto) < 1 << 20


def test_the_stages_one_by_one(table: Made, tmp_path: Path) -> None:
    task = task_of(table, tmp_path)
    space, question, boxes = table.table.space, table.question(), table.boxes
    needs = question.needs(space, boxes)
    sums: dict[int, list[pa.RecordBatch]] = {}
    for shard in range(task.shards):
        [(number, batch)] = Begin(task).process(shard)
        assert number == shard and batch.num_rows == 0
        sums[shard] = [batch]
    for part in parts_of(table):
        for shard, batch in Tally(task).process(part):
            sums[shard].append(batch)
    totals = table.totals(boxes, question.cells, needs)
    parts = [gathered(sums[n], a, b, needs) for n, (a, b) in enumerate([(0, 5), (5, 10), (10, 16)])]
    assert sum(int(t.records.sum()) for t in parts) == totals.records.sum() > 500
    measure = Measure(task)
    measure.setup()
    gathered_sums = [next(Gather(task).process((shard, sums[shard]))) for shard in (2, 0, 1)]
    digest = Digest(task)
    digest.setup()
    digests = [list(digest.process(routed)) for routed in gathered_sums]
    digest.teardown()
    measured = []
    for shard, batch in gathered_sums:
        each = [of[shard][1] for of in digests]
        measured.append(next(measure.process((shard, [each[0], batch, *each[1:]])))[1])
    with pytest.raises(RunError, match="has not handed over"):
        next(measure.process((shard, [batch, *each[1:]])))  # noise without a digest
    measure.teardown()
    with pytest.raises(RunError, match="has not handed over"):
        list(Release(task).process((0, measured[:2])))
    assert not (tmp_path / "draft" / ANSWER).exists()
    assert list(Release(task).process((0, measured))) == [ANSWER]
    with task.keys.ring() as ring:
        mine = here(table, space, question, boxes, ring, RUN)
    assert (tmp_path / "draft" / ANSWER).read_bytes() == encoded(mine)


def test_a_part_that_is_gone_is_named_by_no_path(table: Made, tmp_path: Path) -> None:
    part = read_manifest(table.folder, table.table).usable()[0]
    (table.folder / part.name).unlink()
    with pytest.raises(RunError, match=r"^table\.coordinates: cannot be read"):
        list(Tally(task_of(table, tmp_path)).process(msgspec.json.encode(part).decode()))
