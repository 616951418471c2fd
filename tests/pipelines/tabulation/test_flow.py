"""The pipeline of an execution: exact counts in batches, no record, and no secret in it."""

import pickle
from pathlib import Path
from typing import Any

import apache_beam as beam
import msgspec
import pytest

from dpstream.dp_transforms.batches import ArrowBatchCoder
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.dp_transforms.tabulation.expand import NONE
from dpstream.pipelines.tabulation import flow
from dpstream.pipelines.tabulation.flow import Count, Task, build
from dpstream.pipelines.tabulation.inputs import prepared
from dpstream.pipelines.tabulation.private import pieces
from dpstream.pipelines.tabulation.work import parts_of
from tests.pipelines.tabulation.executing import order
from tests.pipelines.tabulation.office import Office
from tests.pipelines.test_coders import UNPICKLED
from tests.pipelines.test_coders import parts_of as coders_of

_SECRET = "7d" * 32


def task_of(made: Office, folder: Path) -> Task:
    (folder / "noise.secret").write_text(_SECRET + "\n")
    (folder / "noise.secret").chmod(0o600)
    inputs = order(made, folder / "out").inputs
    keys = SecretSource(f"file:{folder}/noise.secret")
    return Task(inputs, "5a" * 16, str(folder / "draft"), str(folder / "letters"), keys)


def built(task: Task) -> Any:
    pipeline = beam.Pipeline()
    parts = len(parts_of(prepared(task.inputs)))
    build(pipeline, task, pieces(task.inputs.records, 2_000), parts)
    return pipeline.to_runner_api(return_context=True)


def strange(task: Task) -> list[str]:
    """Collections that are neither batches nor of a coder that is known."""
    proto, context = built(task)
    out = []
    for transform in proto.components.transforms.values():
        for name in transform.outputs.values():
            if not transform.subtransforms and "/ReshufflePerKey/" not in transform.unique_name:
                coder = context.coders.get_by_id(proto.components.pcollections[name].coder_id)
                if not all(isinstance(part, UNPICKLED) for part in coders_of(coder)):
                    out.append(transform.unique_name)
    return out


def test_counts_travel_as_batches(
    made: Office, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = task_of(made, tmp_path)
    assert ArrowBatchCoder in UNPICKLED and strange(task) == []
    monkeypatch.setattr(flow, "Routed", Any)
    assert strange(task)  # a lost type is found


def test_neither_key_nor_record_is_in_the_pipeline(made: Office, tmp_path: Path) -> None:
    task = task_of(made, tmp_path)
    proto = built(task)[0].SerializeToString() + pickle.dumps(task)
    assert _SECRET.encode() not in proto and bytes.fromhex(_SECRET) not in proto
    rows = made.path("person-records.txt").read_bytes().splitlines()[1:]
    assert not any(row in proto for row in rows)
    assert len(proto) < 1 << 20  # nor the groups: workers find them in the public files


def test_what_pieces_hand_over_is_a_count_of_groups_for_every_part(
    made: Office, tmp_path: Path
) -> None:
    task = task_of(made, tmp_path)
    prepared_run = prepared(task.inputs)
    parts = parts_of(prepared_run)
    sums = dict.fromkeys((part.number for part in parts), 0)
    assert flow._batch(NONE).num_rows == 0  # what every part begins with
    for piece in pieces(task.inputs.records, 2_000):
        for number, batch in Count(task).process(msgspec.json.encode(piece).decode()):
            leaves = prepared_run.plan.parameters.tables[parts[number].table].leaves
            groups = batch.column("key").to_numpy() // leaves
            shard = parts[number].shard
            assert shard.first <= groups.min() and groups.max() < shard.last
            sums[number] += int(batch.column("count").to_numpy().sum())
    assert sum(sums.values()) > 1_000


def test_a_missing_file_fails_with_its_name_alone(made: Office, tmp_path: Path) -> None:
    task = task_of(made, tmp_path)
    gone = pieces(task.inputs.records)[0]._replace(path=str(tmp_path / "gone.txt"))
    with pytest.raises(Exception, match=r"gone\.txt"):
        list(Count(task).process(msgspec.json.encode(gone).decode()))
