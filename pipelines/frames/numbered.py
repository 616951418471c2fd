"""Rows, dicts and DataFrames of a pipeline -> Arrow batches with the position of each row.

Whether a value is accepted, and as what, depends on that value and the declared type alone, never
on the other values of its bundle: a value that is not of its column's type becomes null, and its
row a dead letter later.  The fast path is for columns in which every value is of the type.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
from apache_beam.transforms.window import GlobalWindows, TimestampedValue
from apache_beam.utils.timestamp import MAX_TIMESTAMP, Timestamp

from dpstream.accounting import limits
from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import UsageError
from dpstream.accounting.fields import Field
from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms.batches import OFFSET, PARTITION
from dpstream.dp_transforms.batches import ROWS as RUNS
from dpstream.dp_transforms.ingest.columns import identity, instant
from dpstream.dp_transforms.telemetry import guarded
from dpstream.pipelines.frames.table import columns_of
from dpstream.pipelines.jobs.job import Job
from dpstream.state.numbers import one_array, values_of

INSTANT = pa.timestamp("us", "UTC")
_NONE = type(None)
#: Python types whose values an Arrow type takes as they are; no number is cut, no bool counted.
_EXACT: dict[pa.DataType, set[type]] = {
    pa.string(): {str, _NONE},
    pa.binary(): {bytes, _NONE},
    pa.bool_(): {bool, _NONE},
    pa.int64(): {int, _NONE},
    pa.float64(): {float, int, _NONE},
}
_CONVERSION_ERRORS = (pa.ArrowException, ValueError, OverflowError)


def column_of(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return an array of values of one type; an instant must be one of Beam's timestamps."""
    if pa.types.is_timestamp(kind):
        micros = [value.micros if isinstance(value, Timestamp) else None for value in values]
        return column_of(micros, pa.int64()).cast(kind)
    if set(map(type, values)) <= _EXACT[kind]:
        with contextlib.suppress(*_CONVERSION_ERRORS):
            return pa.array(values, kind)
    return pa.concat_arrays([_cell(value, kind) for value in values])


def _cell(value: Any, kind: pa.DataType) -> pa.Array:
    """Return an array of one value, which is null if it is not of the type or does not fit."""
    number = value.item() if isinstance(value, np.generic) else value
    if type(number) in _EXACT[kind]:
        with contextlib.suppress(*_CONVERSION_ERRORS):
            return pa.array([number], kind)
    return pa.nulls(1, kind)


def instants_of(values: Sequence[Any]) -> pa.Array:
    """Return times as Beam's timestamps, from the forms that rows have.

    These are Beam's timestamps, those of Python, numpy and pandas (without a zone they are UTC),
    whole numbers of microseconds since 1970, and RFC 3339 text.
    """
    micros, valid = np.zeros(len(values), np.int64), np.zeros(len(values), np.bool_)
    kinds = np.array([_kind(value) for value in values])
    for kind, micros_of in _MICROS_OF.items():
        at = np.flatnonzero(kinds == kind)
        if not at.size:
            continue
        part = [values[int(i)] for i in at]
        try:
            micros[at], valid[at] = micros_of(part)
        except _CONVERSION_ERRORS:
            for i, value in zip(at, part, strict=True):
                with contextlib.suppress(*_CONVERSION_ERRORS):
                    moment, ok = micros_of([value])
                    micros[i], valid[i] = moment[0], ok[0]
    return pa.array(micros, mask=~valid).cast(INSTANT)


def _kind(value: Any) -> str:
    if isinstance(value, Timestamp):
        return "beam"
    if isinstance(value, np.datetime64):
        return "numpy"
    if isinstance(value, datetime):  # pandas' are Python's
        return "time"
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return "int"
    return "text" if isinstance(value, str) else ""


def _numpys(values: Sequence[Any]) -> tuple[Any, Any]:
    ticks = np.array(values, "datetime64[us]")
    return ticks.astype(np.int64), ~np.isnat(ticks)


_MICROS_OF: dict[str, Callable[[Sequence[Any]], tuple[Any, Any]]] = {
    "beam": lambda values: instant(pa.array([value.micros for value in values], pa.int64())),
    "time": lambda values: instant(pa.array(values, INSTANT)),
    "numpy": _numpys,
    "int": lambda values: instant(pa.array([int(value) for value in values], pa.int64())),
    "text": lambda values: instant(pa.array(values, pa.string())),
}


_ARROW = {"string": pa.string(), "int": pa.int64(), "bool": pa.bool_(), "bytes": pa.binary()}
_NO_NUMBER = (
    "name a column that tells a unit's records apart (`table.record_id` of the job), or the "
    "columns of rows' positions (Rows(job, partition=..., offset=...)), or give a table in memory "
    "to dpstream.ReadTable"
)


class Rows(beam.PTransform):
    """Rows of a pipeline -> record batches with positions, for ``DPStream``.

    The elements are ``beam.Row``s, named tuples, dicts, or DataFrames of pandas or Polars (each
    with several rows).  A value that is missing, or is not of its column's type, becomes null,
    and its row a dead letter.

    Args:
        job: a loaded job, or a plan, which names the columns and the record id.
        partition, offset: columns with the row's position in its source; without ``partition``
            all rows are in partition 0.  Not allowed with a record id.

    Raises:
        UsageError: no record id or offset numbers the rows.
    """

    def __init__(
        self, job: Job | Plan, *, partition: str | None = None, offset: str | None = None
    ) -> None:
        super().__init__()
        plan = job if isinstance(job, Plan) else job.plan
        if not isinstance(job, Plan) and (job.source.query is not None or job.cells is not None):
            raise UsageError(
                "job",
                "has a query or cells, which take the job's own files",
                "put `dpstream.ReadFiles(job)` before DPStream",
            )
        if plan.record_id is None and offset is None:
            raise UsageError(
                "records",
                "have nothing that numbers them, so one delivered twice would count twice",
                _NO_NUMBER,
            )
        if plan.record_id is not None and (partition or offset) is not None:
            raise UsageError(
                "offset", "has no meaning where records have an id of their own", "leave it out"
            )
        if partition is not None and offset is None:
            raise UsageError("offset", "is needed with partition", "name both columns")
        self._gather = Gather(ToBatch(plan, partition, offset), limits.BATCH_ROWS)

    def expand(self, pcoll: beam.PCollection) -> beam.PCollection:
        """Return the batches of one ParDo, in the global window, in which the flow works."""
        windowed = pcoll | beam.WindowInto(GlobalWindows())
        return windowed | beam.ParDo(self._gather).with_output_types(pa.RecordBatch)


class Gather(beam.DoFn):
    """Gathers the rows of a bundle into batches; a DataFrame is a batch by itself.

    Args:
        to_batch: makes a batch of a list of rows, or of one DataFrame.
        batch_rows: number of rows in a full batch.
    """

    def __init__(self, to_batch: Callable[[Any], pa.RecordBatch], batch_rows: int) -> None:
        self._to_batch, self._batch_rows = to_batch, batch_rows

    def start_bundle(self) -> None:
        """Start with no rows."""
        self._held: list[Any] = []
        self._sent, self._least = 0, MAX_TIMESTAMP

    @guarded("rows")
    def process(
        self, element: Any, timestamp: Any = beam.DoFn.TimestampParam
    ) -> Iterator[pa.RecordBatch]:
        """Add a row; emit a full batch with the least timestamp of its rows."""
        if hasattr(element, "__arrow_c_stream__") or isinstance(element, pa.RecordBatch):
            yield self._batch(element)
            return
        self._held.append(element)
        self._least = min(self._least, timestamp)
        if len(self._held) >= self._batch_rows:
            yield TimestampedValue(self._rows(), self._least)
            self._least = MAX_TIMESTAMP

    @guarded("rows")
    def finish_bundle(self) -> Iterator[Any]:
        """Emit the remaining rows."""
        if self._held:
            yield GlobalWindows.windowed_value(self._rows(), self._least)

    def _rows(self) -> pa.RecordBatch:
        rows, self._held = self._held, []
        return self._batch(rows)

    def _batch(self, rows: Any) -> pa.RecordBatch:
        batch = self._to_batch(rows)
        if PARTITION not in (batch.schema.metadata or {}):
            # What names a record is its id: the offset only says in a dead letter which row of
            # its bundle it was.
            where = {PARTITION: "0", OFFSET: str(self._sent)}
            batch = batch.replace_schema_metadata(where)
        self._sent += batch.num_rows
        return batch


class ToBatch:
    """Converts rows, or a DataFrame, to a batch with the plan's columns.

    Args:
        partition, offset: columns with positions; ``None``: the batch gets no positions.
    """

    def __init__(self, plan: Plan, partition: str | None, offset: str | None) -> None:
        self._kinds, self._times = kinds_of(plan), {plan.event_time}
        if plan.stamp != "event_time":
            self._times.add(plan.stamp)
        self._partition, self._offset = partition, offset

    def __call__(self, rows: Any) -> pa.RecordBatch:
        """Return the batch.

        Raises:
            UsageError: a DataFrame lacks a column, or a row has no position.
        """
        places = [name for name in (self._partition, self._offset) if name is not None]
        if isinstance(rows, list):
            arrays = _of_rows(rows, self._kinds, self._times, places)
        else:
            named = columns_of(rows, {"records": list(self._kinds), "offset": places})
            arrays = {name: one_array(column) for name, column in named.items()}
        columns = [arrays[name] for name in self._kinds]
        batch = pa.RecordBatch.from_arrays(columns, list(self._kinds))
        if self._offset is None:
            return batch
        offset = _positions("offset", arrays[self._offset])
        partition = np.zeros(len(offset), np.int64)
        if self._partition is not None:
            partition = _positions("partition", arrays[self._partition])
            if len(partition) and int(partition.max()) >= 1 << 31:
                raise UsageError("partition", "must be below 2^31", "number the partitions")
        return batch.replace_schema_metadata(runs(partition, offset))


def kinds_of(plan: Plan) -> dict[str, pa.DataType]:
    """Return the Arrow type of each column that a plan reads."""
    ids: list[Field] = [plan.unit, *plan.key, *filter(None, [plan.record_id])]
    kinds: dict[str, pa.DataType] = {field.column: _ARROW[field.type] for field in ids}
    for aggregate in plan.aggregates:
        if aggregate.column is not None:
            kinds.setdefault(aggregate.column, pa.float64())
    kinds.setdefault(plan.event_time, INSTANT)
    if plan.stamp != "event_time":
        kinds.setdefault(plan.stamp, INSTANT)
    return kinds


def runs(partition: Int64, offset: Int64) -> dict[bytes, bytes]:
    """Encode the positions of rows as a batch's metadata: runs of consecutive positions."""
    goes_on = (np.diff(offset) == 1) & (np.diff(partition) == 0)
    first = np.flatnonzero(np.concatenate([[len(offset) > 0], ~goes_on]))
    rows = np.diff(first, append=len(offset))
    fields = {PARTITION: partition[first], OFFSET: offset[first], RUNS: rows}
    return {name: b",".join(b"%d" % n for n in numbers) for name, numbers in fields.items()}


def _of_rows(
    rows: Sequence[Any],
    kinds: Mapping[str, pa.DataType],
    times: set[str],
    places: Sequence[str],
) -> dict[str, pa.Array]:
    arrays = {}
    for name, kind in [*kinds.items(), *((name, pa.int64()) for name in places)]:
        values = [
            row.get(name) if isinstance(row, Mapping) else getattr(row, name, None) for row in rows
        ]
        arrays[name] = instants_of(values) if name in times else column_of(values, kind)
    return arrays


def _positions(argument: str, column: pa.Array) -> Int64:
    """Return a column of positions as whole numbers."""
    array, ok = identity(column, "int")
    numbers = values_of(array)
    if not ok.all() or (len(numbers) and int(numbers.min()) < 0):
        raise UsageError(
            argument,
            "is no whole number of 0 or more in some row",
            "name the column that says where a row stood in its source",
        )
    return np.asarray(numbers, np.int64)
