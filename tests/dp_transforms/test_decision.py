"""Records of a unit shard: which copy counts, and which windows of a record are admitted.

Order and number of the records of a unit that count.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from dpstream.dp_transforms.decision import admit, firsts, stamp_order, taken_pairs
from dpstream.state.arrow import position_ids
from dpstream.state.keycounts import KeyCounts, Wanted
from tests.streams import make_plan


def test_stamp_order_sorts_ties_by_position() -> None:
    rng = np.random.default_rng(2)
    for size in (0, 1, 2, 500):
        stamp = rng.integers(-5, 5, size)
        partition = rng.integers(0, 3, size).astype(np.int32)
        offset = rng.permutation(size).astype(np.int64)
        order = stamp_order(stamp, partition, offset)
        expected = np.lexsort((offset, partition, stamp))
        assert order.tolist() == expected.tolist()


def test_equal_positions_of_two_units_are_two_records() -> None:
    """A source that reuses positions must not let one unit push out another's record."""
    counts = np.zeros(2, np.int32)
    where = np.zeros(2, np.int32), np.zeros(2, np.int64)
    wanted = np.ones(2, np.int64)
    taken, _ = admit(np.array([0, 1]), np.zeros(2, np.int64), *where, wanted, counts, 3)
    assert taken.tolist() == [1, 1]
    taken, _ = admit(np.array([1, 1]), np.zeros(2, np.int64), *where, wanted, counts, 3)
    assert taken.tolist() == [1, 0] and counts.tolist() == [1, 2]
    # Delivered as 1, 0, 1 the unit's own repetition is still one record.
    where = np.zeros(3, np.int32), np.zeros(3, np.int64)
    between = np.array([1, 0, 1])
    counts[:] = 0
    taken, _ = admit(between, np.zeros(3, np.int64), *where, np.ones(3, np.int64), counts, 3)
    assert taken.tolist() == [1, 1, 0] and counts.tolist() == [1, 1]


def test_the_stamp_comes_before_partition_and_offset() -> None:
    """C = 1: of three records the first by its stamp, then by its partition, then by its offset."""
    for stamp, partition, offset in (
        ([7, 5, 6], [0, 2, 1], [0, 2, 1]),
        ([5, 5, 6], [1, 0, 0], [0, 2, 1]),
        ([5, 5, 6], [1, 1, 0], [8, 3, 0]),
    ):
        where = np.array(stamp), np.array(partition, np.int32), np.array(offset)
        unit, wanted = np.zeros(3, np.int64), np.ones(3, np.int64)
        taken, _ = admit(unit, *where, wanted, np.zeros(1, np.int32), 1)
        assert taken.tolist() == [0, 1, 0]


def test_a_million_records_of_one_unit_stay_c_pairs() -> None:
    plan = make_plan(contributions=5)
    rng = np.random.default_rng(1)
    size = 1_000_000
    stamp = rng.integers(0, 1000, size)
    counts = np.zeros(1, np.int32)
    taken, _ = admit(
        np.zeros(size, np.int64),
        stamp,
        np.zeros(size, np.int32),
        np.arange(size),
        np.ones(size, np.int64),
        counts,
        plan.privacy.contributions,
    )
    assert taken.sum() == counts[0] == 5
    assert set(np.flatnonzero(taken)) == set(np.lexsort((np.arange(size), stamp))[:5])


@pytest.mark.parametrize(
    ("contributions", "before", "now"), [(5, 0.62, 0.74), (10, 0.70, 0.84), (20, 0.77, 0.91)]
)
def test_repeats_that_take_nothing_leave_room_for_keys(
    contributions: int, before: float, now: float
) -> None:
    """Share of (unit, key) pairs that count at all: 5,000 units with up to 60 keys, up to 300
    records on each, both heavy-tailed.  (Commits of a public repository: .72 and .84 at C = 10.)"""
    rng = np.random.default_rng(1)
    keys = np.minimum(np.floor(rng.pareto(1.5, 5_000) + 1), 60).astype(np.int64)
    unit = np.repeat(np.arange(5_000), keys)
    records = np.minimum(np.floor(rng.pareto(0.9, len(unit)) + 1), 300).astype(np.int64)
    order = rng.permutation(records.sum())
    pair = np.repeat(np.arange(len(unit)), records)[order]
    unit, rows = unit[pair], np.arange(len(pair))
    place, ones = (np.zeros(len(rows), np.int32), rows), np.ones(len(rows), np.int64)
    taken, _ = admit(unit, rows, *place, ones, np.zeros(5_000, np.int32), contributions)
    assert len(np.unique(pair[taken > 0])) / records.size == pytest.approx(before, abs=0.01)
    counters = np.zeros(5_000, np.int32), np.zeros(5_000, np.int32)
    none = np.zeros(len(rows), np.int32)
    of = Wanted(unit, *place, np.zeros(len(rows), np.int64), ones, pair.astype(np.uint64), none)
    admission = KeyCounts().admit(rows, of, *counters, contributions, 1, 0)
    assert (admission.pairs > 0).sum() / records.size == pytest.approx(now, abs=0.01)
    assert counters[0].max() == contributions


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
    got = taken_pairs(taken, fresh, rank)
    assert list(zip(*(column.tolist() for column in got), strict=True)) == expected
    none = taken_pairs(taken[:0], fresh[:0], rank[:0])
    assert [len(column) for column in none] == [0, 0, 0]
