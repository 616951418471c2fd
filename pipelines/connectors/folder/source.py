"""A folder that grows as a source: ``FolderInput`` of jobs of kind ``folder``.

Markers or times of change say which files are closed (`folder.store`); all rows of a file have
the time of its closing as their stamp, or a column that the job names.  One splittable DoFn
watches; files and their row groups are spread over the workers, which read a closed file in pieces,
as parts with positions and the columns that are given.  A row's position is a function of its
file's name and its number (`folder.store`).

The watermark is the instant of the last marker (less ``settle`` where a column has the stamps), or
the clock less ``settle`` and a margin: facts of the source, whatever the files hold.  A file that
breaks the promise is late, not lost.
"""

import contextlib
import itertools
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import apache_beam as beam
import pyarrow as pa
from apache_beam.pvalue import TaggedOutput
from apache_beam.transforms.window import TimestampedValue
from typing_extensions import override

from dpstream.accounting.errors import UsageError
from dpstream.dp_transforms.beam.clock import give_back
from dpstream.dp_transforms.telemetry import guarded
from dpstream.pipelines.connectors.dead_letters import damage_in
from dpstream.pipelines.connectors.folder.store import (
    PATIENCE_SECONDS,
    ClosedFile,
    Folder,
    Markers,
    Place,
    SeenFiles,
    Settled,
    Step,
    away_error,
    find,
    nothing_seen,
    patiently,
    place,
)
from dpstream.pipelines.connectors.inputs import (
    BACKPRESSURE_SECONDS,
    DEAD_LETTER,
    TRACKER,
    WATERMARK,
    Backpressure,
    Bundle,
    Input,
    ReadRows,
    advance,
    output,
    placed,
    read_transform,
    refusal,
    stands,
    wall_micros,
)
from dpstream.pipelines.formats.compression import plain_by_name
from dpstream.pipelines.formats.parquet import UnpacksTooLargeError, read_row_group, row_groups
from dpstream.pipelines.formats.rows import Part, Reason, Refused, Rows, after, refuse
from dpstream.pipelines.formats.texts import COMMAS, read_text
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.project.sections import CsvSection
from dpstream.pipelines.project.source import GIVEN_COLUMNS, no_folder
from dpstream.pipelines.project.text import duration_micros

#: (name, row group, first row, closed, rows that it should have or -1, bytes, last of the file)
FilePiece = tuple[str, int, int, int, int, int, bool]
INSTANT = pa.timestamp("us", "UTC")


class Files(NamedTuple):
    """The way in which the files of a folder are read.

    Attributes:
        folder, kind: where they are, and ``parquet``, ``csv`` or ``jsonl``.
        columns: of every batch, in this order; those of `GIVEN_COLUMNS` hold the closing time.
        csv: how CSV files are written.
    """

    folder: Folder
    kind: str
    columns: tuple[str, ...]
    csv: CsvSection = COMMAS

    @property
    def data_columns(self) -> tuple[str, ...]:
        """Columns that come from the files."""
        return tuple(name for name in self.columns if name not in GIVEN_COLUMNS)

    def pieces(self, file: ClosedFile) -> Iterator[FilePiece | Refused]:
        """Yield a piece for each row group of a Parquet file, one for another; or why there is
        none.

        Raises:
            RunError: the store stays away.
        """
        name, closed, rows, size = file
        try:
            info = patiently(lambda: self.folder.info(name))
            starts = self._starts(name) if info is not None else None
        except OSError:
            info, starts = None, None
        except UnpacksTooLargeError:
            yield refuse(0, Reason.UNPACKS_TOO_LARGE)
            return
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

    def parts(self, piece: FilePiece) -> Iterator[Part]:
        """Yield Rows, with all columns, and refused positions of a piece.

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
                yield self._shifted(part, where, closed)
        except UsageError:
            yield self._shifted(refuse(0, Reason.MISSING_COLUMN), where, closed)
            return
        except OSError:
            yield self._shifted(refuse(end, Reason.UNREADABLE_REST), where, closed)
            return
        finally:
            reading.close()
        if last:
            for reason in self._faults(name, rows, end, size):
                yield self._shifted(refuse(end, reason), where, closed)

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
            yield from read_text(self.kind, text, self.data_columns, csv=self.csv)

    def _arrow(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """What Arrow opens itself: a path, or an object whose faults have numbers."""
        local = contextlib.nullcontext(self.folder.path(name))
        return local if self.folder.local else self.folder.stream(name)

    def _shifted(self, part: Part, where: Place, closed: int) -> Part:
        """A part at its offsets, with the given columns."""
        if isinstance(part, Refused):
            return _placed_refusal(where, part)[0]
        batch, rows = part.batch, part.batch.num_rows
        given = pa.repeat(pa.scalar(closed, pa.int64()).cast(INSTANT), rows)
        arrays = [given if c in GIVEN_COLUMNS else batch.column(c) for c in self.columns]
        shifted = pa.RecordBatch.from_arrays(arrays, list(self.columns))
        return Rows(where.base + part.offset, shifted)


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


#: Seconds between two looks: at least `POLL`, at least `SHARE` times as long as one takes.
POLL_SECONDS, MOST_POLL_SECONDS, POLL_SHARE = 0.25, 60.0, 5.0


class FolderInput(Input):
    """Files of a folder that grows."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.folder = Folder(job.source.path)

    @override
    def identity(self) -> list[bytes]:
        self._check()
        return [b"folder", self.folder.url.encode(), str(self.job.source.format).encode()]

    @override
    def read(self, begin: int = 0, backpressure: Backpressure | None = None) -> Any:
        self._check()
        return ReadFolder(self.job, begin, backpressure)

    @override
    def scan(self) -> Iterator[ReadRows]:
        """Yield all files that are closed by now."""
        self._check()
        (watch, files), rows = _readers(self.job, 0), self.job.batch_rows
        for step in watch.steps(nothing_seen(0, isinstance(watch, Markers)), wall_micros()):
            yield from (_placed_refusal(where, refused) for where, refused in step.refused)
            for file in step.files:
                for piece in files.pieces(file):
                    if isinstance(piece, Refused):
                        yield _placed_refusal(place(file[0]), piece)
                        continue
                    yield from placed(files.parts(piece), place(file[0]).partition, rows)

    @override
    def locate(self, partition: int, offset: int) -> tuple[str, int]:
        """Return the file and row of a position, from the names of all files, markers included."""
        names = [file.name for file in self.folder.list()]
        return next(iter(find(names, partition, offset)), super().locate(partition, offset))

    @override
    def damaged(self) -> dict[str, str]:
        """Return the damaged files, by the dead letters on this machine.

        A file that is gone has no name any more: its partition stands for it.
        """
        reasons = damage_in(Path(self.job.dead_letter))
        names = {partition: f"partition {partition}" for partition in reasons}
        if reasons:
            with contextlib.suppress(OSError):
                names |= {place(file.name).partition: file.name for file in self.folder.list()}
        return {names[partition]: reason for partition, reason in reasons.items()}

    def _check(self) -> None:
        if not self.folder.is_there():
            raise no_folder()
        if self.folder.local:
            inside, sink = Path(self.folder.path("")), self.job.sink.folder
            if sink is not None and inside in (sink.resolve(), *sink.resolve().parents):
                raise UsageError(
                    "sink.path", "lies in the source's folder", "write releases elsewhere"
                )


class _Watch(beam.DoFn):
    """One splittable element: the folder; gives closed files, and the watermark."""

    def __init__(
        self, watch: Markers | Settled, begin: int, backpressure: Backpressure | None
    ) -> None:
        self._watch, self._begin, self._backpressure = watch, begin, backpressure
        self._left: Iterator[Step] | None = None
        self._seen: SeenFiles | None = None
        self._away_since: float | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_left": None, "_away_since": None}

    @beam.DoFn.unbounded_per_element()
    @guarded("source")
    def process(
        self, element: bytes, tracker: Any = TRACKER, watermark: Any = WATERMARK
    ) -> Iterator[Any]:
        """Newly closed files until there are none, or the bundle has lasted long enough."""
        progress, bundle, started = tracker.current_restriction(), Bundle(), time.monotonic()
        now = watermark.current_watermark()
        if self._backpressure and now is not None and self._backpressure.holds(now.micros):
            give_back(tracker, BACKPRESSURE_SECONDS)
            return
        markers = isinstance(self._watch, Markers)
        seen = progress.after or nothing_seen(self._begin, markers)
        left, self._left = self._left, None
        if left is None or self._seen != seen:
            left = self._watch.steps(seen, wall_micros())
        while (step := self._next(left)) is not None:
            if not tracker.try_claim(step.seen):
                return
            self._seen = step.seen
            yield from _outputs(step, stands(watermark))
            if step.upto is not None:
                advance(watermark, step.upto)
            if bundle.add(0):
                self._left = left
                tracker.defer_remainder()
                return
        took = time.monotonic() - started
        pause = min(max(POLL_SECONDS, POLL_SHARE * took), MOST_POLL_SECONDS)
        give_back(tracker, pause)

    def _next(self, steps: Iterator[Step]) -> Step | None:
        """The next step; none while the store is away, for as long as that is borne."""
        try:
            step = next(steps, None)
        except OSError:
            now = time.monotonic()
            self._away_since = self._away_since or now
            if now - self._away_since > PATIENCE_SECONDS:
                raise away_error() from None
            return None
        self._away_since = None
        return step


def _outputs(step: Step, at: Any) -> Iterator[Any]:
    """Files and dead letters; at the watermark, which is not later than a stamp in them."""
    for file in step.files:
        yield TimestampedValue(file, at)
    for where, refused in step.refused:
        yield TimestampedValue(refusal(*_placed_refusal(where, refused)), at)


def _placed_refusal(where: Place, refused: Refused) -> tuple[Refused, int]:
    """Rows of a file as positions, with their partition."""
    return Refused(refused.offsets + where.base, refused.reasons), where.partition


def _readers(job: Job, begin: int) -> tuple[Markers | Settled, Files]:
    """What says which files of a job's folder are closed, and what reads them."""
    folder, kind = Folder(job.source.path), str(job.source.format)
    settle = duration_micros("table.settle", job.source.settle)
    watch: Markers | Settled = Settled(folder, f".{kind}", settle)
    if job.plan.stamp != "_closed":
        watch = Markers(folder, begin, 0 if job.plan.stamp == "_manifest" else settle)
    return watch, Files(folder, kind, job.columns, job.reading.csv)


class _Pieces(beam.DoFn):
    """Closed file -> pieces; dead letters pass."""

    def __init__(self, files: Files) -> None:
        self._files = files

    @guarded("source")
    def process(self, element: ClosedFile | pa.RecordBatch) -> Iterable[Any]:
        """Look into one file."""
        if isinstance(element, pa.RecordBatch):
            yield element
            return
        for piece in self._files.pieces(element):
            yield (
                refusal(*_placed_refusal(place(element[0]), piece))
                if isinstance(piece, Refused)
                else piece
            )


class _ReadFilePiece(beam.DoFn):
    """Piece -> batches; dead letters pass."""

    def __init__(self, files: Files, batch_rows: int) -> None:
        self._files, self._batch_rows = files, batch_rows

    @guarded("source")
    def process(self, element: FilePiece | pa.RecordBatch) -> Iterable[Any]:
        """Read one piece; yields `pa.RecordBatch` and tagged dead letters."""
        if isinstance(element, pa.RecordBatch):
            yield TaggedOutput(DEAD_LETTER, element)
            return
        partition = place(element[0]).partition
        yield from map(output, placed(self._files.parts(element), partition, self._batch_rows))


class ReadFolder(beam.PTransform):  # type: ignore[misc]
    """The records of a folder that grows: outputs ``records`` and ``dead_letter``.

    Args:
        job: the job, of which source, columns and ``batch_rows`` are used.
        begin: files that were closed before it (micros) are passed over.
        backpressure: keeps it from running ahead of the releases.
    """

    def __init__(self, job: Job, begin: int = 0, backpressure: Backpressure | None = None) -> None:
        super().__init__()
        watch, self._files = _readers(job, begin)
        self._watch = _Watch(watch, begin, backpressure)
        self._batch_rows = job.batch_rows

    @override
    def expand(self, begin: Any) -> Any:
        """Return ``Impulse | watch | spread | pieces | spread | read``."""
        return (
            begin
            | beam.Impulse()
            | "Watch" >> beam.ParDo(self._watch).with_output_types(Any)
            | "SpreadFiles" >> beam.Reshuffle()
            | "Pieces" >> beam.ParDo(_Pieces(self._files)).with_output_types(Any)
            | "SpreadPieces" >> beam.Reshuffle()
            | "Read" >> read_transform(_ReadFilePiece(self._files, self._batch_rows))
        )
