"""Arrow blobs: the same bytes back, a log that is replayed, records by position.

Digests: every bit, every place; one error for what libraries make of damaged bytes.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.plan.timeline import Timeline
from dpstream.dp_transforms.run import begin_run
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
from dpstream.state.open import identity_of, open_store
from dpstream.state.retention_store import ReshardProgress, RetainedWindows
from dpstream.state.seals import damaged, sealed, sealed_text, unsealed, unsealed_text
from dpstream.state.sqlite.file import create_store
from dpstream.state.sqlite.store import SqliteStore
from dpstream.state.store import (
    Admitted,
    KeyShard,
    PerKey,
    RunIdentity,
    StepResult,
    Store,
    UnitShard,
)
from dpstream.state.transfer import DELIVERED, NOTES, Abandon, backup, copy_store, reshard, restore
from tests.golden.refusals import Refused
from tests.state.conformance import KEY_SCHEMA, STREAMS, change, ids, picture
from tests.state.life_conformance import LINE, OLD, everything_of, fill_step, sample
from tests.streams import KEYS, make_plan


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
        log.append((trigger, step_blobs(states, [result])))
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


# A store by its URL, backed up, restored and resharded: in place as a whole, or as it was.


Make = Callable[..., SqliteStore]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[SqliteStore] = []

    def store(**changes: object) -> SqliteStore:
        identity: RunIdentity = msgspec.structs.replace(OLD, **changes)
        path = tmp_path / f"{len(made)}.db"
        create_store(path, identity)
        made.append(SqliteStore(path, KEY_SCHEMA, STREAMS))
        return made[-1]

    yield store
    for one in made:
        one.close()


@pytest.mark.parametrize(("time", "windows"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_windows_that_begin_before_are_given_up(time: int, windows: int) -> None:
    timeline = Timeline(0, None, 60, 40, 10)
    assert Abandon(time, 3).windows(timeline) == windows


def test_notes_of_the_run_go_along_and_those_of_a_copy_do_not(make: Make) -> None:
    source, target = make(), make()
    for name in (*NOTES[:2], DELIVERED, "complete"):
        source.set_metadata(name, f"of {name}")
    source.retained_windows = RetainedWindows(3)
    copy_store(source, target, LINE)
    assert [target.metadata(name) for name in NOTES[:2]] == ["of token", "of ledger"]
    assert target.retained_windows == RetainedWindows(3)
    assert target.metadata(DELIVERED) is None and target.metadata("complete") is None


def test_reshards_are_kept_while_any_key_is_ahead(make: Make) -> None:
    """Through copies of copies, and not beyond the step where the others have caught up."""
    first = make()
    sample(first, uneven=True)
    second, third = make(shards=3), make(shards=1)
    copy_store(first, second, LINE)
    assert second.reshards == {1: [ReshardProgress((1, 0))]}
    copy_store(second, third, LINE)
    assert third.reshards == second.reshards and everything_of(third) == everything_of(first)
    even, again = make(), make(shards=3)
    sample(even)
    copy_store(even, again, LINE)
    assert again.reshards == {}


def test_a_part_of_a_step_is_refused_where_shards_are_apart(make: Make, refused: Refused) -> None:
    """Its keys would be ahead of their own shard, which no reshard can say."""
    source = make()
    piece = _piece_of(make())
    with source.filling():
        source.put_step(0, 0, 1, None)
        source.put_keys(0, 0, piece._replace(done=np.ones(len(piece.units), np.bool_)))
    fill_step(source, 0, 1, 1, [1])
    even = make(shards=3)
    copy_store(source, even, LINE)  # both at 1: the marks go along
    assert any(p.done.any() for shard in range(3) for p in even.key_pieces(0, shard))
    behind = make()
    with behind.filling():
        behind.put_step(0, 0, 1, None)
        behind.put_keys(0, 0, piece._replace(done=np.ones(len(piece.units), np.bool_)))
        behind.put_keys(0, 1, _piece_of(make(), shard=1))
    refused(lambda: copy_store(behind, make(shards=3), LINE))


def _piece_of(store: SqliteStore, shard: int = 0):  # type: ignore[no-untyped-def]
    fill_step(store, 0, shard, 1, [shard, shard + 2])
    (piece,) = store.key_pieces(0, shard)
    return piece


def test_abandoning_keeps_releases_and_spent_units(make: Make) -> None:
    source, target = make(), make(epoch=1)
    sample(source)
    copy_store(source, target, LINE, abandon=Abandon(4, 7))
    assert target.retained_windows == RetainedWindows(0, 2, ((0, 2),))
    assert not list(target.key_pieces(1, 0)) and target.unit_progress(0).decided == 4
    counts = [int(c) for piece in target.unit_pieces(0) for c in piece.counts]
    assert counts and set(counts) == {7}


PLAN, OTHER = make_plan(), make_plan(triggers=6)


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A store of two shards with notes."""
    path = f"sqlite:{tmp_path / 'store' / 's.db'}"
    run, _ = begin_run(PLAN, KEYS, path, 2)
    run.open().set_metadata(DELIVERED, "here")
    run.open().set_metadata("ledger", "its own")
    return path


def opened(url: str, plan: Plan = PLAN) -> Store:
    return open_store(url, plan, identity_of(url, plan).run_id)


def test_a_backup_is_restored_beside_the_old_store(url: str, tmp_path: Path) -> None:
    out, confirmations = tmp_path / "out" / "backup", list[RunIdentity]()
    identity = backup(url, PLAN, out)
    assert identity == identity_of(url, PLAN)
    restored_identity, aside = restore(url, PLAN, out, replace=True, confirm=confirmations.append)
    assert restored_identity == identity and confirmations == [identity]
    assert aside is not None and aside.name == "s.db.old"
    store = opened(url)
    assert store.restoring and not store.anew
    assert store.metadata("ledger") == "its own" and store.metadata(DELIVERED) is None


def test_a_backup_makes_a_store_where_none_is(url: str, tmp_path: Path) -> None:
    new, out = f"sqlite:{tmp_path / 'new.db'}", tmp_path / "backup"
    backup(url, PLAN, out)

    def next_epoch(identity: RunIdentity) -> RunIdentity:
        return msgspec.structs.replace(identity, epoch=1)

    restored_identity, aside = restore(new, PLAN, out, change=next_epoch)
    assert restored_identity.epoch == 1 == identity_of(new, PLAN).epoch and aside is None


def test_refusals_leave_the_store_as_it_was(url: str, tmp_path: Path) -> None:
    out, damaged = tmp_path / "backup", tmp_path / "damaged"
    backup(url, PLAN, out)
    data = bytearray(out.read_bytes())
    data[5000] ^= 1
    damaged.write_bytes(data)

    def never(identity: RunIdentity) -> None:
        raise PolicyError("budget", "is spent", "wait")

    folder = tmp_path / "store"
    before = sorted(folder.iterdir())
    for kind, field, attempt in (
        (UsageError, "backup", lambda: backup(url, PLAN, out)),
        (PolicyError, "store", lambda: backup(url, OTHER, tmp_path / "x")),
        (UsageError, "store", lambda: backup(f"sqlite:{tmp_path}/no", PLAN, tmp_path / "x")),
        (UsageError, "store", lambda: restore(url, PLAN, out)),
        (UsageError, "backup", lambda: restore(url, PLAN, tmp_path / "none", replace=True)),
        (PolicyError, "backup", lambda: restore(url, PLAN, damaged, replace=True)),
        (PolicyError, "backup", lambda: restore(url, OTHER, out, replace=True)),
        (PolicyError, "budget", lambda: restore(url, PLAN, out, replace=True, confirm=never)),
        (UsageError, "shards", lambda: reshard(url, PLAN, 2)),
        (PolicyError, "store", lambda: reshard(url, OTHER, 3)),
    ):
        with pytest.raises(kind) as caught:
            attempt()
        assert caught.value.field == field
    assert not (tmp_path / "x").exists() and sorted(folder.iterdir()) == before
    assert opened(url).metadata(DELIVERED) == "here" and not opened(url).restoring


def test_a_reshard_keeps_the_run_and_what_its_sink_has(url: str) -> None:
    before = identity_of(url, PLAN)
    aside = reshard(url, PLAN, 5)
    assert aside is not None and aside.exists()
    assert identity_of(url, PLAN) == msgspec.structs.replace(before, shards=5)
    store = opened(url)
    assert store.metadata(DELIVERED) == "here" and not store.restoring
