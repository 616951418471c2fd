"""RECORDS: the stage that brings all input into canonical form once.

A source batch becomes canonical records (schema ``batches.record_schema``) and dead letters.
Whether and how a record is accepted is a function of this record and the plan alone, so a
record of one user can never change what happens to another's (mechanism.md rule 0).

Sensitivity: units and keys become 128-bit keyed ids (with a privacy period the unit IS the
pair (user, period)); values are clamped to public bounds on a public integer grid BEFORE
anything is summed, so one record moves a value stream by at most L grid units.

**Positions** distinguish a record that is delivered twice from two records.  A record is named by
its position (partition, offset), and of equal positions of a unit one counts.  That is right for
input that can be delivered again.  Bounded input is not (a runner gives every element once,
whatever it retries): two rows with one position are an error of the numbering, and all but one
would be dropped without a message.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from apache_beam.transforms.window import GlobalWindows
from apache_beam.utils.timestamp import MIN_TIMESTAMP

from dpstream.accounting.arrays import Bool, Ids, Int32, Int64
from dpstream.accounting.errors import UsageError
from dpstream.accounting.fields import ValueStream
from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms.batches import (
    DEAD_LETTER_SCHEMA,
    OFFSET,
    PARTITION,
    ROWS,
    numpy_view,
    record_schema,
)
from dpstream.dp_transforms.beam.workers import Threads, Workers
from dpstream.dp_transforms.ingest import columns
from dpstream.dp_transforms.noise.ids import typed_ids
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.dp_transforms.telemetry import count, guarded, timed
from dpstream.state.arrow import id_array
from dpstream.state.numbers import mask_of
from dpstream.state.open import key_schema

#: Offsets are not negative.
_POSITIVE = np.int64(2**63 - 1)
#: Reasons in the order in which they are checked; public, fixed.
REASONS = ("unit", "key", "time", "late", "value", "not_public", "record_id")
#: What numbers rows safely, for whoever reads an error.
ADAPTERS = (
    "let `dpstream.Rows(job, ...)` or `dpstream.ReadTable(data, job)` number them, or set "
    "dpstream.partition and dpstream.offset so that each batch of a partition begins where the one "
    "before ended"
)
_OFFSET_BITS = 40


class Canonicaliser:
    """Pure function behind ``Records``: source batch -> (records, dead letters).

    Args:
        plan: the public plan.
        ring: key ring for the ids.
        public_ids: (m, 2) ids of a public key list, or ``None``.
        joined: see ``dp_transforms.run.Run``: records of partitions that came later are late as if
            they were stamped then, whatever their own stamps.
    """

    def __init__(
        self,
        plan: Plan,
        ring: KeyRing,
        public_ids: Ids | None = None,
        joined: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.plan, self.keys = plan, ring
        timeline = plan.timeline
        self._joined = np.array([first for first, _ in joined], np.int64)
        came = [np.iinfo(np.int64).min, *(timeline.instant_of(done) for _, done in joined)]
        self._came = np.array(came, np.int64)
        self.schema = record_schema(plan)
        self._public = None if public_ids is None else id_array(public_ids)

    def __call__(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.RecordBatch]:
        """Canonical records and dead letters of a batch, in row order.

        Args:
            batch: rows with the plan's columns; schema metadata holds partition and offset
                of the first row, or of each run of rows (see ``batches.ROWS``).
        """
        plan = self.plan
        partition, offset = positions(batch)
        reason = _Reasons(batch.num_rows)
        where = self._named(batch, reason) or (partition, offset)
        unit, ok = columns.unit_identity(batch.column(plan.unit.column), plan.unit.type)
        reason.unless("unit", ok)
        key_columns = []
        for field in plan.key:
            column, ok = columns.identity(batch.column(field.column), field.type)
            reason.unless("key", ok)
            key_columns.append(column)
        event, stamp = self._times(batch, reason, partition)
        values = [
            self._value(batch, stream, reason)
            for stream in plan.design.streams
            if stream.column is not None
        ]
        period = plan.timeline.period_of(event)
        unit_ids = typed_ids(self.keys.unit, [(plan.unit.type, unit)], period)
        if self._public is not None:
            kinds = [field.type for field in plan.key]
            key_ids = typed_ids(self.keys.key, list(zip(kinds, key_columns, strict=True)))
            public = pc.is_in(id_array(key_ids), value_set=self._public)
            reason.unless("not_public", mask_of(public))
        arrays = [
            id_array(unit_ids),
            pa.array(stamp),
            # Only where the stamp does not tell it already.
            *(
                []
                if plan.stamp == "event_time"
                else [pa.array(plan.timeline.trigger_time_of(event))]
            ),
            pa.array(where[0].astype(np.int32)),
            pa.array(where[1]),
            *self._digest_column(event, key_columns, values),
            *key_columns,
            *(pa.array(v) for v in values),
        ]
        records = pa.RecordBatch.from_arrays(arrays, schema=self.schema)
        dead = reason.letters(partition, offset)
        return (records if dead.num_rows == 0 else records.filter(reason.good)), dead

    def _named(self, batch: pa.RecordBatch, reason: "_Reasons") -> tuple[Int64, Int64] | None:
        """Positions that record ids stand for: 94 keyed bits, so that two records of one unit
        have one position with a chance below 2^-94; records of two units never do."""
        field = self.plan.record_id
        if field is None:
            return None
        column, ok = columns.identity(batch.column(field.column), field.type, hashed=True)
        reason.unless("record_id", ok)
        ids = typed_ids(self.keys.record, [(field.type, column)])
        return (ids[:, 0] >> np.uint64(33)).astype(np.int64), ids[:, 1].view(np.int64) & _POSITIVE

    def _times(
        self, batch: pa.RecordBatch, reason: "_Reasons", partition: Int64
    ) -> tuple[Int64, Int64]:
        plan, timeline = self.plan, self.plan.timeline
        event, ok = columns.instant(batch.column(plan.event_time))
        reason.unless("time", ok)
        if plan.stamp == "event_time":
            stamp = event
        else:
            stamp, ok = columns.instant(batch.column(plan.stamp))
            reason.unless("time", ok)
        inside = timeline.on_time(event, stamp)
        reason.unless("time", inside)
        event = np.where(inside, event, timeline.start)
        stamp = np.where(inside, stamp, timeline.start)
        # Late for the last window it belongs to is late for all; a closed period likewise.
        final_trigger_time = timeline.last_window_of(event) * timeline.stride + timeline.triggers
        came = stamp
        if len(self._joined):
            after = np.searchsorted(self._joined, partition, side="right")
            came = np.maximum(stamp, self._came[after])
        late = (timeline.trigger_time_of(came) > final_trigger_time) | timeline.period_closed(
            event, came
        )
        reason.unless("late", ~late)
        return event, stamp

    def _digest_column(
        self, event: Int64, key: list[pa.Array], values: list[Int64]
    ) -> list[pa.Array]:
        """64 keyed bits of all that counts of a record, where an id names it.

        Copies of a record that differ in nothing that counts have one digest; two that differ have
        one with a chance of 2^-64 (`dp_transforms.bounding`).
        """
        plan = self.plan
        if plan.record_id is None:
            return []
        fields = [("int", pa.array(plan.timeline.trigger_time_of(event)))]
        fields += [(field.type, column) for field, column in zip(plan.key, key, strict=True)]
        fields += [("int", pa.array(value)) for value in values]
        ids = typed_ids(self.keys.record, fields, np.ones(len(event), np.int64))
        return [pa.array(np.ascontiguousarray(ids[:, 0]))]

    def _value(self, batch: pa.RecordBatch, stream: ValueStream, reason: "_Reasons") -> Int64:
        """Clamped, rounded to the grid, centred: int64 within +-L."""
        numbers, ok = columns.measure(batch.column(stream.column))
        reason.unless("value", ok)
        with np.errstate(over="ignore"):  # 1e308 on a grid of 0.1 is beyond every bound
            scaled = np.clip(numbers / stream.grid, stream.lo, stream.hi)
        return np.clip(np.rint(scaled).astype(np.int64), stream.lo, stream.hi) - stream.mid


class _Reasons:
    """First failed rule of each row."""

    def __init__(self, rows: int) -> None:
        self._code = np.full(rows, -1, np.int8)

    def unless(self, reason: str, ok: Bool) -> None:
        """Rows that fail and have no reason yet get this one."""
        self._code[(self._code < 0) & ~ok] = REASONS.index(reason)

    @property
    def good(self) -> pa.Array:
        """Mask of the rows without a reason."""
        return pa.array(self._code < 0)

    def letters(self, partition: Int64, offset: Int64) -> pa.RecordBatch:
        """Dead letters: where the row stood and why; never what it held."""
        rows = np.flatnonzero(self._code >= 0)
        names = pa.array(REASONS).take(pa.array(self._code[rows].astype(np.int32)))
        where = partition[rows].astype(np.int32)
        return pa.RecordBatch.from_arrays(
            [pa.array(where), pa.array(offset[rows]), names], schema=DEAD_LETTER_SCHEMA
        )


def positions(batch: pa.RecordBatch) -> tuple[Int64, Int64]:
    """Return (n,) int64 partition and (n,) int64 offset of every row of a source batch.

    They stand in the schema's metadata, of the first row or of the first of each run of rows.
    There is no default, which would let records of different batches pass for one that was
    delivered twice.

    Raises:
        UsageError: it is no record batch, or its metadata do not say where all its rows stand.
    """
    if not isinstance(batch, pa.RecordBatch):
        raise UsageError(
            "records",
            "are not Arrow record batches",
            "put `dpstream.Rows(job, ...)` before DPStream: it takes rows, dicts and DataFrames",
        )
    metadata = batch.schema.metadata or {}
    if PARTITION not in metadata or OFFSET not in metadata:
        # A default would let records of different batches pass for one delivered twice.
        raise UsageError(
            "records",
            "a batch does not say where its first row stands",
            ADAPTERS,
        )
    rows = np.array([batch.num_rows])
    if ROWS in metadata:
        rows = _numbers(metadata[ROWS])
    partition, first = _numbers(metadata[PARTITION]), _numbers(metadata[OFFSET])
    if not len(rows) == len(partition) == len(first) or rows.sum() != batch.num_rows:
        raise UsageError(
            "records",
            "a batch does not say where its rows stand",
            f"name a partition, an offset and, in {ROWS.decode()}, the rows of every run",
        )
    begins = np.cumsum(rows) - rows
    offset = np.arange(batch.num_rows) + np.repeat(first - begins, rows)
    return np.repeat(partition, rows), offset


def _numbers(text: bytes) -> Int64:
    return np.array(text.split(b","), np.int64)


class Records(beam.DoFn):
    """A Beam transform of source batches into canonical records, and dead letters (``dead``).

    Each batch is the work of a ``Canonicaliser``, on as many threads as are given.

    Args:
        make: builds the worker's canonicaliser, which reads the secret there.
        threads: how many batches a worker process has under way.
    """

    DEAD = "dead"

    def __init__(
        self,
        make: Callable[[], Canonicaliser],
        threads: Threads = Threads(),  # noqa: B008 - immutable
    ) -> None:
        self._make, self._threads = make, threads

    @guarded("records")
    def setup(self) -> None:
        """Start the worker's threads; each reads the secret, which is no part of the pipeline."""
        self._workers = Workers(self._make, self._threads)

    def teardown(self) -> None:
        """Drop the threads' canonicalisers, and with them the keys."""
        self.__dict__.pop("_workers", None)

    @guarded("records")
    def process(self, element: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Canonicalise one source batch; yield what is finished by now, in the order of arrival."""
        self._workers.ask(functools.partial(self._canonical, element))
        yield from self._workers.answers(self._threads.ahead(2))

    @guarded("records")
    def finish_bundle(self) -> Iterator[beam.utils.windowed_value.WindowedValue]:
        """Yield the output of threads that still work when the bundle ends.

        It gets the least timestamp: a bundle ends with work under way for bounded input only, whose
        times nobody looks at.
        """
        for output in self._workers.answers():
            if isinstance(output, beam.pvalue.TaggedOutput):
                dead = GlobalWindows.windowed_value(output.value, MIN_TIMESTAMP)
                yield beam.pvalue.TaggedOutput(self.DEAD, dead)
            else:
                yield GlobalWindows.windowed_value(output, MIN_TIMESTAMP)

    def _canonical(self, element: pa.RecordBatch, canonicaliser: Canonicaliser) -> Iterator[Any]:
        with timed("records"):
            records, dead = canonicaliser(element)
        count("operator_records_in", element.num_rows)
        count("operator_dead_letters", dead.num_rows)
        for reason in REASONS if dead.num_rows else ():
            count(f"operator_dead_{reason}", pc.sum(pc.equal(dead["reason"], reason)).as_py())
        if dead.num_rows:
            yield beam.pvalue.TaggedOutput(self.DEAD, dead)
        if records.num_rows:
            yield records


def canonical_public_keys(plan: Plan, table: pa.Table) -> pa.Table:
    """Return a public key list in canonical form (NFC, typed), each key once.

    Raises:
        UsageError: a row is not a key of the declared types.
    """
    arrays = []
    for field in plan.key:
        column, ok = columns.identity(table.column(field.column).combine_chunks(), field.type)
        if not ok.all():
            raise UsageError("public_keys", "a row is not a key of the job's types", "correct it")
        arrays.append(column)
    names = [f.column for f in plan.key]
    distinct = pa.Table.from_arrays(arrays, names=names).group_by(names).aggregate([])
    return distinct.sort_by([(name, "ascending") for name in names]).cast(key_schema(plan))


def public_key_ids(plan: Plan, ring: KeyRing, table: pa.Table) -> Ids:
    """Return (m, 2) keyed ids of a public key list in canonical form (`canonical_public_keys`)."""
    fields = [(f.type, table.column(f.column).combine_chunks()) for f in plan.key]
    return typed_ids(ring.key, fields)


class CanonicaliserFactory:
    """Builds a ``Canonicaliser`` on a worker, of public parts and a reference to the secret.

    It is what a pipeline pickles: the secret is read when it is called.
    """

    def __init__(
        self,
        plan: Plan,
        keys: SecretSource,
        public: pa.Table | None = None,
        joined: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._plan, self._keys, self._public, self._joined = plan, keys, public, joined

    def __call__(self) -> Canonicaliser:
        """Read the key on the worker."""
        ring = self._keys.ring()
        ids = None if self._public is None else public_key_ids(self._plan, ring, self._public)
        return Canonicaliser(self._plan, ring, ids, self._joined)


def require_once(records: pa.RecordBatch) -> None:
    """Refuse records of a shard if two of them have one position.

    Args:
        records: canonical records (``batches.record_schema``) of bounded input without record ids.

    Raises:
        UsageError: two records have the same position.
    """
    if repeats(numpy_view(records.column("partition")), numpy_view(records.column("offset"))):
        raise UsageError(
            "records",
            "have rows that share a position, all but one of which would be lost",
            ADAPTERS,
        )


def repeats(partition: Int32, offset: Int64) -> bool:
    """Return whether a position occurs twice.

    Args:
        partition, offset: (n,) of each row; neither is negative.
    """
    if len(partition) < 2:
        return False
    if int(offset.max()) >> _OFFSET_BITS == 0 and int(partition.max()) >> (63 - _OFFSET_BITS) == 0:
        place = partition.astype(np.int64) << _OFFSET_BITS
        place |= offset
        place.sort()
        return bool((place[1:] == place[:-1]).any())
    order = np.lexsort((offset, partition))
    partition, offset = partition[order], offset[order]
    return bool(((partition[1:] == partition[:-1]) & (offset[1:] == offset[:-1])).any())
