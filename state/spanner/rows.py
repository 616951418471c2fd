"""Cells of the Spanner store: states, unit sets and admitted records as packed bytes.

The client takes and gives BYTES as base64.  Everything is little-endian.
"""

from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.accounting.arrays import Ids, Int64
from dpstream.accounting.limits import CELL_BYTES
from dpstream.state import arrow
from dpstream.state.store import NEVER, Admitted, Ints, KeyShard, PerKey

#: Columns of ``KeysByDue``.
DUE = ("Part", "WindowIndex", "Due", "Step", "Piece", "KeyIds")
#: Columns of ``Steps``.
STEP = ("Part", "WindowIndex", "Step", "Piece", "Writer", "Releases")
#: Key of an id that two columns of 64 bits are.
ID_BYTES = 16
#: One admitted record: its position, the trigger time it was decided at, its pairs and their first
#: rank.
_RECORD = [
    ("offset", "<i8"),
    ("partition", "<i4"),
    ("trigger_time", "<i4"),
    ("pairs", "<i4"),
    ("rank", "<i4"),
]
#: More where a bound per key is kept (``store.PerKey``); where ids name records.
_PER_KEY = [
    ("first", "<i4"),
    ("pad", "<i4"),
    ("taken", "<u8"),
    ("fresh", "<u8"),
    ("key", "<u8"),
]
#: The fields of ``store.PerKey`` in its order.
_OF_KEYS = ("key", "first", "taken", "fresh")
_NAMED = [("digest", "<u8")]
#: What stands before the records of a unit: admitted pairs whose records have expired, the last
#: trigger time at which any record of the unit can be decided, and, where a bound per key is kept,
#: those of the expired pairs that were the first of a key.
UNIT_HEADER = np.dtype([("gone", "<i8"), ("until", "<i8")])
UNIT_HEADER_PER_KEY = np.dtype([("gone", "<i8"), ("until", "<i8"), ("fresh", "<i8")])


class Layout(NamedTuple):
    """The layout of the rows of ``Units``.

    Attributes:
        per_key: a bound per key is kept; named: ids of records take the place of positions.
    """

    per_key: bool = False
    named: bool = False

    @property
    def record(self) -> np.dtype[Any]:
        """The numpy type of an admitted record, packed."""
        fields: list[Any] = [*_RECORD, *_PER_KEY * self.per_key, *_NAMED * self.named]
        return np.dtype(fields)

    @property
    def header(self) -> np.dtype[Any]:
        """The numpy type of the header before a unit's records."""
        return UNIT_HEADER_PER_KEY if self.per_key else UNIT_HEADER


PLAIN = Layout()


def state_type(streams: int) -> np.dtype[Any]:
    """Return the numpy type of a key's packed state with this number of integer sums.

    ``taken`` is the last step that the key is part of, ``due`` may be earlier than the list that it
    is on, and ``chunk .. chunks - 1`` are the rows of ``KeyUnits`` that belong to its unit set.
    """
    return np.dtype(
        [
            ("units", "<i8"),
            ("values", "<i8", (streams,)),
            ("taken", "<i4"),
            ("round", "<i4"),
            ("due", "<i4"),
            ("chunk", "<i4"),
            ("chunks", "<i4"),
        ]
    )


def cells(raw: bytes, size: int) -> list[str]:
    """Return bytes in pieces of ``size`` bytes, the last one shorter, each as a BYTES cell."""
    return [b64encode(raw[at : at + size]).decode() for at in range(0, len(raw), size)]


def runs_of(ordered: npt.NDArray[Any]) -> Iterator[tuple[int, int, int]]:
    """Yield (value, begin, end) of each run of equal values of an array in order."""
    values, count = np.unique(ordered, return_counts=True)
    end = np.cumsum(count)
    yield from zip(values.tolist(), (end - count).tolist(), end.tolist(), strict=True)


def row_sizes(rows: pa.RecordBatch | pa.Table) -> Int64:
    """Return (n,) about how many bytes each row takes: texts by their length, others as 8."""
    sizes = np.full(rows.num_rows, 8 * rows.num_columns, np.int64)
    for column in rows.columns:
        if pa.types.is_binary(column.type) or pa.types.is_string(column.type):
            sizes += pc.fill_null(pc.binary_length(column), 0).to_numpy()
    return sizes


def release_cells(rows: pa.RecordBatch) -> list[str]:
    """Return ``Releases`` cells of released rows, at least one, divided by size."""
    number = np.cumsum(row_sizes(rows)) // CELL_BYTES
    pieces = [rows.slice(a, b - a) for _, a, b in runs_of(number)]
    return [cell(arrow.to_bytes(piece)) for piece in pieces or [rows]]


def due_cells(ids: Ids, due: npt.NDArray[Any]) -> Iterator[tuple[int, str]]:
    """Yield (due trigger, ``KeyIds`` cell) of lists that name every key at its due trigger.

    Args:
        ids: (n, 2) ids of keys; due: (n,) trigger at which each must be looked at.
    """
    order = np.argsort(due, kind="stable")
    raw = np.ascontiguousarray(ids[order]).tobytes()
    for value, a, b in runs_of(due[order]):
        for at in range(ID_BYTES * a, ID_BYTES * b, CELL_BYTES):
            yield value, cell(raw[at : min(at + CELL_BYTES, ID_BYTES * b)])


def cell(raw: bytes) -> str:
    """Return bytes as one BYTES cell: base64, as the client takes and gives it."""
    return b64encode(raw).decode()


def id_cells(ids: Ids) -> list[str]:
    """Return (n, 2) ids as n BYTES(16) cells."""
    return cells(np.ascontiguousarray(ids).tobytes(), ID_BYTES)


def ids_from(values: Sequence[bytes]) -> Ids:
    """Return the (n, 2) ids of n BYTES(16) cells."""
    return ids_in(b"".join(b64decode(value) for value in values))


def ids_in(raw: bytes) -> Ids:
    """Return the (n, 2) ids that stand one behind the other in raw bytes, without a copy."""
    return np.frombuffer(raw, np.uint64).reshape(-1, 2)


def pack_states(
    states: KeyShard, slots: Int64, taken: int | Int64, chunk: Int64, chunks: Int64
) -> list[str]:
    """Return the ``State`` cells of some slots of a key shard, in the slots' order.

    Args:
        taken, chunk, chunks: of each slot, see ``state_type``.
    """
    packed = np.zeros(len(slots), state_type(states.values.shape[1]))
    packed["units"], packed["values"] = states.units[slots], states.values[slots]
    packed["round"], packed["due"] = states.selected[slots], states.due[slots]
    packed["taken"], packed["chunk"], packed["chunks"] = taken, chunk, chunks
    return cells(packed.tobytes(), packed.dtype.itemsize)


def unpack_states(values: Sequence[bytes], streams: int) -> npt.NDArray[Any]:
    """Return ``State`` cells as an array of ``state_type`` records."""
    raw = b"".join(b64decode(value) for value in values)
    return np.frombuffer(raw, state_type(streams))


def pack_empty(number: int, streams: int) -> list[str]:
    """Return ``State`` cells of ``count`` keys of which nothing is committed yet."""
    packed = np.zeros(number, state_type(streams))
    packed["due"] = NEVER
    return cells(packed.tobytes(), packed.dtype.itemsize)


def pack_columns(keys: pa.Table) -> list[str]:
    """Return ``Columns`` cells: the components of each key as MessagePack, one cell a row."""
    rows = zip(*(column.to_pylist() for column in keys.columns), strict=True)
    return [cell(msgspec.msgpack.encode(row)) for row in rows]


def unpack_columns(values: Sequence[bytes], schema: pa.Schema) -> pa.RecordBatch:
    """Return the key columns of ``Columns`` cells as a batch of ``schema``."""
    rows = [msgspec.msgpack.decode(b64decode(value)) for value in values]
    columns = zip(*rows, strict=True) if rows else ([] for _ in schema)
    arrays = [pa.array(list(c), f.type) for c, f in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def pack_records(admitted: Admitted, order: Int64) -> bytes:
    """Return the bytes of admitted records in an order, in the layout that they ask for."""
    packed = np.zeros(
        len(order), Layout(admitted.per_key is not None, admitted.digest is not None).record
    )
    packed["offset"], packed["partition"] = admitted.offset[order], admitted.partition[order]
    packed["trigger_time"], packed["pairs"] = admitted.trigger_time[order], admitted.pairs[order]
    if admitted.rank is not None:
        packed["rank"] = admitted.rank[order]
    if admitted.digest is not None:
        packed["digest"] = admitted.digest[order]
    if admitted.per_key is not None:
        for name, column in zip(_OF_KEYS, admitted.per_key.at(order), strict=True):
            packed[name] = column
    return packed.tobytes()


def unpack_records(
    blobs: Sequence[bytes], layout: Layout = PLAIN
) -> tuple[npt.NDArray[Any], Int64]:
    """Return the packed records of many units, and (n,) the index of each record's blob."""
    form = layout.record
    sizes = np.array([len(b) // form.itemsize for b in blobs], np.int64)
    return np.frombuffer(b"".join(blobs), form), np.repeat(np.arange(len(blobs)), sizes)


def admitted_of(records: npt.NDArray[Any], owner: Int64) -> Admitted:
    """Return unpacked records as a store has them.

    Args:
        owner: (n,) slot of each record's unit.
    """
    per_key, names = None, records.dtype.names or ()
    if "key" in names:
        per_key = PerKey(*(np.ascontiguousarray(records[name]) for name in _OF_KEYS))
    return Admitted(
        records["partition"],
        records["offset"],
        owner.astype(np.int32),
        records["pairs"],
        records["trigger_time"],
        records["rank"],
        per_key,
        np.ascontiguousarray(records["digest"]) if "digest" in names else None,
    )


def pack_headers(expired_pairs: Int64, until: Ints, fresh: Int64 | None = None) -> list[bytes]:
    """Return the header of each unit's row; ``fresh`` is given where a bound per key is kept."""
    packed = np.zeros(len(expired_pairs), Layout(fresh is not None).header)
    packed["gone"], packed["until"] = expired_pairs, until
    if fresh is not None:
        packed["fresh"] = fresh
    raw, size = packed.tobytes(), packed.dtype.itemsize
    return [raw[at : at + size] for at in range(0, len(raw), size)]


class UnitRows(NamedTuple):
    """Rows of ``Units`` taken apart.

    Attributes:
        blobs: the records of each unit; records, owner: all of them, and whose each is.
        expired_pairs: (n,) admitted pairs of each unit whose records have expired.
        period_end: (n,) last trigger time at which a record of the unit can be decided.
        expired_first_pairs: (n,) those of the expired pairs that were the first of a key; ``None``
            without a bound per key.
        counts, indices: (n,) admitted pairs and first pairs of each unit.
    """

    blobs: list[bytes]
    records: npt.NDArray[Any]
    owner: Int64
    expired_pairs: Int64
    period_end: Int64
    expired_first_pairs: Int64 | None
    counts: Int64
    indices: Int64

    @classmethod
    def of(cls, cells: Sequence[bytes], layout: Layout = PLAIN) -> "UnitRows":
        """Return rows of ``Units`` taken apart, from their ``Records`` cells as raw bytes."""
        size = layout.header.itemsize
        head = np.frombuffer(b"".join(c[:size] for c in cells), layout.header)
        blobs = [c[size:] for c in cells]
        records, owner = unpack_records(blobs, layout)
        counts, fresh = head["gone"].copy(), head["fresh"] if layout.per_key else None
        np.add.at(counts, owner, records["pairs"].astype(np.int64))
        indices = np.zeros(len(head), np.int64) if fresh is None else fresh.copy()
        if layout.per_key:
            np.add.at(indices, owner, np.bitwise_count(records["fresh"]).astype(np.int64))
        return cls(blobs, records, owner, head["gone"], head["until"], fresh, counts, indices)
