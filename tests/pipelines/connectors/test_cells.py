"""Batches with the cells of their rows."""

from pathlib import Path

import apache_beam as beam
import pyarrow as pa
from apache_beam.testing.util import assert_that, equal_to

from dpstream.accounting.strategies.cells.mixing import mixed
from dpstream.accounting.strategies.cells.strategy import identity
from dpstream.pipelines.connectors.cells import in_cells, with_cells
from dpstream.pipelines.connectors.files.source import batches
from dpstream.pipelines.workload.of_job import cells_job
from tests.pipelines.workload.survey import survey, workload


def test_with_and_without_beam(tmp_path: Path) -> None:
    plain = survey(tmp_path, 50)
    job = cells_job(plain, workload(), mixed(identity(workload()), workload().sizes), False)
    read = list(batches(job))
    assert list(in_cells(plain, read)) == read
    numbers = [cell for b in in_cells(job, read) for cell in b.column("cell").to_pylist()]
    assert len(numbers) == 50 and None in numbers and max(c for c in numbers if c is not None) < 10
    with beam.Pipeline() as pipeline:
        given = pipeline | beam.Create(read)
        cells = with_cells(given, job) | beam.FlatMap(lambda b: b.column("cell").to_pylist())
        assert_that(cells, equal_to(numbers))
    assert with_cells(given, plain) is given
    assert isinstance(read[0], pa.RecordBatch)
