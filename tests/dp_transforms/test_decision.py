"""Records of a unit shard: which copy counts, and which windows of a record are admitted."""

from types import SimpleNamespace

import numpy as np

from dpstream.dp_transforms.decision import _taken, firsts
from dpstream.state.arrow import position_ids


def test_offsets_that_differ_in_high_bits_are_two_positions() -> None:
    """Ids of records take the place of offsets: all 63 bits of them count."""
    batch = SimpleNamespace(
        stamp=np.array([3, 3, 3, 3]),
        partition=np.array([0, 0, 1, 0], np.int32),
        offset=np.array([5, 5 + 2**32, 5, 5]),
        unit=np.array([0, 0, 0, 1]),
        digest=None,
    )
    ids = position_ids(batch.partition, batch.offset, batch.unit)
    assert firsts(np.arange(4), batch, ids).tolist() == [0, 1, 2, 3]  # type: ignore[arg-type]


def test_windows_and_indices_of_a_record_are_read_from_bits() -> None:
    """Slow and fast agree; a pair that is not the first of its key has no index."""
    rng = np.random.default_rng(3)
    taken = rng.integers(0, 1 << 63, 200, np.uint64)
    taken >>= rng.integers(0, 64, 200).astype(np.uint64)
    taken[0] = (1 << 64) - 1
    fresh = taken & rng.integers(0, 1 << 63, 200, np.uint64)
    rank = rng.integers(0, 50, 200).astype(np.int32)
    expected = []
    for row, (bits, first) in enumerate(zip(taken.tolist(), fresh.tolist(), strict=True)):
        index = int(rank[row])
        for nth in range(64):
            if bits >> nth & 1:
                expected.append((row, nth, index if first >> nth & 1 else -1))
            index += first >> nth & 1
    got = _taken(taken, fresh, rank)
    assert list(zip(*(column.tolist() for column in got), strict=True)) == expected
    none = _taken(taken[:0], fresh[:0], rank[:0])
    assert [len(column) for column in none] == [0, 0, 0]
