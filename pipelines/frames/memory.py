"""A table in memory as the bounded source of a pipeline; a record's position is its row number."""

import functools
import hashlib
from typing import Any

import apache_beam as beam
import pyarrow as pa

from dpstream.dp_transforms.batches import OFFSET, PARTITION
from dpstream.pipelines.frames.table import columns_of
from dpstream.pipelines.jobs.job import Job
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
        step = job.performance.batch_rows
        self._batches = [
            batch.slice(begin, step).replace_schema_metadata({PARTITION: "0", OFFSET: str(begin)})
            for begin in range(0, batch.num_rows, step)
        ]

    @functools.cached_property
    def identity(self) -> list[bytes]:
        """A digest of the rows in their order, which distinguishes this input from others."""
        digest = hashlib.blake2b(digest_size=16)
        for batch in self._batches:
            digest.update(to_bytes(batch))
        return [b"table", digest.digest()]

    def expand(self, pbegin: Any) -> beam.PCollection:
        """Return the record batches, in no particular order."""
        made = pbegin.pipeline | beam.Create(self._batches, reshuffle=False)
        return made | beam.Map(_same).with_output_types(pa.RecordBatch)


def _same(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch
