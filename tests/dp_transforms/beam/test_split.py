"""Rows on their way to shards: few batches however many shards, few bytes however large a row."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from apache_beam.utils.timestamp import MAX_TIMESTAMP, Timestamp

from dpstream.dp_transforms.batches import ids_of
from dpstream.dp_transforms.beam import split
from dpstream.dp_transforms.beam.buffer import BufferUntilTriggerTime
from dpstream.dp_transforms.beam.split import SplitByShard
from dpstream.dp_transforms.flow import DPStream
from dpstream.state import open as stores
from dpstream.state.arrow import id_array
from tests.dp_transforms.test_flow import in_memory, through_beam
from tests.streams import begin, generate, make_plan

SHARDS = 24
SCHEMA = pa.schema([pa.field("unit", pa.binary(16), nullable=False), ("text", pa.string())])


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    stores.close_all()


def test_many_shards_are_not_their_square_of_batches(
    store_paths: Iterator[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What every key shard gets is split from the pairs of all unit shards together."""
    held: dict[int, int] = {}
    real = BufferUntilTriggerTime.process

    def process(self: BufferUntilTriggerTime, element: Any, *state: Any, **more: Any) -> Any:
        if self._ticks and element[1].num_rows:
            held[element[0]] = held.get(element[0], 0) + 1
        return real(self, element, *state, **more)

    functools.update_wrapper(process, real)  # Beam looks at the names of the arguments
    monkeypatch.setattr(BufferUntilTriggerTime, "process", process)
    plan = make_plan()
    source = generate(plan).batches(1000)
    expected = in_memory(plan, next(store_paths), source)[0]
    run = begin(plan, next(store_paths), SHARDS)
    assert through_beam(DPStream(plan, run), source, tmp_path / "out")[0] == expected
    assert held and max(held.values()) == 1


def rows_of(count: int, size: int) -> pa.RecordBatch:
    ids = id_array(ids_of(pa.array([n.to_bytes(16, "big") for n in range(count)], pa.binary(16))))
    return pa.RecordBatch.from_arrays([ids, pa.array(["x" * size] * count)], schema=SCHEMA)


@pytest.mark.parametrize(("size", "most"), [(8, 5000), (1024, 300)])
def test_large_rows_are_split_sooner(size: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split, "SPLIT_BUFFER_ROWS", 5000)
    monkeypatch.setattr(split, "SPLIT_BUFFER_BYTES", 256 << 10)
    dofn = SplitByShard(split.unit_ids, 3, SCHEMA)
    dofn.setup()
    dofn.start_bundle()
    gathered = out = 0
    for _ in range(300):
        out += sum(pair.value[1].num_rows for pair in dofn.process(rows_of(40, size), Timestamp(0)))
        gathered += 40
        assert gathered - out <= most
    assert out
    out += sum(pair.value[1].num_rows for pair in dofn.finish_bundle())
    assert out == gathered
    assert dofn._least == MAX_TIMESTAMP
