"""The rows of one closed file of a folder: pieces, parts with positions, given columns."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.connectors.folder.store import Folder, Place, patiently, place
from dpstream.pipelines.connectors.folder.watch import ClosedFile
from dpstream.pipelines.formats.compression import plain_by_name
from dpstream.pipelines.formats.parquet import (
    UnpacksTooLargeError,
    read_row_group,
    row_groups,
)
from dpstream.pipelines.formats.rows import Part, Reason, Refused, Rows, after, refuse
from dpstream.pipelines.formats.texts import read_text
from dpstream.pipelines.project.job_parts import GIVEN_COLUMNS

#: (name, row group, first row, closed, rows that it should have or -1, bytes, last of the file)
FilePiece = tuple[str, int, int, int, int, int, bool]
INSTANT = pa.timestamp("us", "UTC")


class Files(NamedTuple):
    """How the files of a folder are read.

    Attributes:
        folder, kind: where they are, and ``parquet``, ``csv`` or ``jsonl``.
        columns: of every batch, in this order; those of `GIVEN_COLUMNS` hold the closing time.
    """

    folder: Folder
    kind: str
    columns: tuple[str, ...]

    @property
    def data_columns(self) -> tuple[str, ...]:
        """Columns that come from the files."""
        return tuple(name for name in self.columns if name not in GIVEN_COLUMNS)

    def pieces(self, file: ClosedFile) -> Iterator[FilePiece | Refused]:
        """A piece for each row group of a Parquet file, one for another; or why there is none.

        Raises:
            RunError: the store stays away.
        """
        name, closed, rows, size = file
        try:
            info = patiently(lambda: self.folder.info(name))
            starts = self._starts(name) if info is not None else None
        except (OSError, UnpacksTooLargeError):
            info, starts = None, None
        except UsageError:
            yield refuse(0, Reason.MISSING_COLUMN)
            return
        if info is None or starts is None:
            yield refuse(0, Reason.UNREADABLE_FILE)
            return
        size = info.size if size < 0 else size
        for group, row in enumerate(starts):
            yield name, group, row, closed, rows, size, group == len(starts) - 1

    def _starts(self, name: str) -> list[int] | None:
        """First rows of the pieces."""
        if self.kind != "parquet":
            return [0]

        def ask() -> list[int] | None:
            with self._arrow(name) as source:
                return row_groups(source, self.data_columns)

        starts: list[int] | None = patiently(ask)
        return starts

    def parts(self, piece: FilePiece) -> Iterator[tuple[Place, Part]]:
        """Rows, with all columns, and refused positions of a piece.

        A store that is away is waited for; what was read before is not given twice.

        Raises:
            RunError: the store stays away.
        """
        name, _, row, closed, rows, size, last = piece
        where, end = place(name), row
        reading = _Again(lambda: self._open(piece))
        try:
            while (part := patiently(reading.next)) is not None:
                end = max(end, after(part))
                yield where, self._shifted(part, where, closed)
        except UsageError:
            yield where, self._shifted(refuse(0, Reason.MISSING_COLUMN), where, closed)
            return
        except OSError:
            yield where, self._shifted(refuse(end, Reason.UNREADABLE_REST), where, closed)
            return
        finally:
            reading.close()
        if last:
            for reason in self._faults(name, rows, end, size):
                yield where, self._shifted(refuse(end, reason), where, closed)

    def _faults(self, name: str, rows: int, end: int, size: int) -> Iterator[Reason]:
        """What a whole file has against it after it was read."""
        if rows not in (-1, end):
            yield Reason.ROW_COUNT
        with contextlib.suppress(OSError):
            info = patiently(lambda: self.folder.info(name))
            if info is not None and info.size != size:
                yield Reason.FILE_CHANGED

    def _open(self, piece: FilePiece) -> Iterator[Part]:
        name, group, row = piece[:3]
        if self.kind == "parquet":
            with self._arrow(name) as source:
                yield from read_row_group(source, self.data_columns, group, row)
            return
        with self.folder.stream(name) as stream:
            text = plain_by_name(stream, name, self.kind)
            yield from read_text(self.kind, text, self.data_columns)

    @contextlib.contextmanager
    def _arrow(self, name: str) -> Iterator[Any]:
        """What Arrow opens itself: a path, or an object whose faults have numbers."""
        if self.folder.local:
            yield self.folder.path(name)
            return
        with self.folder.stream(name) as stream:
            yield stream

    def _shifted(self, part: Part, where: Place, closed: int) -> Part:
        """A part at its offsets, with the given columns."""
        if isinstance(part, Refused):
            return Refused(part.offsets + where.base, part.reasons)
        batch, rows = part.batch, part.batch.num_rows
        given = pa.repeat(pa.scalar(closed, pa.int64()).cast(INSTANT), rows)
        arrays = [given if c in GIVEN_COLUMNS else batch.column(c) for c in self.columns]
        return Rows(where.base + part.offset, _batch(arrays, self.columns))


def _batch(arrays: Sequence[pa.Array], names: Sequence[str]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(list(arrays), list(names))


class _Again:
    """The parts of a piece, opened again after a fault at the part where it failed.

    A piece gives the same parts whenever it is read: blocks and chunks have fixed sizes.
    """

    def __init__(self, make: Any) -> None:
        self._make, self._done = make, 0
        self._parts: Iterator[Part] | None = None

    def next(self) -> Part | None:
        """The next part, ``None`` at the end.

        Raises:
            OSError: the system failed; ask again.
        """
        if self._parts is None:
            self._made = self._make()
            self._parts = itertools.islice(self._made, self._done, None)
        try:
            part = next(self._parts, None)
        except OSError:
            self._parts = None
            raise
        self._done += 1
        return part

    def close(self) -> None:
        """Let go of the file."""
        if self._parts is not None:
            self._made.close()
