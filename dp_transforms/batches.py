"""The element of every collection: an Arrow record batch, and its one deterministic coder.

Contracts of the batches that cross a stage are the schemas below.  Ids are 16 raw bytes and
are handled as ``(n, 2)`` uint64 arrays (little-endian words) without copies.

**Hand-over** passes batches between the stages of one process by reference instead of by bytes.  A
runner copies every batch several times between two stages: five encodings a record in the flow,
and on Prism two crossings of a socket each.  While a hand-over is open, the coder keeps a large
batch here and writes a ticket in its place; decoding the ticket removes the batch, so nothing is
held longer than the runner holds the ticket.

Only for runners whose stages are threads of this process and that decode each element once:
Beam's FnApiRunner, Prism with workers in this process, and a recording on the Flink inside the job
server, which is told not to go back to a checkpoint (``pipelines.runners.table``).
None runs a failed bundle again: its run ends, and the hand-over closes with it.  If a runner
did so, the batch would be gone, and the ticket refused.  A ticket names the hand-over that wrote
it, so it never stands for a batch of another run or process.
"""

import contextlib
import itertools
import secrets
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import apache_beam as beam
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from typing_extensions import override

from dpstream.accounting.arrays import Ids, Int64
from dpstream.accounting.errors import RunError
from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms.telemetry import guarded
from dpstream.state.arrow import to_bytes
from dpstream.state.idtable import shard_of, shard_order
from dpstream.state.numbers import one_array
from dpstream.state.open import key_schema

ID = pa.binary(16)
DEAD_LETTER_SCHEMA = pa.schema(
    [("partition", pa.int32()), ("offset", pa.int64()), ("reason", pa.string())]
)
#: Metadata of a source batch: where its first row stands.  A batch of several runs of consecutive
#: rows has a list of each, with commas, and how many rows each run has.
PARTITION, OFFSET = b"dpstream.partition", b"dpstream.offset"
ROWS = b"dpstream.rows"
WINDOW, TRIGGER = b"dpstream.window", b"dpstream.trigger"
#: Metadata of a clock tick of the public clock (see `dp_transforms.beam.clock`), and of a shard's
#: step.
FIRST, BEGIN, THROUGH = b"dpstream.first", b"dpstream.begin", b"dpstream.through"
SHARD = b"dpstream.shard"
#: Metadata of a shard's step whose rows are not in the batch: they are read from the store.
STORED = b"dpstream.stored"
#: Metadata of a part of a release that has several: ``number/count``, numbers from 0 on.
PART = b"dpstream.part"
#: Smaller batches travel as bytes: they cost no more than a ticket's bookkeeping.
HAND_OVER_ROWS = 1024
_TICKET = b"dpstream-ticket:"
_NAME_BYTES, _NUMBER_BYTES = 8, 8
_AGAIN = "run it again on the same state, and report it: what is committed stays"


class ArrowBatchCoder(beam.coders.Coder):
    """Arrow IPC stream of one batch with its schema; slices write only their own rows."""

    @guarded("coder")
    def encode(self, value: pa.RecordBatch) -> bytes:
        """Return the batch as IPC stream bytes, or a ticket of an open hand-over."""
        ticket = HAND_OVER.give(value)
        return to_bytes(value) if ticket is None else ticket

    @guarded("coder")
    def decode(self, encoded: bytes) -> pa.RecordBatch:
        """Return the batch, without copying the column data."""
        if is_ticket(encoded):
            return HAND_OVER.take(encoded)
        with pa.ipc.open_stream(pa.py_buffer(encoded)) as reader:
            return reader.read_next_batch()

    @override
    def estimate_size(self, value: pa.RecordBatch) -> int:
        return int(value.nbytes)

    @override
    def is_deterministic(self) -> bool:
        return True

    @override
    def to_type_hint(self) -> Any:
        return pa.RecordBatch


beam.coders.registry.register_coder(pa.RecordBatch, ArrowBatchCoder)


def key_fields(plan: Plan) -> list[pa.Field]:
    """Return Arrow fields of the key columns, under their public names."""
    return list(key_schema(plan))


def value_columns(plan: Plan) -> list[str]:
    """Return the names of a record's int64 value columns (``v0``, ``v1``, ...)."""
    return [f"v{i}" for i, s in enumerate(plan.design.streams) if s.column is not None]


def record_schema(plan: Plan) -> pa.Schema:
    """Return the schema of canonical records, which ingest passes to BOUND.

    ``unit``: keyed 128-bit id; ``stamp``: int64 micros; ``_event_trigger_time``: global
    index of the event's trigger time, only where the stamp is another column;
    ``partition``/``offset``: position; ``_digest``: keyed digest of the event's trigger time, the
    key and the values, only where an id takes the place of the position; then key columns and
    ``v*``: clamped, centred values in grid units.
    """
    fields = [
        pa.field("unit", ID, nullable=False),
        pa.field("stamp", pa.int64(), nullable=False),
        *(
            [pa.field("_event_trigger_time", pa.int64(), nullable=False)]
            * (plan.stamp != "event_time")
        ),
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        *([pa.field("_digest", pa.uint64(), nullable=False)] * (plan.record_id is not None)),
        *key_fields(plan),
        *(pa.field(v, pa.int64(), nullable=False) for v in value_columns(plan)),
    ]
    return pa.schema(fields)


def admitted_schema(plan: Plan) -> pa.Schema:
    """Return the schema of admitted (record, window) pairs, which BOUND passes to the key shards.

    ``window``: window index; ``trigger``: step index, 1 .. T; ``rank``: pairs
    of the unit admitted before this one, 0 .. C-1, only where that order matters.  With a bound
    per key, first pairs of a (unit, window, key) admitted before this one, and -1 if it is none.
    ``_index``: number of the pair's selection weight, -1 for none, only where published keys are
    skipped (``rank`` is 0 there with a bound per key: every pair is the first of its key).
    ``_id``: keyed 128-bit id of the key, computed once, for the shuffle and for the step.
    """
    fields = [
        pa.field("window", pa.int32(), nullable=False),
        pa.field("trigger", pa.int32(), nullable=False),
        *([pa.field("rank", pa.int32(), nullable=False)] * plan.design.ranked),
        *([pa.field("_index", pa.int32(), nullable=False)] * plan.design.skips),
        pa.field("_id", ID, nullable=False),
        pa.field("unit", ID, nullable=False),
        *key_fields(plan),
        *(pa.field(v, pa.int64(), nullable=False) for v in value_columns(plan)),
    ]
    return pa.schema(fields)


def _released_fields(plan: Plan) -> list[pa.Field]:
    names = [n for a in plan.aggregates for n in (a.name, f"{a.name}_sd")]
    return [pa.field(name, pa.float64()) for name in names]


def shard_release_schema(plan: Plan) -> pa.Schema:
    """Return the schema of one shard's step as committed: key columns, key id, values and sds."""
    return pa.schema([*key_fields(plan), pa.field("_id", ID), *_released_fields(plan)])


#: Text that is the same in all rows of a release: Arrow's plain text ends at 2 GiB, which 64
#: characters reach at 33.5 million rows.
STAMP = pa.dictionary(pa.int8(), pa.string())


def sealed_schema(plan: Plan) -> pa.Schema:
    """Return the columns of a sealed release in memory: those of `release_schema`, stamps once."""
    schema = release_schema(plan)
    for name in ("plan_hash", "run_id"):
        schema = schema.set(schema.get_field_index(name), pa.field(name, STAMP))
    return schema


def with_plain_stamps(part: pa.RecordBatch) -> pa.Table:
    """Return part of a sealed release with its stamps as text in each row, as it is published."""
    plain = [f.with_type(pa.string()) if f.type == STAMP else f for f in part.schema]
    return pa.Table.from_batches([part]).cast(pa.schema(plain, part.schema.metadata))


def release_schema(plan: Plan) -> pa.Schema:
    """Return the columns of a published release; values are null where they are not defined."""
    instant = pa.timestamp("us", "UTC")
    return pa.schema(
        [
            pa.field("release_id", ID),
            pa.field("window_start", instant),
            pa.field("window_end", instant),
            pa.field("trigger", pa.int32()),
            pa.field("trigger_time", instant),
            *key_fields(plan),
            *_released_fields(plan),
            pa.field("plan_hash", pa.string()),
            pa.field("run_id", pa.string()),
        ]
    )


def part_of(batch: pa.RecordBatch) -> tuple[int, int]:
    """Return the number of a part of a release, and how many parts the release has."""
    number, _, count = (batch.schema.metadata or {}).get(PART, b"0/1").partition(b"/")
    return int(number), int(count)


def position_runs(partition: Int64, offset: Int64) -> dict[bytes, bytes]:
    """Encode the positions of rows as a batch's metadata: runs of consecutive positions."""
    goes_on = (np.diff(offset) == 1) & (np.diff(partition) == 0)
    first = np.flatnonzero(np.concatenate([[len(offset) > 0], ~goes_on]))
    rows = np.diff(first, append=len(offset))
    fields = {PARTITION: partition[first], OFFSET: offset[first], ROWS: rows}
    return {name: ",".join(map(str, numbers.tolist())).encode() for name, numbers in fields.items()}


def empty(schema: pa.Schema) -> pa.RecordBatch:
    """Return a batch of no rows."""
    return pa.RecordBatch.from_pylist([], schema=schema)


def ids_of(column: pa.Array) -> Ids:
    """Return an ``(n, 2)`` uint64 view of a 16-byte column without nulls (no copy)."""
    words = np.frombuffer(column.buffers()[1] or b"", np.uint64)
    return words[2 * column.offset : 2 * (column.offset + len(column))].reshape(-1, 2)


def numpy_view(column: pa.Array) -> npt.NDArray[Any]:
    """Return a numpy view of a fixed-width column without nulls."""
    view: npt.NDArray[Any] = column.to_numpy(zero_copy_only=True)
    return view


def concat(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    """Return one batch with the rows of all, in order.

    Raises:
        RunError: a text column would exceed Arrow's 2 GiB; rows are never dropped instead.
    """
    columns = pa.Table.from_batches(batches, schema=schema).columns
    del batches
    columns.reverse()
    try:
        # One by one, so that what a column was made of can go: a shard is not there twice.
        arrays = [one_array(columns.pop()) for _ in schema]
    except pa.ArrowInvalid:
        raise RunError("shards", "a shard's text exceeds 2 GiB", "use more shards") from None
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def in_batches_of(
    size: int, batches: Iterable[pa.RecordBatch], schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of all batches in batches of ``size`` rows; the last one has the rest.

    Where there are no rows, one empty batch is yielded.
    """
    held, rows, given = list[pa.RecordBatch](), 0, False

    def joined() -> pa.RecordBatch:
        batch = concat(held, schema)
        held.clear()
        return batch

    for batch in batches:
        begin = 0
        while batch.num_rows - begin > size - rows:
            held.append(batch.slice(begin, size - rows))
            begin += size - rows
            yield joined()
            rows, given = 0, True
        held.append(batch.slice(begin))
        rows += batch.num_rows - begin
    if rows or not given:
        yield joined()


def split_by_shard(
    batch: pa.RecordBatch, shard: Int64, shards: int
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield the rows of a batch by shard number; rows keep their order within a shard."""
    if shards == 1:
        if batch.num_rows:
            yield 0, batch
        return
    order, bounds = shard_order(shard, shards)
    # Large pieces get buffers of their own, so that they are freed with their shard.  Small ones
    # travel as bytes, and to take each by itself would cost more than its rows.
    small = batch.num_rows < HAND_OVER_ROWS * shards
    ordered = batch.take(pa.array(order)) if small else batch
    for number, (begin, end) in enumerate(itertools.pairwise(bounds)):
        if begin < end and small:
            yield number, ordered.slice(begin, end - begin)
        elif begin < end:
            yield number, batch.take(pa.array(order[begin:end]))


def split_by_id(
    batch: pa.RecordBatch, column: str, shards: int
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield the rows of a batch by the shard of the ids in a column, as ``split_by_shard``."""
    return split_by_shard(batch, shard_of(ids_of(batch.column(column)), shards), shards)


class HandOver:
    """The batches of this process that are between two stages."""

    def __init__(self) -> None:
        self._held: dict[bytes, pa.RecordBatch] = {}
        self._lock = threading.Lock()
        self._open, self._name, self._numbers = 0, b"", itertools.count()
        self._by_bytes = 0

    def __len__(self) -> int:
        """Return the number of batches that were not taken yet."""
        return len(self._held)

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Pass large batches by reference inside the block; the remaining ones are freed at its
        end.

        Blocks that overlap share one hand-over.

        Raises:
            RunError: a run of this process passes its batches as bytes (`by_bytes`).
        """
        with self._lock:
            if self._by_bytes:
                raise _other_run("bytes")
            if not self._open:
                self._name, self._numbers = secrets.token_bytes(_NAME_BYTES), itertools.count()
            self._open += 1
        try:
            yield
        finally:
            with self._lock:
                self._open -= 1
                if not self._open:
                    self._held.clear()

    @contextlib.contextmanager
    def by_bytes(self) -> Iterator[None]:
        """Keep every batch in bytes inside the block, for a runner that decodes elsewhere or twice.

        Raises:
            RunError: a run of this process passes its batches by reference (`open`); coders are
                shared by all runs of a process, so that this one would get tickets.
        """
        with self._lock:
            if self._open:
                raise _other_run("references")
            self._by_bytes += 1
        try:
            yield
        finally:
            with self._lock:
                self._by_bytes -= 1

    def give(self, batch: pa.RecordBatch) -> bytes | None:
        """Return a ticket for the batch, or ``None`` if it should be encoded as bytes."""
        if batch.num_rows < HAND_OVER_ROWS:
            return None
        with self._lock:
            if not self._open:
                return None
            ticket = self._name + next(self._numbers).to_bytes(_NUMBER_BYTES, "little")
            self._held[ticket] = batch
        return _TICKET + ticket

    def take(self, ticket: bytes) -> pa.RecordBatch:
        """Return the batch of a ticket, and remove it from the hand-over.

        Raises:
            RunError: the ticket was taken before, or its hand-over is not open in this process.
        """
        rest = ticket[len(_TICKET) :]
        with self._lock:
            batch = self._held.pop(rest, None)
            here = self._open and rest[:_NAME_BYTES] == self._name
        if batch is not None:
            return batch
        if here:
            raise RunError(
                "runner", "requested a batch a second time, after a stage had received it", _AGAIN
            )
        raise RunError(
            "runner", "requested a batch of another process, or of a run that has ended", _AGAIN
        )


def _other_run(passed: str) -> RunError:
    return RunError(
        "runner",
        f"a run of this process on another runner passes batches as {passed}",
        "run this one in a process of its own, or after that one has ended",
    )


def is_ticket(encoded: bytes) -> bool:
    """Return whether an encoded batch is a ticket."""
    return encoded.startswith(_TICKET)


#: The one of this process.
HAND_OVER = HandOver()
