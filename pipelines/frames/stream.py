"""``records | dpstream.DPStream(job)``: the flow of a job or a plan, on rows of any kind.

A table in memory is a bounded source of a pipeline (`ReadTable`); a record's position is its row
number.
"""

import functools
import hashlib
import warnings
from typing import Any

import apache_beam as beam
import msgspec
import pyarrow as pa
from apache_beam.typehints import no_annotations, typehints

from dpstream.accounting.errors import UsageError
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.strength import WeakGuaranteeWarning, weaknesses
from dpstream.dp_transforms import flow
from dpstream.dp_transforms.batches import OFFSET, PARTITION
from dpstream.dp_transforms.flow import Output
from dpstream.dp_transforms.ingest.records import canonical_public_keys
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.dp_transforms.run import Account, Run
from dpstream.pipelines.connectors.files.source import ReadFiles
from dpstream.pipelines.connectors.input_files import CompareInput, InputWatch, manifest
from dpstream.pipelines.connectors.query import with_cells, with_query
from dpstream.pipelines.frames.numbered import Rows
from dpstream.pipelines.frames.project_file import DataSetAccount
from dpstream.pipelines.frames.question import keys_table
from dpstream.pipelines.frames.table import columns_of
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.jobs.keys import public_keys_digest
from dpstream.pipelines.project.job_parts import PrivacyConfig
from dpstream.pipelines.stream.begin import begin
from dpstream.state.arrow import to_bytes
from dpstream.state.numbers import one_array


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
        arrays = [one_array(column) for column in columns.values()]
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


_OF_JOB = "is in the job"


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
            given = {
                "secret": secret,
                "store": store,
                "shards": shards,
                "account": account,
            }
            for name, value in given.items():
                if value is not None:
                    raise UsageError(name, _OF_JOB, "leave it out, or correct the job")
            beam.PTransform.__init__(self)
            listed, self._public = _with_keys(plan.plan, public_keys, plan.privacy)
            self._job = msgspec.structs.replace(plan, plan=listed)
            self._source, self._clock, self._once = source, clock, True
            _warn(listed)
            return
        if isinstance(plan, Job):
            plan = plan.plan
        plan, public = _with_keys(plan, public_keys)
        _warn(plan)
        super().__init__(
            plan,
            run,
            secret=_secret(secret, account),
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


def _secret(given: str | SecretSource | None, account: Account | None) -> str | SecretSource | None:
    """The secret of a run that is begun here: as given, else that of its account's data set."""
    if given is None and isinstance(account, DataSetAccount):
        return account.secret
    return given


def _with_keys(
    plan: Plan, given: Any, file: PrivacyConfig | None = None
) -> tuple[Plan, pa.Table | None]:
    """Return the plan with a list of public keys in canonical form.

    Args:
        file: whether the plan is a job's: such a plan has one family of noise, because its keys
            were private.
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
    if file is not None and file.strategy in (None, "auto"):
        optimise = file.optimise or "period"
        privacy = msgspec.structs.replace(privacy, strategy="auto", optimise=optimise)
    return msgspec.structs.replace(plan, public_keys=digest, privacy=privacy).check(), public


def _batches(pcoll: beam.PCollection, job: Job | Plan) -> beam.PCollection:
    """Return records as batches; `Rows` converts rows of a declared type, if they have numbers.

    Elements of a type that is not declared may be either: if the job has a record id, `Rows`
    accepts both; otherwise they are assumed to be batches, and the workers check that.
    """
    kind = pcoll.element_type
    if kind in (Any, typehints.Any) and _takes_rows(job):
        return pcoll | "Rows" >> Rows(job)
    if typehints.is_consistent_with(kind, pa.RecordBatch):
        return pcoll
    return pcoll | "Rows" >> Rows(job)


def _takes_rows(job: Job | Plan) -> bool:
    """Return whether `Rows` can number rows without further arguments."""
    if isinstance(job, Plan):
        return job.record_id is not None
    return job.plan.record_id is not None and job.source.query is None and job.cells is None


def _origin(pcoll: beam.PCollection) -> beam.PTransform | None:
    """Return the source of this package that made a collection, directly or through `Rows`."""
    node = pcoll.producer
    while node is not None and not isinstance(node.transform, ReadFiles | ReadTable):
        node = node.parent
    return None if node is None else node.transform
