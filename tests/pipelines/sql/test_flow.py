"""The pipeline of a statement: rows in batches by a coder of their own, and no secret in it."""

import pickle
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow as pa
import pytest

from dpstream.dp_transforms.batches import ArrowBatchCoder
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.pipelines.sql import flow
from dpstream.pipelines.sql.flow import Own, Owners, Task, ToKey, build, unit_of
from dpstream.pipelines.sql.load import load_catalog
from dpstream.pipelines.sql.query_plan import question_of
from dpstream.pipelines.sql.spread import Spread
from dpstream.pipelines.sql.work import Work
from tests.pipelines.sql.asking import KEY
from tests.pipelines.sql.test_spread import DIRECT, JOINED, shop
from tests.pipelines.test_coders import UNPICKLED, parts_of

#: What Beam's reshuffle keeps beside each element: its time stamp.
_STAMPS = "/ReshufflePerKey/"


def task_of(folder: Path) -> tuple[Task, list[Any]]:
    """The task of a statement on a chain of keys."""
    path = shop(folder)
    path.write_text(path.read_text().replace('path = "pages.csv"', 'path = "pages.csv"\n# secret'))
    catalog = load_catalog(path)
    question = question_of(JOINED, catalog)
    spread = Spread(DIRECT, question, catalog, 4)
    work = Work.of(question.per_column, catalog, question.plan, (b"run", question.digest.encode()))
    keys = catalog.secret.of_run("5a" * 16, "")
    task = Task(work, None, spread._catalog, spread._columns, (), 4, str(folder), keys)
    return task, spread._pieces


def coders(task: Task, pieces: list[Any]) -> dict[str, list[Any]]:
    """Of each collection, by its producer, all coders in its coder."""
    pipeline = beam.Pipeline()
    build(pipeline, task, pieces)
    proto, context = pipeline.to_runner_api(return_context=True)
    out = {}
    for transform in proto.components.transforms.values():
        for name in transform.outputs.values():
            if not transform.subtransforms and _STAMPS not in transform.unique_name:
                coder = context.coders.get_by_id(proto.components.pcollections[name].coder_id)
                out[transform.unique_name] = list(parts_of(coder))
    return out


def test_no_row_is_pickled_between_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task, pieces = task_of(tmp_path)
    coder_parts = coders(task, pieces)
    for stage in ("Read", "Own", "Key", "Both", "Owners", "ToShard", "All", "ByShard"):
        here = [
            parts for name, parts in coder_parts.items() if name.split("/")[0].startswith(stage)
        ]
        assert here and all(any(isinstance(p, ArrowBatchCoder) for p in parts) for parts in here)

    def strange(coder_parts: dict[str, list[Any]]) -> list[str]:
        return [
            n
            for n, parts in coder_parts.items()
            if not all(isinstance(p, UNPICKLED) for p in parts)
        ]

    assert strange(coder_parts) == []
    monkeypatch.setattr(flow, "Routed", Any)
    assert strange(coders(task, pieces))  # a lost type is found


def test_neither_key_nor_database_is_in_the_pipeline(tmp_path: Path) -> None:
    task, pieces = task_of(tmp_path)
    pipeline = beam.Pipeline()
    build(pipeline, task, pieces)
    proto = pipeline.to_runner_api().SerializeToString() + pickle.dumps(task)
    assert KEY.encode() not in proto and bytes.fromhex(KEY) not in proto
    assert set(task.catalog.tables) == {"people", "orders", "items", "pages"}
    assert not task.catalog.secret.given
    assert list(task.columns) == ["people", "orders", "items"]  # who owns others comes first
    assert task.columns["people"] == ("uid", "code") and "day" in task.columns["orders"]


def test_rows_get_the_shard_of_whoever_owns_them(tmp_path: Path) -> None:
    """By keys on the way, or by the unit itself: every row of a unit is on one shard."""
    task, _ = task_of(tmp_path)
    assert unit_of(task.catalog.tables["people"]) == "uid"
    assert unit_of(task.catalog.tables["items"]) is None
    task = task._replace(keys=SecretSource(f"file:{tmp_path}/noise.secret"))
    people = pa.RecordBatch.from_pydict(
        {"uid": pa.array([1, 2, None, 3], pa.int64()), "code": ["a", "b", "c", None]}
    )
    orders = pa.RecordBatch.from_pydict(
        {"id": pa.array(range(6)), "person": ["b", "a", "c", None, "x", "a"]}
    )
    own, up = Own(task, "uid"), ToKey(task, 0, "people", ("code",))
    down = ToKey(task, 1, "orders", ("person",))
    for stage in (own, up, down):
        stage.setup()
    [routed] = own.process(people)
    assert routed.column("uid").to_pylist() == [1, 2, 3]
    buckets: dict[int, list[Any]] = {}
    for stage, rows in ((up, routed), (down, orders)):
        for bucket, pair in stage.process(rows):
            buckets.setdefault(bucket, []).append(pair)
    owned_rows = [row for met in buckets.items() for batch in Owners().process(met)
             for row in batch.to_pylist()]  # fmt: skip
    shard = dict(zip(routed.column("uid").to_pylist(), routed.column(flow._SHARD).to_pylist(),
                     strict=True))  # fmt: skip
    assert sorted((row["id"], row[flow._SHARD]) for row in owned_rows) == [
        (0, shard[2]), (1, shard[1]), (5, shard[1]),
    ]  # fmt: skip
    for stage in (own, up, down):
        stage.teardown()
