"""What all sources hand over: batches with positions, refusals of one form (see backpressure).

Readers that are kept between bundles: one caller each, as many as may wait, none for ever.
"""

import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.arrays import Int64
from dpstream.dp_transforms.batches import DEAD_LETTER_SCHEMA, OFFSET, PARTITION
from dpstream.pipelines.connectors import inputs as pool
from dpstream.pipelines.connectors.inputs import ReaderPool, positioned, refusal
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


class Counted:
    """A reader that knows whether it is closed."""

    made: list["Counted"]

    def __init__(self) -> None:
        self.used, self.closed = 0.0, False
        self.made.append(self)

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def none_made() -> None:
    Counted.made = []


def test_a_reader_has_one_caller_and_goes_on() -> None:
    readers = ReaderPool[Counted]()
    with readers.lend("a", Counted) as first, readers.lend("a", Counted) as second:
        assert first is not second
    with readers.lend("b", Counted) as other, readers.lend("a", Counted) as again:
        assert again in (first, second) and other not in (first, second)
    assert len(Counted.made) == 3 and not any(reader.closed for reader in Counted.made)


def test_one_that_fails_is_not_used_again() -> None:
    readers = ReaderPool[Counted]()
    with pytest.raises(ValueError), readers.lend("a", Counted) as first:
        raise ValueError
    with readers.lend("a", Counted) as second:
        assert first.closed and second is not first


def test_no_more_are_kept_than_may_wait() -> None:
    """What waits in a second reader of the same would come late."""
    readers = ReaderPool[Counted](keep=1)
    with readers.lend("a", Counted), readers.lend("a", Counted):
        pass
    assert [reader.closed for reader in Counted.made].count(False) == 1
    with readers.lend("a", Counted) as lent_reader:
        assert not lent_reader.closed and len(Counted.made) == 2


def test_unused_ones_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    readers = ReaderPool[Counted]()
    with readers.lend("a", Counted) as first:
        pass
    with readers.lend("b", Counted):
        assert not first.closed
    monkeypatch.setattr(pool, "UNUSED_SECONDS", -1.0)
    with readers.lend("c", Counted):
        assert first.closed
    with readers.lend("a", Counted) as second:
        assert second is not first
    readers.close()
    assert all(reader.closed for reader in Counted.made)
