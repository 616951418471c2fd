"""What messages of a partition become: each by itself, in runs of consecutive offsets."""

import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.errors import instance
from dpstream.pipelines.connectors.kafka.reader import (
    APPEND_TIME,
    LOG_APPEND_TIME,
    PartitionMessages,
    parts,
)
from dpstream.pipelines.formats.lines import MAX_LINE_BYTES, Objects
from dpstream.pipelines.formats.rows import Refused, Rows

COLUMNS = ("a", APPEND_TIME)


def messages(*values: bytes | None, kind: int = LOG_APPEND_TIME) -> PartitionMessages:
    count = len(values)
    offsets, stamps = np.arange(count) * 1, 1_000 + np.arange(count)
    return PartitionMessages(offsets, np.full(count, kind), stamps, list(values))


def test_rows_have_the_brokers_stamp() -> None:
    [rows] = parts(messages(b'{"a": 1}', b'{"a": "x"}'), Objects(["a"]), COLUMNS)
    assert not isinstance(rows, Refused)
    assert rows.batch.schema.names == list(COLUMNS) and rows.batch["a"].to_pylist() == ["1", "x"]
    assert rows.batch[APPEND_TIME].cast(pa.int64()).to_pylist() == [1_000_000, 1_001_000]


@pytest.mark.parametrize(
    ("value", "reason"),
    [(None, "empty"), (b"", "empty"), (b"no", "malformed"),
     (b'{"a": "' + b"x" * MAX_LINE_BYTES + b'"}', "message_too_long")],
)  # fmt: skip
def test_a_message_that_is_none_decides_about_itself(value: bytes | None, reason: str) -> None:
    refused, *rows = parts(messages(b'{"a": 1}', value, b'{"a": 3}'), Objects(["a"]), COLUMNS)
    assert isinstance(refused, Refused)
    assert (refused.offsets.tolist(), refused.reasons) == ([1], [reason])
    assert [instance(part, Rows).offset for part in rows] == [0, 2]


def test_stamps_of_producers_are_refused() -> None:
    batch = messages(b'{"a": 1}', kind=1)
    [refused] = parts(batch, Objects(["a"]), COLUMNS)
    assert isinstance(refused, Refused) and refused.reasons == ["not_the_brokers_stamp"]
    assert batch.last_append == -1 and messages(b"", b"").last_append == 1_001
