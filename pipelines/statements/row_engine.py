"""Batches of rows through a row-local query: DuckDB behind a lock, with no file and one thread.

A batch is registered with numbers of its rows, the query gives numbers and columns, and the
unit, times and record ids are taken from the batch by these numbers, untouched, as are
positions.  Numbers that rise strictly are the proof that no row was multiplied: whatever a text
was let through, it cannot give one row two names or two rows one.
"""

import numpy as np
import pyarrow as pa

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import PolicyError
from dpstream.dp_transforms.ingest.records import positions
from dpstream.pipelines.formats.small import Located, positioned_runs
from dpstream.pipelines.statements.row_local import ROW
from dpstream.pipelines.statements.row_query import ARRIVED, RowQuery, opened
from dpstream.pipelines.tables.row_types import typed
from dpstream.state.closing import Closing


class RowEngine(Closing):
    """A row-local query at work; a context that closes it.

    Args:
        query: checked.
    """

    def __init__(self, query: RowQuery) -> None:
        self._query, self._engine = query, opened(query)

    def close(self) -> None:
        """Close DuckDB."""
        self._engine.close()

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows that the query keeps, in their order, with their positions as metadata.

        Raises:
            PolicyError: the query is not row-local; RunError: DuckDB cannot run it.
        """
        query = self._query
        arrived = {
            name: typed(batch.column(own), query.types[name]) for name, own in query.reads.items()
        }
        numbers = pa.array(np.arange(batch.num_rows, dtype=np.int64))
        self._engine.register(ARRIVED, pa.table({ROW: numbers, **arrived}))
        table = self._engine.run(query.sql)
        rows, order = _rows(table.column(0), batch.num_rows)
        columns = {name: batch.column(name).take(rows) for name in query.passing}
        for name, column in zip(query.names, table.columns[1:], strict=True):
            array = column.combine_chunks()
            array = pa.concat_arrays(array.chunks) if isinstance(array, pa.ChunkedArray) else array
            columns[name] = array if order is None else array.take(order)
        if not len(rows):
            return pa.RecordBatch.from_pydict(columns)
        row_numbers = rows.to_numpy()
        partition, offset = (where[row_numbers] for where in positions(batch))
        out = Located(partition, offset, pa.RecordBatch.from_pydict(columns))
        return next(positioned_runs(out, len(row_numbers)))


def _rows(column: pa.ChunkedArray, size: int) -> tuple[pa.Array, pa.Array | None]:
    """The numbers of the rows that stay, rising, and the places to take columns from.

    Raises:
        PolicyError: a row is there twice, or none that came.
    """
    numbers: Int64 = column.drop_null().to_numpy()
    order = None
    if (np.diff(numbers) <= 0).any():
        order = np.argsort(numbers, kind="stable")
        numbers = numbers[order]
    inside = not len(numbers) or (numbers[0] >= 0 and numbers[-1] < size)
    if column.null_count or not inside or (np.diff(numbers) <= 0).any():
        raise PolicyError(
            "query",
            "gives a row of the source twice, or rows that are none of its",
            "join public tables by keys that are unique",
        )
    return pa.array(numbers), None if order is None else pa.array(order)
