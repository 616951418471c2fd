"""A position that is there twice is seen, whatever its numbers; nothing else is."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpstream.accounting.errors import UsageError
from dpstream.dp_transforms.batches import ID
from dpstream.dp_transforms.positions import repeats, require_once

PLACES = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 2), st.integers(2**23 - 1, 2**31 - 1)),
        st.one_of(st.integers(0, 3), st.integers(2**40 - 1, 2**63 - 1)),
    ),
    max_size=12,
)


@given(PLACES)
def test_repeats_are_those_of_a_set(places: list[tuple[int, int]]) -> None:
    partition = np.array([p for p, _ in places], np.int32)
    offset = np.array([o for _, o in places], np.int64)
    before = partition.copy(), offset.copy()
    assert repeats(partition, offset) == (len(set(places)) < len(places))
    assert (partition == before[0]).all() and (offset == before[1]).all()


def _records(offsets: list[int]) -> pa.RecordBatch:
    rows = len(offsets)
    return pa.RecordBatch.from_pydict({
        "unit": pa.array([bytes(16)] * rows, ID), "partition": pa.array([0] * rows, pa.int32()),
        "offset": pa.array(offsets, pa.int64()),
    })  # fmt: skip


def test_records_of_one_position_are_refused_with_the_adapters_name() -> None:
    require_once(_records([]))
    require_once(_records([3, 1, 2]))
    with pytest.raises(UsageError, match="share a position") as error:
        require_once(_records([3, 1, 3]))
    assert "dpstream.Rows" in error.value.fix and "dpstream.ReadTable" in error.value.fix
