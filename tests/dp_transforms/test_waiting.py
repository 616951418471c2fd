"""Notes of the partitions that a later pass has to read: never one too few."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.fields import Field
from dpstream.dp_transforms.batches import empty, record_schema
from dpstream.dp_transforms.waiting import note_waiting, waiting_partitions
from tests.streams import begin, make_plan


def rows(partitions: list[int], plan: object) -> pa.RecordBatch:
    """Canonical records that stand in these partitions."""
    schema = record_schema(plan)  # type: ignore[arg-type]
    size = len(partitions)
    given = {"partition": pa.array(partitions, pa.int32()), "unit": pa.array([b"u" * 16] * size)}
    arrays = []
    for field in schema:
        column = given.get(field.name)
        if column is None:
            column = (
                pa.array(np.zeros(size, np.int64))
                if pa.types.is_integer(field.type)
                else [""] * size
            )
        arrays.append(pa.array(column).cast(field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def test_all_shards_together(tmp_path: Path) -> None:
    plan = make_plan()
    run = begin(plan, tmp_path / "s.db", shards=2)
    store, read = run.open(), [0, 1, 2, 5]
    assert waiting_partitions(store, 2, 7, read) == read, "nobody has said anything"
    note_waiting(plan, store, 0, 7, rows([5, 1, 5], plan))
    assert waiting_partitions(store, 2, 7, read) == read, "one has not"
    note_waiting(plan, store, 1, 7, empty(record_schema(plan)))
    assert waiting_partitions(store, 2, 7, read) == [1, 5]
    assert waiting_partitions(store, 2, 8, read) == read, "that was of another pass"
    note_waiting(plan, store, 1, 8, empty(record_schema(plan)))
    assert waiting_partitions(store, 2, 8, read) == read


@pytest.mark.parametrize("waits", [True, False])
def test_ids_do_not_say_where_records_stand(tmp_path: Path, waits: bool) -> None:
    import msgspec

    plan = msgspec.structs.replace(make_plan(), record_id=Field("id"))
    run = begin(plan, tmp_path / "s.db", shards=1)
    note_waiting(plan, run.open(), 0, 7, rows([9] * waits, plan))
    assert waiting_partitions(run.open(), 1, 7, [0, 1]) == ([0, 1] if waits else [])
