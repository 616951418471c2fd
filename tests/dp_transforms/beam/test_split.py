"""Rows on their way to shards: few batches however many shards, few bytes however large a row."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from apache_beam.utils.timestamp import MAX_TIMESTAMP, Timestamp

from dpstream.accounting.errors import RunError
from dpstream.dp_transforms import batches
from dpstream.dp_transforms.batches import concat, id_array, ids_of
from dpstream.dp_transforms.beam import split
from dpstream.dp_transforms.beam.buffer import BufferUntilTriggerTime
from dpstream.dp_transforms.beam.split import SplitByShard
from dpstream.dp_transforms.flow import DPStream
from dpstream.state import open as stores
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


def test_text_beyond_what_a_column_holds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are never dropped instead."""

    def overflow(column: pa.ChunkedArray) -> pa.Array:
        raise pa.ArrowInvalid("offset overflow while concatenating arrays")

    monkeypatch.setattr(batches, "_one_array", overflow)
    with pytest.raises(RunError, match="2 GiB"):
        concat([rows_of(2, 3), rows_of(2, 3)], SCHEMA)


def test_concat_takes_batches_from_a_generator_and_keeps_their_order() -> None:
    parts = [rows_of(n, n) for n in (3, 0, 5)]
    found = concat((part for part in parts), SCHEMA)
    assert found.to_pylist() == [row for part in parts for row in part.to_pylist()]
    assert concat(iter(()), SCHEMA).num_rows == 0
    assert concat([parts[0]], SCHEMA).column(1).buffers()[2].address == (
        parts[0].column(1).buffers()[2].address
    ), "a batch alone is not copied"
