"""Files in the place of a job's own source: other data of the same schema, read by its ingest.

`dpstream choose --proxy` and `report --truth` read such files.  A source without end gives stamps
and message ids of its own, which no file has: there the event time is the stamp.
"""

import contextlib
from collections.abc import Iterator

import msgspec
import pyarrow as pa

from dpstream.accounting.errors import DpstreamError, UsageError
from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms.ingest.records import (
    Canonicaliser,
    canonical_public_keys,
    public_key_ids,
)
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.pipelines.connectors.cells import in_cells
from dpstream.pipelines.connectors.files.source import batches
from dpstream.pipelines.connectors.query import queried
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.jobs.keys import read_public_keys
from dpstream.pipelines.project.file_kinds import file_kind
from dpstream.pipelines.project.job_parts import GIVEN_COLUMNS


def recorded(job: Job, pattern: str, field: str) -> Job:
    """The job with recorded files for its source.

    Args:
        pattern: absolute path or glob.
        field: the option that named them, for errors.

    Raises:
        UsageError: nothing tells of which kind the files are.
    """
    replace, source = msgspec.structs.replace, job.source
    if not source.unbounded:
        return replace(job, source=replace(source, path=pattern))
    kind = file_kind(pattern) or source.format
    if kind not in ("parquet", "csv", "jsonl"):
        raise UsageError(
            field,
            f"names no kind of files, and table.format is '{source.kind}'",
            "give a path that ends in .parquet, .csv or .jsonl",
        )
    plan = job.plan
    if plan.stamp in GIVEN_COLUMNS:
        plan = replace(plan, stamp="event_time")
    if plan.record_id is not None and plan.record_id.column in GIVEN_COLUMNS:
        plan = replace(plan, record_id=None)
    files = type(source)(kind, pattern, plan.stamp, query=source.query)
    return replace(job, source=files, plan=plan)


def canonical_records(job: Job, plan: Plan, ring: KeyRing) -> Iterator[pa.RecordBatch]:
    """The usable records of a job's files in the stream's own canonical form, batch after batch.

    Args:
        plan: by which they are taken in; its timeline may be another than the job's.
        ring: keys of the ids.

    Raises:
        UsageError: no file, or a column is missing.
        RunError: the operating system cannot read a file.
    """
    public = None
    if plan.public_keys is not None:
        public = public_key_ids(plan, ring, canonical_public_keys(plan, read_public_keys(job)))
    ingest = Canonicaliser(plan, ring, public)
    for batch in in_cells(job, queried(job, batches(job))):
        yield ingest(batch)[0]


@contextlib.contextmanager
def named_by(field: str) -> Iterator[None]:
    """What is wrong with recorded files is said of the option that named them."""
    try:
        yield
    except DpstreamError as error:
        if error.field != "table.path":
            raise
        raise type(error)(field, error.rule, error.fix) from None
