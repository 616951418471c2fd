"""Records of a job's files as cells of a domain, at most C of each unit: for answers given once.

The records are those of a stream: the same canonical form, times, dead letters and order of
admission (`dp_transforms.admission.admit`), over one window that is the job's whole time.  A record
is represented by the packed numbers of its cells, so that domains may have any size.
"""

from typing import NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from dpstream.accounting.arrays import Int64
from dpstream.accounting.fields import Field
from dpstream.dp_transforms.admission import admit
from dpstream.dp_transforms.batches import ids_of
from dpstream.dp_transforms.ingest.records import Canonicaliser
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.pipelines.connectors.files.source import batches
from dpstream.pipelines.connectors.query import queried
from dpstream.pipelines.jobs.cells import CELL, CellDomain
from dpstream.pipelines.jobs.job import Job

_PACKED = Field(CELL.column, "bytes")
_WIDTH = 2


class Rows(NamedTuple):
    """PRIVATE: (rows, attributes) cells of the records that count; how many did not, and why."""

    codes: Int64
    dead_letters: int
    beyond: int


def bounded(job: Job, domain: CellDomain, keys: KeyRing) -> Rows:
    """Read a job's files.

    Args:
        job: a job with its whole time as one window; its input columns are those of the domain.

    Raises:
        DpstreamError: the files cannot be read.
    """
    plan = msgspec.structs.replace(job.plan, key=(_PACKED,), public_keys=None, cells=None)
    ingest, good, dead = Canonicaliser(plan, keys), [], 0
    for batch in queried(job, batches(job)):
        valid_records, letters = ingest(_packed(domain, batch))
        good.append(valid_records)
        dead += letters.num_rows
    if not good:
        return Rows(np.zeros((0, len(domain.attributes)), np.int64), dead, 0)
    records = pa.Table.from_batches(good).combine_chunks()
    ids = np.concatenate([ids_of(one.column("unit")) for one in good])
    _, unit = np.unique(ids, axis=0, return_inverse=True)
    unit = unit.ravel().astype(np.int64)
    admitted, _ = admit(
        unit,
        records.column("stamp").to_numpy(),
        records.column("partition").to_numpy(),
        records.column("offset").to_numpy(),
        np.ones(len(unit), np.int64),
        np.zeros(int(unit.max(initial=-1)) + 1, np.int32),
        plan.privacy.contributions,
    )
    mask = admitted > 0
    codes = np.concatenate([_unpacked(domain, one.column(CELL.column)) for one in good])
    return Rows(codes[mask], dead, int((~mask).sum()))


def _packed(domain: CellDomain, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the batch with the cells of each row as bytes, null where a cell is missing."""
    codes = domain.codes(batch)
    rows = np.ascontiguousarray(codes.T.clip(min=0)).astype(f"<u{_WIDTH}")
    width = rows.shape[1] * _WIDTH
    offsets = np.arange(len(rows) + 1, dtype=np.int64) * width
    blobs = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(rows), [None, pa.py_buffer(offsets), pa.py_buffer(rows)]
    )
    outside = pa.array((codes < 0).any(axis=0))
    column = pa.compute.if_else(outside, pa.scalar(None, pa.large_binary()), blobs)
    at = batch.schema.get_field_index(CELL.column)
    if at < 0:
        return batch.append_column(CELL.column, column)
    return batch.set_column(at, CELL.column, column)


def _unpacked(domain: CellDomain, column: pa.Array) -> Int64:
    """Return the (rows, attributes) cells that `_packed` packed."""
    size = len(domain.attributes)
    data = b"".join(column.to_pylist())
    return np.frombuffer(data, f"<u{_WIDTH}").reshape(-1, size).astype(np.int64)
