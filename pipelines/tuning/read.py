"""The records of the first hours, batch after batch, into histograms.

Ingest is the stream's own: the same canonical form, dead letters and positions.  A timeline
that ends with the first hours keeps later event times out; later stamps are left out by the
tally.  What is counted of a record is a function of that record alone.
"""

import msgspec
import pyarrow as pa

from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.strategies.base import Int64
from dpstream.dp_transforms.batches import Ids
from dpstream.dp_transforms.ingest.records import (
    Canonicaliser,
    canonical_public_keys,
    public_key_ids,
)
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.tuning import Tally
from dpstream.pipelines.connectors.files.source import groups, read_group
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.jobs.keys import read_public_keys
from dpstream.pipelines.tuning.ask import Asked


def tally(asked: Asked, job: Job, ring: KeyRing, name: tuple[bytes, ...]) -> list[Int64]:
    """Exact histograms of the first hours of ``job``'s input: PRIVATE, for ``noisy`` only.

    Args:
        job: whose files are read; the timeline of its plan starts where the first hours do.
        name: of the run, for the sampling keys.

    Raises:
        UsageError: no file, or a column is missing.
        RunError: the operating system cannot read a file.
    """
    line = job.plan.timeline
    ends = msgspec.structs.replace(line, end=line.start + asked.question.first)
    plan = msgspec.structs.replace(job.plan, timeline=ends)
    canonical = Canonicaliser(plan, ring, _public_ids(job, plan, ring))
    counted = Tally(plan, ring, name, asked.design.histograms, asked.question.values_per_unit)
    for group in groups(job):
        for found in read_group(group, job.columns, job.performance.batch_rows):
            if isinstance(found, pa.RecordBatch):
                counted.add(canonical(found)[0])
    return counted.counts()


def _public_ids(job: Job, plan: Plan, ring: KeyRing) -> Ids | None:
    if plan.public_keys is None:
        return None
    return public_key_ids(plan, ring, canonical_public_keys(plan, read_public_keys(job)))
