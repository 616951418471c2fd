"""Arrow blobs: the same bytes back, a log that is replayed, records by position.

Digests: every bit, every place; one error for what libraries make of damaged bytes.
"""

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from dpstream.state import arrow, seals
from dpstream.state.arrow import (
    AdmissionRow,
    count_keys,
    indexed,
    key_pieces,
    no_records,
    piece_blobs,
    position_ids,
    records_of,
    replay_keys,
    replay_units,
    step_blobs,
    unit_blobs,
)
from dpstream.state.keycounts import Wanted
from dpstream.state.seals import damaged, sealed, sealed_text, unsealed, unsealed_text
from dpstream.state.store import Admitted, KeyShard, PerKey, StepResult, UnitShard
from tests.golden.refusals import Refused
from tests.state.conformance import KEY_SCHEMA, STREAMS, change, ids, picture


def test_bytes_that_are_no_batch(refused: Refused) -> None:
    batch_bytes = arrow.to_bytes(pa.RecordBatch.from_pydict({"a": [1, 2]}))
    for content in (b"", b"\0" * 40, batch_bytes[:50], batch_bytes[:-60]):
        caught = refused(arrow.from_bytes, content)
        assert str(caught) == str(damaged())


def test_a_batch_has_the_bytes_of_a_writer() -> None:
    batch = pa.RecordBatch.from_pydict({"a": [1, None, 3], "b": ["x", "", None]})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    assert arrow.to_bytes(batch) == sink.getvalue().to_pybytes()
    many = pa.RecordBatch.from_pydict({"a": [7] * 4000})
    small = arrow.to_bytes(many, "lz4")
    assert arrow.from_bytes(small).equals(many) and len(small) < len(arrow.to_bytes(many)) / 4


def logged(steps: list[list[int]]) -> tuple[KeyShard, list[tuple[int, tuple[bytes, bytes, bytes]]]]:
    """States after steps that change these keys, and what was logged of each."""
    states, log = KeyShard(KEY_SCHEMA, STREAMS), []
    for trigger, keys in enumerate(steps, 1):
        changed, slots, units = change(states, keys, trigger)
        none = pa.RecordBatch.from_pydict({"page": pa.array([], pa.string())})
        result = StepResult(changed, changed, slots, units, none, changed, False)
        log.append((trigger, step_blobs(states, result)))
        states.mark_committed(trigger)
    return states, log


def replayed(log: list[tuple[int, tuple[bytes, bytes, bytes]]]) -> KeyShard:
    states = KeyShard(KEY_SCHEMA, STREAMS)
    replay_keys(states, log)
    return states


@pytest.mark.parametrize("gone", [0, 1])
def test_a_log_with_a_gap_is_damaged(gone: int, refused: Refused) -> None:
    _, log = logged([[1], [2], [3]])
    del log[gone]
    refused(lambda: replayed(log))


def test_pieces_of_a_snapshot_hold_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks of a step that was taken in part too, until the next step is committed."""
    monkeypatch.setattr(arrow, "_PIECE_ROWS", 2)
    states, _ = logged([[1, 2, 3], [4, 5]])
    states.done[[0, 4]] = True
    before, log = 0, []
    for piece in key_pieces(states):
        slots = np.arange(before, before + len(piece.units))
        log.append((0, piece_blobs(piece, slots)))
        before += len(slots)
    assert len(log) == 3
    replica = replayed([*log, (1, None), (2, None)])  # type: ignore[list-item]
    assert replica.committed == 2 and replica.done[: replica.size].tolist() == [
        True,
        *[False] * 3,
        True,
    ]
    states.done[:], replica.done[:] = False, False
    assert picture(replica) == picture(states)
    again, last = logged([[1, 2, 3], [4, 5], [1]])
    assert not replayed([*log, (1, None), (2, None), last[-1]]).done.any()  # type: ignore[list-item]
    assert again.committed == 3


def records(*rows: tuple[int, int, int, int, int], ranks: list[int] | None = None) -> Admitted:
    """(partition, offset, unit, pairs, trigger time) by row."""
    columns = np.array(rows).T.astype(np.int32)
    rank = None if ranks is None else np.array(ranks, np.int32)
    partition, offset, unit, pairs, trigger_time = columns
    return Admitted(partition, offset.astype(np.int64), unit, pairs, trigger_time, rank)


def test_contents_of_one_id_are_records_of_their_own() -> None:
    two = records((0, 1, 0, 1, 1), (0, 1, 0, 3, 9), (0, 2, 0, 2, 1))
    digest = np.array([5, (1 << 64) - 1, 5], np.uint64)
    rows = commits(UnitShard(), msgspec.structs.replace(two, digest=digest))
    index, unique_records = indexed(records_of(rows))
    assert unique_records.digest is not None and unique_records.digest.tolist() == digest.tolist()
    where = np.array([0, 0]), np.array([1, 1]), np.array([0, 0])
    at = index.find(arrow.position_ids(*where, digest[:2]))
    assert unique_records.pairs[at].tolist() == [1, 3]
    assert index.find(arrow.position_ids(*where)).tolist() == [-1, -1]


def commits(units: UnitShard, *decided: Admitted) -> list[AdmissionRow]:
    return [
        AdmissionRow(trigger_time, arrow.from_bytes(new), records_blob)
        for trigger_time, admitted in enumerate(decided, 1)
        for _, new, records_blob in unit_blobs(units, admitted)
    ]


def test_decisions_are_replayed_with_their_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow, "_PIECE_ROWS", 1)
    units = UnitShard()
    slots = units.intern(ids([7, 8, 9]))
    units.period_end[slots] = [4, 5, 6]
    admitted = records((0, 100, 2, 3, 1), (1, 40, 0, 1, 1), (0, 7, 2, 2, 1), ranks=[0, 4, 3])
    rows = commits(units, admitted)
    assert len(rows) == 3  # a unit, and a record that may be of a later one, in each
    empty = AdmissionRow(2, rows[0].units, arrow.records_blob(no_records()))
    replica, admitted_records = UnitShard(), records_of([*rows, empty])
    replay_units(replica, rows)
    assert replica.table.ids.tolist() == units.table.ids.tolist() and replica.decided == 1
    assert replica.counts[:3].tolist() == [1, 0, 5] and replica.period_end[:3].tolist() == [4, 5, 6]
    assert admitted_records.offset.tolist() == [100, 40, 7] and admitted_records.rank is not None
    assert admitted_records.rank.tolist() == [0, 4, 3] and admitted_records.unit.tolist() == [
        2,
        0,
        2,
    ]
    assert len(records_of([]).offset) == 0


def test_counts_of_a_snapshot_are_no_sums() -> None:
    """Records of some were dropped; what they counted stays."""
    units = UnitShard()
    slots = units.intern(ids([7, 8]))
    units.counts[slots] = [5, 2]
    ((before, new, records_blob),) = unit_blobs(units, records((0, 1, 1, 1, 9)), all_units=True)
    replica = UnitShard()
    replay_units(replica, [AdmissionRow(9, arrow.from_bytes(new), records_blob)])
    assert before == 0 and replica.counts[:2].tolist() == [5, 2] and replica.period_end[0] > 1 << 30


def test_a_bound_per_key_is_replayed_from_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """First pairs by unit, and how many of each (unit, window, key) were admitted; a snapshot says
    the first pairs of records that have gone."""
    monkeypatch.setattr(arrow, "_PIECE_ROWS", 2)
    units = UnitShard()
    units.intern(ids([7, 8]))
    bits = (np.array(column, np.uint64) for column in ([1, 3, 1], [1, 2, 0]))
    per_key = PerKey(np.full(3, 40, np.uint64), np.array([6, 6, 6], np.int32), *bits)
    three = records((0, 1, 0, 1, 1), (0, 2, 1, 2, 1), (0, 3, 0, 1, 1), ranks=[0, 0, 1])
    admitted = msgspec.structs.replace(three, per_key=per_key)
    replica = UnitShard()
    rows = commits(units, admitted)
    replay_units(replica, rows)
    assert replica.counts[:2].tolist() == [2, 2] and replica.indices[:2].tolist() == [1, 1]
    per_key_columns = records_of(rows).per_key
    assert per_key_columns is not None and per_key_columns.fresh.tolist() == [1, 2, 0]
    # Of key 40 and window 6 unit 7 has two, unit 8 one, which also has one of window 7.
    unit_windows = [(0, 6), (1, 6), (1, 7), (0, 7)]
    for bound, open_ in ((1, [0, 0, 0, 1]), (2, [0, 1, 1, 1]), (3, [1, 1, 1, 1])):
        unit, window = np.array(unit_windows).T
        of = Wanted(unit, np.zeros(4, np.int32), np.arange(4), window, np.ones(4, np.int64),
                    np.full(4, 40, np.uint64), np.zeros(4, np.int32))  # fmt: skip
        again = UnitShard()
        replay_units(again, rows)
        assert again.keys.size == 0  # only a shard that decides needs them
        count_keys(again, rows)
        counters = again.counts, again.indices
        assert again.keys.admit(np.arange(4), of, *counters, 9, bound, 0).pairs.tolist() == open_
    units.counts[:2], units.indices[:2] = [5, 4], [3, 2]
    snapshot = [
        AdmissionRow(9, arrow.from_bytes(new), records_blob)
        for _, new, records_blob in unit_blobs(units, admitted.at(np.array([1])), all_units=True)
    ]
    later = UnitShard()
    replay_units(later, snapshot)
    count_keys(later, snapshot)
    assert later.counts[:2].tolist() == [5, 4] and later.indices[:2].tolist() == [3, 2]
    assert later.keys.size == 2


def test_a_position_that_stands_twice_shifts_no_other() -> None:
    admitted_records = records((0, 1, 0, 1, 9), (0, 2, 0, 2, 9), (0, 1, 0, 3, 9), (0, 4, 0, 4, 9))
    index, unique_records = indexed(admitted_records)
    at = index.find(position_ids(*(np.array(c) for c in ([0, 0, 0], [1, 2, 4], [0, 0, 0]))))
    assert unique_records.pairs[at].tolist() == [1, 2, 4]


@pytest.mark.parametrize("size", [0, 1, 100])
def test_every_bit_counts(size: int, refused: Refused) -> None:
    data = bytes(range(size))
    blob = sealed("steps/1/2/3/keys", data)
    assert unsealed("steps/1/2/3/keys", blob) == data and len(blob) == size + seals.SIZE
    for bit in range(8 * len(blob)):
        other = bytearray(blob)
        other[bit // 8] ^= 1 << bit % 8
        refused(unsealed, "steps/1/2/3/keys", bytes(other))


@pytest.mark.parametrize(
    "name", ["steps/1/2/3/states", "steps/12/3/keys", "carried/1/2/3/keys", ""]
)
def test_another_place_counts(name: str, refused: Refused) -> None:
    refused(lambda: unsealed(name, sealed("steps/1/2/3/keys", b"data")))


@pytest.mark.parametrize("blob", [None, "text", 7, 1.5, b"", b"short"])
def test_what_is_no_blob_any_more(blob: object, refused: Refused) -> None:
    """A flip in a record's header makes a number, a text or NULL of a blob."""
    refused(lambda: unsealed("x", blob))


def test_texts(refused: Refused) -> None:
    text = sealed_text("meta/note.x/value", "a b")
    assert unsealed_text("meta/note.x/value", text) == "a b" and text.endswith(" a b")
    broken = (text[:-1], text.upper(), "\udcff" + text[1:], text + "\udc80", "a b", "", None, b"x")
    for other in broken:
        refused(unsealed_text, "meta/note.x/value", other)
    refused(lambda: unsealed_text("meta/note.y/value", text))
