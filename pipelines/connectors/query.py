"""The step between a job's source and the flow: declared forms, its query, and its domain's cells.

This is the one place where times and numbers in declared forms are read (`formats.dialect`), and
where a query is asked.  Every source hands over batches of rows with positions; with a query in the
job they go through it here, batch by batch, and what comes out is a batch of the plan's columns
with the positions of the rows it is made of.  Batches may be cut anywhere:
`pipelines.statements.row_query` says why.

With a domain, the cells of records (behind the query, if there is one) take the place of keys
(`jobs.keys`).
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import apache_beam as beam
import msgspec
import pyarrow as pa

from dpstream.accounting.errors import PolicyError
from dpstream.dp_transforms.telemetry import guarded, timed
from dpstream.pipelines.formats.dialect import read_as
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.jobs.keys import CellDomain
from dpstream.pipelines.project.dialect import Reading

if TYPE_CHECKING:
    from dpstream.pipelines.statements.row_query import RowQuery


class QueryRows(beam.DoFn):
    """Applies a query to batches: the rows that it keeps, with its columns.

    Args:
        query: checked; its public tables travel with it.
    """

    def __init__(self, query: "RowQuery") -> None:
        self._query = query

    @guarded("query")
    def setup(self) -> None:
        """Open a locked DuckDB."""
        from dpstream.pipelines.statements.row_query import RowEngine

        self._engine = RowEngine(self._query)

    def teardown(self) -> None:
        """Close it."""
        engine = self.__dict__.pop("_engine", None)
        if engine is not None:
            engine.close()

    @guarded("query")
    def process(self, element: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Yield one batch; nothing where no row of it stays."""
        with timed("query"):
            rows = self._engine(element)
        if rows.num_rows:
            yield rows


def query_of(job: Job) -> "RowQuery":
    """Return the query of a job that has one, with its public tables.

    Raises:
        PolicyError: a public table is not the one the plan was made with.
        DpstreamError: see `pipelines.statements.row_query.compiled`.
    """
    from dpstream.pipelines.statements.row_query import FIELD, compiled

    plan = msgspec.structs.replace(job.plan, key=job.key)
    query = compiled(job.source, plan, job.path.parent)
    if query.digest != job.plan.query:
        raise PolicyError(FIELD, "changed since the plan was made", "load the job again")
    return query


class ReadAs(beam.DoFn):
    """Reads times and numbers of rows that are written as their table declares."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading

    @guarded("source")
    def process(self, element: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Yield one batch."""
        yield read_as(element, self._reading)


def with_query(records: Any, job: Job) -> Any:
    """Return the batches of a job's source as its reading and its query leave them.

    Raises:
        DpstreamError: see `query_of`.
    """
    if job.reading.converts:
        reading = beam.ParDo(ReadAs(job.reading)).with_output_types(pa.RecordBatch)
        records = records | "Read as" >> reading
    if job.source.query is None:
        return records
    asking = beam.ParDo(QueryRows(query_of(job)))
    return records | "Query" >> asking.with_output_types(pa.RecordBatch)


def apply_query(job: Job, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the same without Beam."""
    if job.reading.converts:
        batches = (read_as(batch, job.reading) for batch in batches)
    if job.source.query is None:
        yield from batches
        return
    from dpstream.pipelines.statements.row_query import RowEngine

    with RowEngine(query_of(job)) as engine:
        for batch in batches:
            rows = engine(batch)
            if rows.num_rows:
                yield rows


class CellRows(beam.DoFn):
    """Adds to rows the number of each one's cell."""

    def __init__(self, domain: CellDomain) -> None:
        self._domain = domain

    @guarded("cells")
    def process(self, element: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Yield one batch."""
        with timed("cells"):
            cells = self._domain.of(element)
        yield cells


def with_cells(records: Any, job: Job) -> Any:
    """Return the batches of a job with the cells of its rows; as they are where it has none."""
    if job.cells is None:
        return records
    mapping = beam.ParDo(CellRows(job.cells.domain)).with_output_types(pa.RecordBatch)
    return records | "Cells" >> mapping


def add_cells(job: Job, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the same without Beam."""
    for batch in batches:
        yield batch if job.cells is None else job.cells.domain.of(batch)
