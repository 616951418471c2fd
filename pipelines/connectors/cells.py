"""The cells of records between a job's source (or its query) and the flow; see `jobs.cells`."""

from collections.abc import Iterable, Iterator
from typing import Any

import apache_beam as beam
import pyarrow as pa

from dpstream.dp_transforms.telemetry import guarded, timed
from dpstream.pipelines.jobs.cells import CellDomain
from dpstream.pipelines.jobs.job import Job


class CellRows(beam.DoFn):
    """Batches -> the same rows with the number of each one's cell."""

    def __init__(self, domain: CellDomain) -> None:
        self._domain = domain

    @guarded("cells")
    def process(self, element: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """One batch."""
        with timed("cells"):
            cells = self._domain.of(element)
        yield cells


def with_cells(records: Any, job: Job) -> Any:
    """The batches of a job with the cells of its rows; as they are where it has none."""
    if job.cells is None:
        return records
    mapping = beam.ParDo(CellRows(job.cells.domain)).with_output_types(pa.RecordBatch)
    return records | "Cells" >> mapping


def in_cells(job: Job, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same without Beam."""
    for batch in batches:
        yield batch if job.cells is None else job.cells.domain.of(batch)
