"""What all sources hand over: batches with positions, refusals of one form (see backpressure)."""

import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.arrays import Int64
from dpstream.dp_transforms.batches import DEAD_LETTER_SCHEMA, OFFSET, PARTITION
from dpstream.pipelines.connectors.inputs import positioned, refusal
from dpstream.pipelines.formats.rows import Reason, Refused, Rows


@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_batches_say_where_their_first_row_stands(size: int) -> None:
    rows = Rows(40, pa.RecordBatch.from_pydict({"x": list(range(7))}))
    batches = list(positioned(rows, 5, size))
    assert pa.Table.from_batches([b.replace_schema_metadata(None) for b in batches])[
        "x"
    ].to_pylist() == list(range(7))
    for batch in batches:
        first = str(40 + batch["x"][0].as_py())
        assert batch.schema.metadata == {PARTITION: b"5", OFFSET: first.encode()}
        assert 0 < batch.num_rows <= size


@pytest.mark.parametrize("partition", [3, np.array([3, 3], np.int64)])
def test_a_refusal_has_position_and_reason_and_nothing_else(partition: int | Int64) -> None:
    refused = Refused(np.array([4, 9], np.int64), [Reason.EMPTY.value, Reason.MALFORMED.value])
    batch = refusal(refused, partition)
    assert batch.schema.equals(DEAD_LETTER_SCHEMA)
    assert [tuple(row.values()) for row in batch.to_pylist()] == [
        (3, 4, "empty"), (3, 9, "malformed"),
    ]  # fmt: skip
