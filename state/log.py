"""Step log of the embedded store: changed states as Arrow blobs, and their replay."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from state.idtable import IdTable
from state.store import Admitted, Ids, Ints, KeyShard, StepResult, UnitShard

_ID = pa.binary(16)
_PIECE_ROWS = 1_000_000


def to_bytes(batch: pa.RecordBatch, compression: str | None = None) -> bytes:
    """Arrow IPC stream of one batch."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue().to_pybytes())


def from_bytes(blob: bytes) -> pa.RecordBatch:
    """The batch of ``to_bytes``."""
    with pa.ipc.open_stream(pa.py_buffer(blob)) as reader:
        return reader.read_next_batch()


def _ids(ids: Ids) -> pa.Array:
    return pa.Array.from_buffers(_ID, len(ids), [None, pa.py_buffer(np.ascontiguousarray(ids))])


def _id_view(column: pa.Array) -> Ids:
    return np.frombuffer(column.buffers()[1] or b"", np.uint64)[: 2 * len(column)].reshape(-1, 2)


def step_blobs(states: KeyShard, result: StepResult) -> tuple[bytes, bytes, bytes]:
    """(new keys, changed states, new pairs) of a step."""
    batch = states.fresh_keys().append_column("_id", _ids(states.table.ids[states.logged :]))
    slots = result.changed
    columns = {
        "slot": slots.astype(np.int32),
        "units": states.units[slots],
        "due": states.due[slots],
        "round": states.round[slots],
        "base": states.base[slots],
    }
    for stream in range(states.values.shape[1]):
        columns[f"v{stream}"] = states.values[slots, stream]
    pairs = pa.RecordBatch.from_arrays(
        [pa.array(result.pair_slots.astype(np.int32)), _ids(result.pair_units)],
        names=["slot", "unit"],
    )
    return (
        to_bytes(_one(batch)),
        to_bytes(pa.RecordBatch.from_pydict({k: pa.array(v) for k, v in columns.items()})),
        to_bytes(pairs),
    )


def _one(table: pa.Table) -> pa.RecordBatch:
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)


def replay_keys(
    states: KeyShard, rows: Iterable[tuple[int, bytes | None, bytes | None, bytes | None]]
) -> None:
    """Apply the log of a (window, shard) to empty states."""
    for trigger, keys, changed, pairs in rows:
        if keys is None or changed is None or pairs is None:
            states.mark_committed(trigger)
            continue
        batch = from_bytes(keys)
        states.intern(_id_view(batch.column("_id")), batch)
        change = from_bytes(changed)
        slots = change.column("slot").to_numpy()
        states.units[slots] = change.column("units").to_numpy()
        states.due[slots] = change.column("due").to_numpy()
        states.round[slots] = change.column("round").to_numpy()
        states.base[slots] = change.column("base").to_numpy()
        for stream in range(states.values.shape[1]):
            states.values[slots, stream] = change.column(f"v{stream}").to_numpy()
        pair = from_bytes(pairs)
        states.pairs.add(
            pair.column("slot").to_numpy().astype(np.int64), _id_view(pair.column("unit"))
        )
        states.mark_committed(trigger)


def unit_blobs(units: UnitShard, admitted: Admitted) -> Iterator[tuple[bytes, bytes]]:
    """(new unit ids, admitted records) of one commit of decisions, in pieces.

    A piece holds at most ``_PIECE_ROWS`` rows, so that a large commit is not built in memory
    twice; offsets are written as differences, which compress well.
    """
    ids = units.table.ids[units.logged :]
    rows = max(len(ids), len(admitted.offset), 1)
    for at in range(0, rows, _PIECE_ROWS):
        piece = slice(at, at + _PIECE_ROWS)
        ranks = {} if admitted.rank is None else {"rank": pa.array(admitted.rank[piece])}
        records = pa.RecordBatch.from_pydict(
            {
                "partition": pa.array(admitted.partition[piece]),
                "step": pa.array(np.diff(admitted.offset[piece], prepend=0)),
                "unit": pa.array(admitted.unit[piece]),
                "pairs": pa.array(admitted.pairs[piece]),
                "cut": pa.array(admitted.cut[piece]),
                **ranks,
            }
        )
        new = pa.RecordBatch.from_arrays([_ids(ids[piece])], names=["unit"])
        yield to_bytes(new), to_bytes(records, "lz4")


def replay_units(units: UnitShard, rows: Sequence[tuple[int, bytes, bytes]]) -> None:
    """Apply all commits of a unit shard to empty counters."""
    for cut, ids, _ in rows:
        units.decided = cut
        units.intern(_id_view(from_bytes(ids).column("unit")))
    for _, _, records in rows:  # a piece's records may name units of a later piece
        batch = from_bytes(records)
        slots = batch.column("unit").to_numpy()
        np.add.at(units.counts, slots, batch.column("pairs").to_numpy())
    units.logged = units.table.size


def admitted(rows: Sequence[tuple[int, bytes, bytes]]) -> tuple[IdTable, Admitted]:
    """All admitted records with an index by ``position_ids``."""
    batches = [from_bytes(records) for _, _, records in rows]
    index = IdTable()
    if not batches:
        none = np.zeros(0, np.int32)
        return index, Admitted(none, np.zeros(0, np.int64), none, none, none)
    offset = np.concatenate([np.cumsum(b.column("step").to_numpy()) for b in batches])
    table = pa.Table.from_batches(batches)

    def column(name: str) -> npt.NDArray[Any]:
        return np.asarray(table.column(name).to_numpy())

    rank = column("rank") if "rank" in table.column_names else None
    everything = Admitted(
        column("partition"), offset, column("unit"), column("pairs"), column("cut"), rank
    )
    index.intern(position_ids(everything.partition, everything.offset, everything.unit))
    return index, everything


def position_ids(partition: Ints, offset: Ints, unit: Ints) -> Ids:
    """(n, 2) ids of records: (offset, (unit slot, partition)).

    The unit is part of it: should a source give one position to records of two units, they
    are two records.
    """
    ids = np.empty((len(offset), 2), np.uint64)
    ids[:, 0] = offset.astype(np.uint64)
    ids[:, 1] = partition.astype(np.uint64) | (unit.astype(np.uint64) << np.uint64(32))
    return ids
