"""``records | dpstream.DPStream(job)``: the flow of a job or a plan, on rows of any kind.

A table in memory is a bounded source of a pipeline (`ReadTable`); a record's position is its row
number.  Rows, dicts and DataFrames of a pipeline become Arrow batches with the position of each row
(`Rows`).

Whether a value is accepted, and as what, depends on that value and the declared type alone, never
on the other values of its bundle: a value that is not of its column's type becomes null, and its
row a dead letter later.  The fast path is for columns in which every value is of the type.
"""

import contextlib
import functools
import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import apache_beam as beam
import msgspec
import numpy as np
import pyarrow as pa
from apache_beam.transforms.window import GlobalWindows, TimestampedValue
from apache_beam.typehints import no_annotations, typehints
from apache_beam.utils.timestamp import MAX_TIMESTAMP, Timestamp

from dpstream.accounting import limits
from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import UsageError, refuse_first
from dpstream.accounting.fields import Field
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.strength import WeakGuaranteeWarning, weaknesses
from dpstream.dp_transforms import flow
from dpstream.dp_transforms.batches import OFFSET, PARTITION, position_runs
from dpstream.dp_transforms.flow import Output
from dpstream.dp_transforms.ingest.columns import identity, instant
from dpstream.dp_transforms.ingest.records import canonical_public_keys
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.dp_transforms.run import Account, Run
from dpstream.dp_transforms.telemetry import guarded
from dpstream.pipelines.connectors.files.source import ReadFiles
from dpstream.pipelines.connectors.input_files import CompareInput, InputWatch, manifest
from dpstream.pipelines.connectors.query import with_cells, with_query
from dpstream.pipelines.frames.project_file import DataSetAccount
from dpstream.pipelines.frames.question import keys_table
from dpstream.pipelines.frames.table import columns_of
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.jobs.keys import public_keys_digest
from dpstream.pipelines.project.job_section import MechanismSection
from dpstream.pipelines.stream.begin import begin
from dpstream.state.arrow import to_bytes
from dpstream.state.numbers import values_of

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
        own_files = not isinstance(job, Plan) and not (
            job.source.query is None and job.cells is None
        )
        refuse_first(
            (
                own_files,
                UsageError(
                    "job",
                    "has a query or cells, which take the job's own files",
                    "put `dpstream.ReadFiles(job)` before DPStream",
                ),
            ),
            (
                plan.record_id is None and offset is None,
                UsageError(
                    "records",
                    "have nothing that numbers them, so one delivered twice would count twice",
                    "name a column that tells a unit's records apart (`table.record_id` of the "
                    "job), or the columns of rows' positions (Rows(job, partition=..., "
                    "offset=...)), or give a table in memory to dpstream.ReadTable",
                ),
            ),
            (
                plan.record_id is not None and (partition or offset) is not None,
                UsageError(
                    "offset", "has no meaning where records have an id of their own", "leave it out"
                ),
            ),
            (
                partition is not None and offset is None,
                UsageError("offset", "is needed with partition", "name both columns"),
            ),
        )
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
            arrays = {}
            for name, kind in [*self._kinds.items(), *((name, pa.int64()) for name in places)]:
                values = [
                    row.get(name) if isinstance(row, Mapping) else getattr(row, name, None)
                    for row in rows
                ]
                is_time = name in self._times
                arrays[name] = instants_of(values) if is_time else column_of(values, kind)
        else:
            named = columns_of(rows, {"records": list(self._kinds), "offset": places})
            arrays = {name: column.combine_chunks() for name, column in named.items()}
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
        return batch.replace_schema_metadata(position_runs(partition, offset))


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


class ReadTable(beam.PTransform):
    """``pipeline | ReadTable(data, job)`` -> record batches of the rows of a table.

    The table becomes part of the pipeline that is sent to the runner, so it must fit in one message
    (some 100 MB); write Parquet files and use ``ReadFiles`` for more.

    Args:
        data: a DataFrame of pandas or Polars, or an Arrow table.
        job: a loaded job, whose columns are read.

    Raises:
        UsageError: ``data`` is not a table, or lacks a column.
    """

    def __init__(self, data: Any, job: Job) -> None:
        super().__init__()
        columns = columns_of(data, {"data": list(job.columns)})
        arrays = [column.combine_chunks() for column in columns.values()]
        batch = pa.RecordBatch.from_arrays(arrays, list(columns))
        step = job.batch_rows
        self._batches = [
            batch.slice(begin, step).replace_schema_metadata({PARTITION: "0", OFFSET: str(begin)})
            for begin in range(0, batch.num_rows, step)
        ]

    @functools.cached_property
    def identity(self) -> list[bytes]:
        """Return a digest of the rows in their order, which distinguishes this input from
        others.
        """
        digest = hashlib.blake2b(digest_size=16)
        for batch in self._batches:
            digest.update(to_bytes(batch))
        return [b"table", digest.digest()]

    def expand(self, pbegin: Any) -> beam.PCollection:
        """Return the record batches, in no particular order."""
        made = pbegin.pipeline | beam.Create(self._batches, reshuffle=False)
        return made | beam.Map(lambda batch: batch).with_output_types(pa.RecordBatch)


class DPStream(flow.DPStream):
    """Differentially private running counts and sums per key.

    Records are Arrow batches with positions (from ``ReadFiles``, ``ReadTable`` or `Rows`).  If the
    job has ``table.record_id``, they may also be rows, dicts or DataFrames.  Bounded input in which
    two rows have the same position is refused, because all but one of them would be dropped.

    Args:
        plan: a loaded job, whose run is begun, and charged in its account, when the transform is
            applied; or the public plan.
        run: a run that was begun before; without it a run is begun or resumed.
        public_keys: all keys that are published, with or without records: a list, or a table with
            the key's columns.  They are part of the plan, so other keys make another run.
        source: an identity of these records (a name and version, or a digest), because a store
            continues only with the input that its run was begun with.  A job's own files and a
            table of ``ReadTable`` have an identity already.
        secret, store, shards, account: needed for a plan whose run is begun here: a reference to
            the secret (``file:PATH``, ``env:NAME``, ``gcp:...``), by default that of the account's
            data set; the store's URL and its number of shards; the account that the run is charged
            in (`frames.project_file`), without which no account adds up what is spent.
        clock: emits the trigger times (`dp_transforms.beam.clock`).

    Raises:
        UsageError: an argument cannot be used.
        PolicyError: the store, the input or the account does not allow the run.
    """

    def __init__(
        self,
        plan: Plan | Job,
        run: Run | None = None,
        *,
        public_keys: Any = None,
        source: str | None = None,
        secret: str | SecretSource | None = None,
        store: str | None = None,
        shards: int | None = None,
        account: Account | None = None,
        clock: beam.PTransform | None = None,
    ) -> None:
        self._job: Job | None = None
        if not isinstance(plan, Plan | Job):
            raise UsageError(
                "plan",
                "is neither a loaded job nor a plan",
                "write DPStream(dpstream.load_job(), source='NAME')",
            )
        if run is not None and public_keys is not None:
            raise UsageError("public_keys", "belong to a run's begin", "give them to begin_run")
        if isinstance(plan, Job) and run is None:
            given = {"secret": secret, "store": store, "shards": shards, "account": account}
            refuse_first(
                *(
                    (
                        value is not None,
                        UsageError(name, "is in the job", "leave it out, or correct the job"),
                    )
                    for name, value in given.items()
                )
            )
            beam.PTransform.__init__(self)
            listed, self._public = _with_keys(plan.plan, public_keys, plan.section.mechanism)
            self._job = msgspec.structs.replace(plan, plan=listed)
            self._source, self._clock, self._once = source, clock, True
            _warn(listed)
            return
        if isinstance(plan, Job):
            plan = plan.plan
        plan, public = _with_keys(plan, public_keys)
        _warn(plan)
        if secret is None and isinstance(account, DataSetAccount):
            secret = account.secret
        super().__init__(
            plan,
            run,
            secret=secret,
            store=store or "sqlite:dpstream.db",
            shards=4 if shards is None else shards,
            source=source,
            clock=clock,
            account=account,
            public=public,
            once=True,
        )

    @no_annotations
    def expand(self, pcoll: beam.PCollection) -> Output:
        """Return the sealed releases and the dead letters of the records."""
        job, watch = self._job, None
        records = _batches(pcoll, self._run.plan if job is None else job)
        if job is not None:
            source = self._identity(job, pcoll)
            watch = InputWatch(manifest(job)) if source is None else None
            records = with_cells(with_query(records, job), job)
            self._run, _ = begin(job, source, self._public)
        self._once = not isinstance(_origin(pcoll), ReadFiles)  # which numbers rows itself
        output: Output = super().expand(records)
        if watch is None:
            return output
        compared = CompareInput(watch.begin(self._run))
        return output._replace(releases=output.releases | "Compare" >> compared)

    def _identity(self, job: Job, pcoll: beam.PCollection) -> list[bytes] | None:
        """Return an identity of the input; ``None`` for the job's own files."""
        if self._source:
            return [b"rows", self._source.encode()]
        origin = _origin(pcoll)
        if isinstance(origin, ReadFiles) and origin.reads(job):
            return None
        if isinstance(origin, ReadTable):
            return origin.identity
        raise UsageError(
            "source",
            "is required: a store goes on only with the input it was begun with",
            "give DPStream(job, source=...) a name and version that tell these records from others",
        )


def _warn(plan: Plan) -> None:
    """Warn the author of the pipeline of a guarantee that promises little."""
    for weakness in weaknesses(plan.privacy.epsilon, plan.privacy.delta):
        warnings.warn(weakness, WeakGuaranteeWarning, stacklevel=3)


def _with_keys(
    plan: Plan, given: Any, mechanism: MechanismSection | None = None
) -> tuple[Plan, pa.Table | None]:
    """Return the plan with a list of public keys in canonical form.

    Args:
        mechanism: of the job whose plan it is: such a plan has one family of noise, because its
            keys were private.
    """
    if given is None:
        return plan, None
    table = keys_table(given, [field.column for field in plan.key], [f.type for f in plan.key])
    public = canonical_public_keys(plan, table)
    digest = public_keys_digest(public, plan.key)
    if plan.public_keys not in (None, digest):
        raise UsageError(
            "public_keys",
            "are others than the job's",
            "leave them out, or `public_keys` of the job",
        )
    # Weights are of selection, and a job has them unasked: as if its file had named the list.
    privacy = msgspec.structs.replace(plan.privacy, weights=None)
    if mechanism is not None and mechanism.strategy == "auto":
        optimise = mechanism.optimise or "period"
        privacy = msgspec.structs.replace(privacy, strategy="auto", optimise=optimise)
    return msgspec.structs.replace(plan, public_keys=digest, privacy=privacy).check(), public


def _batches(pcoll: beam.PCollection, job: Job | Plan) -> beam.PCollection:
    """Return records as batches; `Rows` converts rows of a declared type, if they have numbers.

    Elements of a type that is not declared may be either: if the job has a record id, `Rows`
    accepts both; otherwise they are assumed to be batches, and the workers check that.
    """
    kind = pcoll.element_type
    takes_rows = (
        job.record_id is not None
        if isinstance(job, Plan)
        else job.plan.record_id is not None and job.source.query is None and job.cells is None
    )
    either = kind in (Any, typehints.Any) and takes_rows
    if not either and typehints.is_consistent_with(kind, pa.RecordBatch):
        return pcoll
    return pcoll | "Rows" >> Rows(job)


def _origin(pcoll: beam.PCollection) -> beam.PTransform | None:
    """Return the source of this package that made a collection, directly or through `Rows`."""
    node = pcoll.producer
    while node is not None and not isinstance(node.transform, ReadFiles | ReadTable):
        node = node.parent
    return None if node is None else node.transform
