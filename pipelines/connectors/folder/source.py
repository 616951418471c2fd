"""A folder that grows as a source: ``FolderInput`` of jobs of kind ``folder``.

Markers or times of change say which files are closed (`folder.watch`); all rows of a file have
the time of its closing as their stamp, or a column that the job names.  One splittable DoFn
watches; files and their row groups are spread over the workers; a row's position is a function
of its file's name and its number (`folder.store`).

The watermark is the instant of the last marker (less ``settle`` where a column has the stamps), or
the clock less ``settle`` and a margin: facts of the source, whatever the files hold.  A file that
breaks the promise is late, not lost.
"""

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow as pa
from apache_beam.pvalue import TaggedOutput
from apache_beam.transforms.window import TimestampedValue
from typing_extensions import override

from dpstream.accounting.errors import UsageError
from dpstream.dp_transforms.beam.clock import give_back
from dpstream.dp_transforms.telemetry import guarded
from dpstream.pipelines.connectors.folder.files import FilePiece, Files
from dpstream.pipelines.connectors.folder.store import (
    PATIENCE_SECONDS,
    Folder,
    Place,
    away,
    find,
    place,
)
from dpstream.pipelines.connectors.folder.watch import (
    ClosedFile,
    Markers,
    SeenFiles,
    Settled,
    Step,
    nothing_seen,
)
from dpstream.pipelines.connectors.inputs import (
    BACKPRESSURE_SECONDS,
    DEAD_LETTER,
    Backpressure,
    Input,
    ReadRows,
    positioned,
    reading,
    refusal,
)
from dpstream.pipelines.connectors.unbounded import (
    TRACKER,
    WATERMARK,
    Bundle,
    advance,
    stands,
    wall_micros,
)
from dpstream.pipelines.formats.rows import Refused, Rows
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.project.text import duration_micros

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
        """All files that are closed by now."""
        self._check()
        (watch, files), rows = _readers(self.job, 0), self.job.performance.batch_rows
        for step in watch.steps(nothing_seen(0, isinstance(watch, Markers)), wall_micros()):
            yield from (_at(where, refused) for where, refused in step.refused)
            for file in step.files:
                for piece in files.pieces(file):
                    if isinstance(piece, Refused):
                        yield _at(place(file[0]), piece)
                        continue
                    for where, part in files.parts(piece):
                        if isinstance(part, Refused):
                            yield part, where.partition
                        else:
                            yield from positioned(part, where.partition, rows)

    @override
    def locate(self, partition: int, offset: int) -> tuple[str, int]:
        """By the names of all files that are there, markers too."""
        names = [file.name for file in self.folder.list()]
        return next(iter(find(names, partition, offset)), super().locate(partition, offset))

    def _check(self) -> None:
        if not self.folder.is_there():
            raise UsageError("table.path", "is not a folder", "make it, or correct the path")
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
                raise away() from None
            return None
        self._away_since = None
        return step


def _outputs(step: Step, at: Any) -> Iterator[Any]:
    """Files and dead letters; at the watermark, which is not later than a stamp in them."""
    for file in step.files:
        yield TimestampedValue(file, at)
    for where, refused in step.refused:
        yield TimestampedValue(_letters(where, refused), at)


def _letters(where: Place, refused: Refused) -> pa.RecordBatch:
    """Dead letters of rows of a file."""
    return refusal(*_at(where, refused))


def _at(where: Place, refused: Refused) -> tuple[Refused, int]:
    """Rows of a file as positions, with their partition."""
    return Refused(refused.offsets + where.base, refused.reasons), where.partition


def _readers(job: Job, begin: int) -> tuple[Markers | Settled, Files]:
    """What says which files of a job's folder are closed, and what reads them."""
    folder, kind = Folder(job.source.path), str(job.source.format)
    settle = duration_micros("table.settle", job.source.settle)
    watch: Markers | Settled = Settled(folder, f".{kind}", settle)
    if job.plan.stamp != "_closed":
        watch = Markers(folder, begin, 0 if job.plan.stamp == "_manifest" else settle)
    return watch, Files(folder, kind, job.columns)


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
            yield _letters(place(element[0]), piece) if isinstance(piece, Refused) else piece


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
        for where, part in self._files.parts(element):
            if isinstance(part, Rows):
                yield from positioned(part, where.partition, self._batch_rows)
            else:
                yield TaggedOutput(DEAD_LETTER, refusal(part, where.partition))


class ReadFolder(beam.PTransform):  # type: ignore[misc]
    """The records of a folder that grows: outputs ``records`` and ``dead_letter``.

    Args:
        job: its source, columns and ``batch_rows`` are used.
        begin: files that were closed before it (micros) are passed over.
        backpressure: keeps it from running ahead of the releases.
    """

    def __init__(self, job: Job, begin: int = 0, backpressure: Backpressure | None = None) -> None:
        super().__init__()
        watch, self._files = _readers(job, begin)
        self._watch = _Watch(watch, begin, backpressure)
        self._batch_rows = job.performance.batch_rows

    @override
    def expand(self, begin: Any) -> Any:
        """``Impulse | watch | spread | pieces | spread | read``."""
        return (
            begin
            | beam.Impulse()
            | "Watch" >> beam.ParDo(self._watch).with_output_types(Any)
            | "SpreadFiles" >> beam.Reshuffle()
            | "Pieces" >> beam.ParDo(_Pieces(self._files)).with_output_types(Any)
            | "SpreadPieces" >> beam.Reshuffle()
            | "Read" >> reading(_ReadFilePiece(self._files, self._batch_rows))
        )
