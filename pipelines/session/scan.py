"""STUB (signatures only)."""

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from dpstream.accounting.arrays import Int64
from dpstream.accounting.sessions.cells import Cells, Totals
from dpstream.accounting.sessions.table import SessionTable


class Scan:
    """The records of a table as it is now, behind a locked DuckDB; a context that closes it.

    It keeps the version of the table that it opened.

    Args:
        folder: the table's; table: its model.

    Raises:
        RunError: there is no table, or a part is not as it was written.
        PolicyError: it is another table.
    """

    def __init__(self, folder: Path, table: SessionTable, threads: int | None = None) -> None:
        raise NotImplementedError

    def __enter__(self) -> "Scan":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the table."""

    @property
    def version(self) -> int:
        """Of the table: grows with every change of its records."""
        raise NotImplementedError

    def totals(self, boxes: Int64, cells: Cells, columns: Sequence[int] = ()) -> Totals:
        """What usable records in some boxes add up to, in one scan.

        Args:
            boxes: (m, d, 2) disjoint, not snapped: what may be read.
            cells: see `Cells`.
            columns: numbers of the dimensions to add up.
        """
        raise NotImplementedError

    def histograms(self, boxes: Int64, cells: Cells, column: int, leaves: Int64) -> Int64:
        """(cells, leaves) int64 records of each cell by ranges of one column, in one scan.

        Args:
            column: number of a dimension.
            leaves: (n + 1,) edges of the ranges, strictly rising coordinates.
        """
        raise NotImplementedError
