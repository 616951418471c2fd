"""Step log of the embedded store: changed states as Arrow blobs, and their replay."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dpstream.accounting.arrays import Ids, Int32, Int64, UInt64
from dpstream.state.idtable import IdTable
from dpstream.state.retention_store import PIECE_ROWS as _PIECE_ROWS
from dpstream.state.retention_store import KeyPiece, piece_bounds
from dpstream.state.seals import reading, refuse_damage
from dpstream.state.store import (
    NEVER,
    Admitted,
    Ints,
    KeyShard,
    PerKey,
    StepResult,
    UnitShard,
)

_ID = pa.binary(16)
#: What ends an Arrow IPC stream.
_END = b"\xff\xff\xff\xff\0\0\0\0"
#: The blobs of a step whose changes a later step of the same commit has.
COME_LATER = (b"", b"", b"")
#: Bytes that were checked.
Checked = bytes | memoryview


class AdmissionRow(NamedTuple):
    """A commit of decisions, or a piece of it, as it was written: new units, admitted records."""

    trigger_time: int
    units: pa.RecordBatch
    records: Checked


def to_bytes(batch: pa.RecordBatch, compression: str | None = None) -> bytes:
    """Return one batch as an Arrow IPC stream."""
    if compression is None and not any(map(pa.types.is_dictionary, batch.schema.types)):
        # The same bytes, without a writer and its growing buffer; a writer adds dictionaries.
        return b"".join((batch.schema.serialize(), batch.serialize(), _END))
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue().to_pybytes())


def from_bytes(blob: Checked) -> pa.RecordBatch:
    """Return the batch of ``to_bytes``.

    Raises:
        PolicyError: the bytes are not such a stream.
    """
    with reading(), pa.ipc.open_stream(pa.py_buffer(blob)) as reader:
        return reader.read_next_batch()


def id_array(ids: Ids) -> pa.Array:
    """Return (n, 2) ids as an Arrow array of 16 bytes each."""
    return pa.Array.from_buffers(_ID, len(ids), [None, pa.py_buffer(np.ascontiguousarray(ids))])


def merged(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Return one batch with the rows of all, of which there is at least one."""
    return batches[0] if len(batches) == 1 else _one(pa.Table.from_batches(batches))


def id_view(column: pa.Array) -> Ids:
    """Return (n, 2) words of a column of 16 bytes that starts at its buffer's start."""
    return np.frombuffer(column.buffers()[1] or b"", np.uint64)[: 2 * len(column)].reshape(-1, 2)


def step_blobs(states: KeyShard, results: Sequence[StepResult]) -> tuple[bytes, bytes, bytes]:
    """Return (new keys, changed states, new pairs) of successive steps, as of the last one."""
    batch = states.fresh_keys().append_column("_id", id_array(states.table.ids[states.logged :]))
    slots = results[0].changed
    if len(results) > 1:
        slots = np.unique(np.concatenate([result.changed for result in results]))
    columns: dict[str, npt.NDArray[Any]] = {
        "slot": slots.astype(np.int32),
        "units": states.units[slots],
        "due": states.due[slots],
        "round": states.selected[slots],
    }
    values = states.values[slots]
    pair_slots = np.concatenate([result.pair_slots for result in results])
    pair_units = np.concatenate([result.pair_units for result in results])
    return _key_blobs(batch, columns, values, pair_slots, pair_units)


def _key_blobs(
    keys: pa.Table,
    columns: dict[str, npt.NDArray[Any]],
    values: Int64,
    slots: Int64,
    units: Ids,
) -> tuple[bytes, bytes, bytes]:
    """Return keys, states with their (n, V) values, and the slots and units of pairs as blobs."""
    columns |= {f"v{stream}": column for stream, column in enumerate(values.T)}
    return (
        to_bytes(_one(keys)),
        to_bytes(pa.RecordBatch.from_pydict({k: pa.array(v) for k, v in columns.items()})),
        to_bytes(
            pa.RecordBatch.from_arrays(
                [pa.array(slots.astype(np.int32)), id_array(units)], names=["slot", "unit"]
            )
        ),
    )


def selected_keys(states: KeyShard, slots: Int64) -> pa.RecordBatch:
    """Return key columns and ``_id`` of some slots."""
    keys = states.key_columns(slots)
    return _one(keys.append_column("_id", id_array(states.table.ids[slots])))


def _one(table: pa.Table) -> pa.RecordBatch:
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)


def piece_blobs(piece: KeyPiece, slots: Int64) -> tuple[bytes, bytes, bytes]:
    """Return (new keys, their states, pairs) of a piece of a snapshot with these new slots."""
    columns: dict[str, npt.NDArray[Any]] = {
        "slot": slots.astype(np.int32),
        "units": piece.units,
        "due": piece.due,
        "round": piece.selected,
        "done": piece.done,
    }
    pair_slots = slots[piece.pair_rows]
    return _key_blobs(piece.keys, columns, piece.values, pair_slots, piece.pair_units)


def key_pieces(states: KeyShard) -> Iterator[KeyPiece]:
    """Yield all keys of states in pieces."""
    slots, units = states.pairs.entries()
    order = np.argsort(slots, kind="stable")
    slots, units = slots[order], units[order]
    ids = states.table.ids
    for piece in piece_bounds(states.size, _PIECE_ROWS):
        keys = states.key_columns(np.arange(piece.start, piece.stop))
        first, last = np.searchsorted(slots, (piece.start, piece.stop))
        yield KeyPiece(
            keys.append_column("_id", id_array(ids[piece])),
            states.units[piece],
            states.values[piece],
            states.due[piece],
            states.selected[piece],
            states.done[piece],
            slots[first:last] - piece.start,
            units[first:last],
        )


@reading()
def replay_keys(
    states: KeyShard, rows: Iterable[tuple[int, tuple[Checked, Checked, Checked] | None]]
) -> None:
    """Apply the pieces of a snapshot (trigger 0) and then the log of a (window, shard) to empty
    states; ``None`` stands for a step that a snapshot contains already.

    Raises:
        PolicyError: a step is missing, or its bytes have another form.
    """
    done, come_later = [], False
    for trigger, blobs in rows:
        refuse_damage(trigger not in (0, states.committed + 1))
        come_later = blobs is not None and not any(map(len, blobs))
        if blobs is None or come_later:
            states.mark_committed(trigger)
            continue
        keys, changed, pairs = blobs
        batch = from_bytes(keys)
        states.intern(id_view(batch.column("_id")), batch)
        change = from_bytes(changed)
        slots = change.column("slot").to_numpy()
        states.units[slots] = change.column("units").to_numpy()
        states.due[slots] = change.column("due").to_numpy()
        states.selected[slots] = change.column("round").to_numpy()
        for stream in range(states.values.shape[1]):
            states.values[slots, stream] = change.column(f"v{stream}").to_numpy()
        pair = from_bytes(pairs)
        states.pairs.add(
            pair.column("slot").to_numpy().astype(np.int64), id_view(pair.column("unit"))
        )
        if "done" in change.schema.names:
            done.append(slots[change.column("done").to_numpy(zero_copy_only=False)])
        else:  # a step that was committed after the snapshot
            done = []
        states.mark_committed(trigger)
    refuse_damage(come_later)  # they were committed together
    for slots in done:
        states.done[slots] = True


def unit_blobs(
    units: UnitShard, admitted: Admitted, all_units: bool = False
) -> Iterator[tuple[int, bytes, bytes]]:
    """Yield (units before, new unit ids, admitted records) of one commit of decisions, in pieces.

    A piece holds at most ``_PIECE_ROWS`` rows, so that a large commit is not built in memory
    twice; offsets are written as differences, which compress well.

    Args:
        all_units: write all units with their counts, which then are not the sums of the records'
            pairs: records may be missing.
    """
    first, size = 0 if all_units else units.logged, units.table.size
    rows = max(size - first, len(admitted.offset), 1)
    for at in piece_bounds(rows, _PIECE_ROWS):
        named = slice(first + at.start, min(first + at.stop, size))
        ids, until = units.table.ids[named], units.period_end[named]
        counts = units.counts[named] if all_units else None
        blob = ids_blob(ids, until, counts, units.indices[named])
        yield named.stop - len(ids), blob, records_blob(admitted, at)


def ids_blob(
    ids: Ids, until: Int32, counts: Int32 | None = None, indices: Int32 | None = None
) -> bytes:
    """Return the new units of a commit.

    Counts (and indices, where there are any) are stored as they are, whatever the commit's records
    give.
    """
    columns = {"unit": id_array(ids)}
    if (until != NEVER).any():
        columns["until"] = pa.array(until)
    if counts is not None:
        columns["count"] = pa.array(counts)
        if indices is not None and indices.any():
            columns["index"] = pa.array(indices)
    return to_bytes(pa.RecordBatch.from_pydict(columns))


def records_blob(admitted: Admitted, piece: slice = slice(None)) -> bytes:
    """Return the admitted records of a commit."""
    ranks = {} if admitted.rank is None else {"rank": pa.array(admitted.rank[piece])}
    if admitted.digest is not None:
        ranks["digest"] = pa.array(admitted.digest[piece])
    if admitted.per_key is not None:
        keys, first, taken, fresh = admitted.per_key.at(piece)
        ranks |= {"key": pa.array(keys), "first": pa.array(first)}
        ranks |= {"taken": pa.array(taken), "fresh": pa.array(fresh)}
    records = pa.RecordBatch.from_pydict(
        {
            "partition": pa.array(admitted.partition[piece]),
            "step": pa.array(np.diff(admitted.offset[piece], prepend=0)),
            "unit": pa.array(admitted.unit[piece]),
            "pairs": pa.array(admitted.pairs[piece]),
            "cut": pa.array(admitted.trigger_time[piece]),
            **ranks,
        }
    )
    return to_bytes(records, "lz4")


def no_records() -> Admitted:
    """Return an empty list of admitted records."""
    none = np.zeros(0, np.int32)
    return Admitted(none, np.zeros(0, np.int64), none, none, none)


@reading()
def replay_units(units: UnitShard, rows: Sequence[AdmissionRow]) -> None:
    """Apply all commits of a unit shard to empty counters; those per key by ``count_keys``."""
    summed = []
    for trigger_time, batch, records in rows:
        units.decided = trigger_time
        slots = units.intern(id_view(batch.column("unit")))
        if "until" in batch.schema.names:
            units.period_end[slots] = batch.column("until").to_numpy()
        if "count" in batch.schema.names:
            units.counts[slots] = batch.column("count").to_numpy()
            if "index" in batch.schema.names:
                units.indices[slots] = batch.column("index").to_numpy()
        else:
            summed.append(records)
    for records in summed:  # a piece's records may name units of a later piece
        batch = from_bytes(records)
        slots = batch.column("unit").to_numpy()
        np.add.at(units.counts, slots, batch.column("pairs").to_numpy())
        if "fresh" in batch.schema.names:
            # numpy adds numbers of the target's own type forty times as fast.
            fresh = np.bitwise_count(batch.column("fresh").to_numpy()).astype(np.int32)
            np.add.at(units.indices, slots, fresh)
    units.logged = units.table.size


@reading()
def count_keys(units: UnitShard, rows: Sequence[AdmissionRow]) -> None:
    """Count the commits' records by (unit, window, key), for a shard that decides."""
    for row in rows:  # also of units whose counts are told
        with pa.ipc.open_stream(pa.py_buffer(row.records)) as reader:
            tells_keys = "key" in reader.schema.names
        if tells_keys:
            enter_keys(units, records_of([row]))


def enter_keys(units: UnitShard, records: Admitted) -> None:
    """Count records by (unit, window, key), if there is a bound per key."""
    if records.per_key is not None:
        keys, first, taken, _ = records.per_key
        units.keys.enter(records.unit.astype(np.int64), first, taken, keys)


@reading()
def records_of(rows: Sequence[AdmissionRow]) -> Admitted:
    """Return all admitted records of the commits."""
    batches = [from_bytes(records) for _, _, records in rows]
    # Empty ones have no rank; they would hide that the others have.
    batches = [b for b in batches if b.num_rows]
    if not batches:
        return no_records()
    offset = np.concatenate([np.cumsum(b.column("step").to_numpy()) for b in batches])
    table = pa.Table.from_batches(batches)

    def column(name: str) -> npt.NDArray[Any]:
        return np.asarray(table.column(name).to_numpy())

    rank = column("rank") if "rank" in table.column_names else None
    per_key = None
    if "key" in table.column_names:
        per_key = PerKey(*(column(name) for name in ("key", "first", "taken", "fresh")))
    digest = column("digest") if "digest" in table.column_names else None
    where = column("partition"), offset
    return Admitted(*where, column("unit"), column("pairs"), column("cut"), rank, per_key, digest)


def moved(records: Admitted, slots: Int64) -> Admitted:
    """Return records with ``slots[unit]`` as their units, without those whose slot is -1."""
    unit = slots[records.unit].astype(np.int32)
    return msgspec.structs.replace(records, unit=unit).at(np.flatnonzero(unit >= 0))


def indexed(records: Admitted) -> tuple[IdTable, Admitted]:
    """Return (index by ``position_ids``, the records): slots of the index are rows of the records.

    If a record occurs twice, the first counts; a row too many would shift what is known of all
    records after it.
    """
    index, where = IdTable(), (records.partition, records.offset, records.unit)
    slots = index.intern(position_ids(*where, records.digest))
    if index.size < len(slots):
        first = np.unique(slots, return_index=True)[1]
        records = records.at(first)
    return index, records


def position_ids(partition: Ints, offset: Ints, unit: Ints, digest: UInt64 | None = None) -> Ids:
    """Return (n, 2) ids of records: (offset, (unit slot, partition)).

    The unit is part of it: should a source give one position to records of two units, they
    are two records.

    Args:
        digest: of what records hold, where ids of records take the place of positions: copies with
            other contents then have other ids.  Both are keyed, so two contents of a unit share one
            with a chance below 2^-94.
    """
    ids = np.empty((len(offset), 2), np.uint64)
    ids[:, 0] = offset.astype(np.uint64)
    if digest is not None:
        ids[:, 0] ^= digest
    ids[:, 1] = partition.astype(np.uint64) | (unit.astype(np.uint64) << np.uint64(32))
    return ids
