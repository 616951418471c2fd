"""Units in memory: a row is what has gone and the records, and counts are the sum of both."""

from base64 import b64decode

import msgspec
import numpy as np

from dpstream.state.arrow import position_ids
from dpstream.state.spanner.batch import Mutations
from dpstream.state.spanner.rows import PLAIN, Layout, UnitRows, admitted_of
from dpstream.state.spanner.units import ROW_MUTATIONS, SpannerUnitShard
from dpstream.state.store import NEVER, Admitted, PerKey
from tests.state.conformance import ids


def records(unit: list[int], pairs: list[int], first: int) -> Admitted:
    """Records at offsets first, first + 1, ... of partition 3, decided at 9."""
    three, nine = (np.full(len(unit), n, np.int32) for n in (3, 9))
    offset = np.arange(first, first + len(unit))
    return Admitted(three, offset, np.array(unit, np.int32), np.array(pairs, np.int32), nine)


def rows_of(units: SpannerUnitShard, slots: list[int], layout: Layout = PLAIN) -> UnitRows:
    """What is written of some units, read again."""
    out = Mutations()
    units.write(out, np.array(slots))
    assert out.count == ROW_MUTATIONS * len(slots)
    ((table, columns, rows),) = out._upsert
    assert table == "Units" and {row[0] for row in rows} == {7} and len(columns) == ROW_MUTATIONS
    return UnitRows.of([b64decode(row[2]) for row in rows], layout)


def test_records_are_appended_to_the_rows_of_their_units() -> None:
    units = SpannerUnitShard(7, complete=True)
    units.intern(ids([1, 2, 3]))
    assert units.take(records([2, 0, 2], [4, 1, 2], 10)).tolist() == [0, 2]
    assert units.take(records([2], [5], 20)).tolist() == [2]
    unit_rows = rows_of(units, [2, 0, 1])
    assert unit_rows.records["offset"].tolist() == [10, 12, 20, 11]
    assert unit_rows.owner.tolist() == [0, 0, 0, 1] and unit_rows.counts.tolist() == [11, 1, 0]
    assert unit_rows.until.tolist() == [NEVER] * 3


def test_counts_of_another_store_stay_whatever_records_come_with_them() -> None:
    units = SpannerUnitShard(7, complete=True)
    slots = units.put(ids([1, 2]), np.array([9, 4]), np.array([5, NEVER]), np.zeros(2, np.int64))
    before = rows_of(units, slots.tolist())
    assert before.counts.tolist() == before.gone.tolist() == [9, 4]
    assert units.put_records(records([0, 0], [3, 2], 10)).tolist() == [0]
    after = rows_of(units, slots.tolist())
    assert after.counts.tolist() == [9, 4] and after.gone.tolist() == [4, 4]
    assert after.until.tolist() == [5, NEVER] and units.counts[:2].tolist() == [9, 4]


def test_all_records_in_memory_are_found_by_position() -> None:
    units = SpannerUnitShard(7, complete=True)
    units.intern(ids([1, 2]))
    units.take(records([1, 0], [4, 1], 10))
    index, admitted = units.admitted()
    at = index.find(position_ids(np.full(2, 3), np.array([10, 11]), np.array([1, 0])))
    assert admitted.pairs[at].tolist() == [4, 1] and admitted.trigger_time.tolist() == [9, 9]


def per_key(*fresh: int) -> PerKey:
    """Records of keys 40, 41, ..., two windows each from window 6 on."""
    rows = len(fresh)
    both = np.full(rows, 3, np.uint64)
    first = np.full(rows, 6, np.int32)
    return PerKey(
        np.arange(40, 40 + rows, dtype=np.uint64), first, both, np.array(fresh, np.uint64)
    )


def test_a_bound_per_key_is_kept_in_the_rows() -> None:
    """Which windows of a key, and first pairs, also of records that have expired."""
    units = SpannerUnitShard(7, complete=True, layout=Layout(per_key=True))
    slots = units.put(ids([1, 2]), np.array([9, 4]), np.full(2, NEVER), np.array([5, 3]))
    mine = msgspec.structs.replace(records([0, 1, 0], [2, 2, 2], 10), per_key=per_key(3, 1, 0))
    units.put_records(mine)
    unit_rows = rows_of(units, slots.tolist(), Layout(per_key=True))
    assert unit_rows.counts.tolist() == [9, 4] and unit_rows.gone.tolist() == [5, 2]
    assert unit_rows.indices.tolist() == [5, 3]
    assert unit_rows.fresh is not None and unit_rows.fresh.tolist() == [3, 2]
    back = admitted_of(unit_rows.records, unit_rows.owner)
    assert back.per_key is not None and back.unit.tolist() == [0, 0, 1]
    assert back.per_key.keys.tolist() == [40, 42, 41]
    assert back.per_key.fresh.tolist() == [3, 0, 1] and back.per_key.first.tolist() == [6] * 3


def test_a_row_is_as_large_as_its_records() -> None:
    units = SpannerUnitShard(7, complete=True)
    units.intern(ids([1, 2]))
    units.take(records([0, 0], [1, 1], 10))
    few, none = units.row_bytes(np.array([0, 1])).tolist()
    assert few - none == 2 * PLAIN.record.itemsize and none > 16 + 16


def test_a_complete_shard_asks_nobody() -> None:
    units = SpannerUnitShard(7, complete=True)
    units.load(None, ids([1, 2]))  # type: ignore[arg-type]
    assert units.table.size == 0
