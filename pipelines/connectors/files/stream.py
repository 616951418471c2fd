"""Files as a stream, for streaming runners: ``pipeline | StreamFiles(job)``.

The files of a job of kind ``parquet``, ``csv`` or ``jsonl`` are read by one splittable DoFn in the
order of their stamps, with the same positions, batches and dead letters as `ReadFiles`; so the
releases are the same bytes.

The watermark is the least stamp that remains to be read.  That is a fact of the source and no
policy that follows the data's flow: the content of the files is fixed and known before the first
row is read (the index below).  A row with an early stamp behind later ones makes releases wait
until it is read; it changes none.

**The index** says where the stamps lie: the parts of the files in the order in which they are read.
One pass over the stamp column (Parquet: that column alone, about 100M rows/s; the statistics of a
row group would say nothing about where in the group its stamps are) tells for every row the **due**
time: the least stamp of it and of all rows behind it in its piece.  Due times do not fall within a
piece, so that pieces are read from front to back; across pieces, parts (some consecutive rows)
follow each other by due time.  Everything before a part's due time has then been read, in whatever
order a file has its rows.

Stamps are clipped into the job's time: what lies outside becomes a dead letter wherever it is.
"""

import functools
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import apache_beam as beam
import numpy as np

from dpstream.accounting.arrays import Int64
from dpstream.dp_transforms.beam.clock import give_back
from dpstream.dp_transforms.ingest.columns import instant
from dpstream.dp_transforms.telemetry import guarded
from dpstream.pipelines.connectors.files.source import Piece, pieces, read_piece
from dpstream.pipelines.connectors.inputs import (
    BACKPRESSURE_SECONDS,
    TRACKER,
    WATERMARK,
    Backpressure,
    Bundle,
    advance,
    beam_time,
    output,
    placed,
    read_transform,
    stands,
)
from dpstream.pipelines.formats.dialect import parts_as
from dpstream.pipelines.formats.rows import Part, Refused, Rows, unreadable
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.project.dialect import Reading

#: The index knows the least stamp of so many rows together; of 2, 4, ... times as many in a piece
#: that has more such groups of rows than the second number.
GRAIN_ROWS = 16
MAX_GRAINS = 1 << 22
#: Files that are read at the same time and stay open; beyond it they are opened again.
OPEN_PIECES = 64
#: Least of no stamps.
NEVER = np.iinfo(np.int64).max


class Recording(NamedTuple):
    """The parameters that an index is made from: hashable, the same on every machine.

    Attributes:
        pieces: all pieces, in manifest order (see `pipelines.connectors.files.source.pieces`).
        columns: all that are read; ``stamp``: the one of stamps.
        begin, end: stamps are clipped to these instants.
        batch_rows: most rows of a part.
        reading: how the files are read.
    """

    pieces: tuple[Piece, ...]
    columns: tuple[str, ...]
    stamp: str
    begin: int
    end: int
    batch_rows: int
    reading: Reading


class Index(NamedTuple):
    """Parts of a recording in the order in which they are read; int64 arrays, one entry a part.

    Attributes:
        piece: index into the recording's pieces.
        row, end: rows ``row`` <= r < ``end`` of its file.  The last part of a piece has a row
            more than is known, where a piece says that it broke off.
        due: least stamp of this part and of what follows in its piece, ascending.
    """

    piece: Int64
    row: Int64
    end: Int64
    due: Int64


def recording_of(job: Job) -> Recording:
    """Return the recording that a job's files are.

    Raises:
        UsageError, RunError: see `pipelines.connectors.files.source.pieces`.
    """
    plan, timeline = job.plan, job.plan.timeline
    stamp = plan.event_time if plan.stamp == "event_time" else plan.stamp
    end = timeline.instant_of(timeline.last_trigger_time)
    rows = job.batch_rows
    begin, reading = timeline.start, job.reading
    return Recording(tuple(pieces(job)), job.columns, stamp, begin, end, rows, reading)


@functools.lru_cache(maxsize=2)
def index_of(recording: Recording) -> Index:
    """Return the index of a recording; once a process.

    Raises:
        RunError: the operating system cannot read a file.
    """
    none = np.zeros((4, 0), np.int64)
    parts = [_parts(number, piece, recording) for number, piece in enumerate(recording.pieces)]
    table = np.concatenate([none, *parts], axis=1)
    piece, row, _, due = table
    return Index(*table[:, np.lexsort((row, piece, due))])


def _parts(number: int, piece: Piece, recording: Recording) -> Int64:
    """(4, n): piece, row, end, due of a piece's parts."""
    size, grains, least, rows = _least_stamps(piece, recording)
    due = due_times(least, recording.begin)
    row = grains * size
    row[0] = 0
    at = np.flatnonzero(np.diff(row // max(size, recording.batch_rows), prepend=-1))
    row = piece[4] + row[at]
    end = np.append(row[1:], piece[4] + rows + 1)
    return np.stack([np.full(len(at), number), row, end, due[at]])


def _least_stamps(piece: Piece, recording: Recording) -> tuple[int, Int64, Int64, int]:
    """Rows of a grain, grains (ascending), their least stamps, and rows of a piece in all."""
    size, rows, waiting = GRAIN_ROWS, 0, 0
    grains, least = [np.zeros(1, np.int64)], [np.full(1, NEVER)]
    for part in _read_stamps(piece, recording):
        if isinstance(part, Refused):
            rows = max(rows, int(part.offsets[-1]) + 1 - piece[4])
            continue
        start = part.offset - piece[4]
        stamp, timed = instant(part.batch.column(recording.stamp))
        stamp = np.where(timed, stamp.clip(recording.begin, recording.end), NEVER)
        edges = np.arange(-(start % size), len(stamp), size).clip(0)
        grains.append((start + edges) // size)
        least.append(np.minimum.reduceat(stamp, edges))
        waiting, rows = waiting + len(edges), max(rows, start + len(stamp))
        if waiting > MAX_GRAINS // 2:
            size, *merged = _merged(size, grains, least)
            grains, least, waiting = [merged[0]], [merged[1]], 0
    return *_merged(size, grains, least), rows


def _merged(size: int, grains: list[Int64], least: list[Int64]) -> tuple[int, Int64, Int64]:
    """The grains of all parts, each once; larger ones where there would be too many."""
    number, stamps = np.concatenate(grains), np.concatenate(least)
    while True:
        edges = np.flatnonzero(np.diff(number, prepend=-1))
        number, stamps = number[edges], np.minimum.reduceat(stamps, edges)
        if len(number) <= MAX_GRAINS:
            return size, number, stamps
        size, number = size * 2, number // 2


def _read_stamps(piece: Piece, recording: Recording) -> Iterator[Part]:
    reading = recording.reading
    try:
        yield from parts_as(read_piece(piece, (recording.stamp,), reading.csv), reading)
    except OSError as error:
        raise unreadable(piece[1], error) from None


def due_times(least: Int64, before: int) -> Int64:
    """Return (n,) the least of each entry and all after it.

    Entries at the end without any stamp are due with the one before them, at least ``before``.
    """
    due = np.minimum.accumulate(least[::-1])[::-1]
    times = due[due != NEVER]
    return np.where(due == NEVER, times[-1] if len(times) else before, due)


class Slice(NamedTuple):
    """Consecutive rows that are emitted together: a part of the index.

    Attributes:
        number: of the part.
        due: least stamp of its rows or a later one.
        rest: least stamp of all that remains, `NEVER` at the end.
        partition, parts: the file, rows and refused positions.
    """

    number: int
    due: int
    rest: int
    partition: int
    parts: list[Part]


class OpenPieces:
    """The open pieces of a recording: `StreamFiles` without Beam."""

    def __init__(self, recording: Recording) -> None:
        self.recording, self.index = recording, index_of(recording)
        self._open: OrderedDict[int, _OpenPiece] = OrderedDict()

    def slices(self, first: int) -> Iterator[Slice]:
        """Yield the parts from number ``first`` on, in order."""
        index = self.index
        for number in range(first, len(index.due)):
            piece = int(index.piece[number])
            parts = self._open_piece(piece, int(index.row[number])).take(int(index.end[number]))
            rest = int(index.due[number + 1]) if number + 1 < len(index.due) else NEVER
            partition = self.recording.pieces[piece][1]
            yield Slice(number, int(index.due[number]), rest, partition, parts)

    def _open_piece(self, number: int, row: int) -> "_OpenPiece":
        """The open piece at file row ``row``: opened again only after a restart."""
        opened = self._open.pop(number, None)
        if opened is None or opened.row > row:
            opened = _OpenPiece(self.recording, number)
        opened.skip(row)
        self._open[number] = opened
        if len(self._open) > OPEN_PIECES:
            self._open.popitem(last=False)
        return opened


class _OpenPiece:
    """One piece, read from front to back; holds what was decoded beyond what was taken."""

    def __init__(self, recording: Recording, number: int) -> None:
        piece, csv = recording.pieces[number], recording.reading.csv
        self.row, self._partition = piece[4], piece[1]
        self._parts, self._held = read_piece(piece, recording.columns, csv), list[Part]()
        self._read = False

    def skip(self, row: int) -> None:
        """Go on at a later row."""
        while self.row < row:
            self.take(min(row, self.row + 100_000))

    def take(self, end: int) -> list[Part]:
        """What lies before row ``end``; the piece goes on there."""
        # Refused rows of a block come before the others, so they say nothing of what follows.
        while not self._read and not any(
            isinstance(part, Rows) and part.offset + part.batch.num_rows >= end
            for part in self._held
        ):
            try:
                part = next(self._parts, None)
            except OSError as error:
                raise unreadable(self._partition, error) from None
            if part is None:
                self._read = True
            else:
                self._held.append(part)
        parts = [part for held in self._held for part in _between(held, self.row, end)]
        self._held = [part for held in self._held for part in _between(held, end, NEVER)]
        self.row = end
        return parts


def _between(part: Part, begin: int, end: int) -> Iterator[Part]:
    """The rows or refused positions of a part in [begin, end), if there are any."""
    if isinstance(part, Refused):
        inside = np.flatnonzero((part.offsets >= begin) & (part.offsets < end))
        if len(inside):
            yield Refused(part.offsets[inside], [part.reasons[i] for i in inside])
        return
    low, high = max(begin, part.offset), min(end, part.offset + part.batch.num_rows)
    if low < high:
        yield Rows(low, part.batch.slice(low - part.offset, high - low))


class StreamReader(beam.DoFn):
    """One splittable element: the recording.  Its positions are numbers of parts."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.backpressure: Backpressure | None = None
        self._pieces: OpenPieces | None = None
        self._rows = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pieces": None, "_rows": 0}

    def open(self) -> OpenPieces:
        """Open the recording in this process."""
        return OpenPieces(self.recording)

    @beam.DoFn.unbounded_per_element()
    @guarded("source")
    def process(
        self,
        element: bytes,
        tracker: Any = TRACKER,
        watermark: Any = WATERMARK,
    ) -> Iterator[Any]:
        """Read on until the bundle is full."""
        self._pieces = pieces = self._pieces or self.open()
        after = tracker.current_restriction().after
        number = 0 if after is None else after + 1
        if self.backpressure and self.backpressure.holds(stands(watermark).micros, self._rows):
            give_back(tracker, BACKPRESSURE_SECONDS)
            return
        bundle = Bundle()
        for part in pieces.slices(number):
            if not tracker.try_claim(part.number):
                return
            number = part.number + 1
            # Neither later than a stamp nor behind the watermark, which is not later either.
            at = max(beam_time(part.due), stands(watermark))
            for rows in placed(part.parts, part.partition, self.recording.batch_rows):
                yield output(rows, at)
            advance(watermark, part.rest)
            size = sum(
                len(rows.offsets) if isinstance(rows, Refused) else rows.batch.num_rows
                for rows in part.parts
            )
            self._rows += size
            if bundle.add(size):
                break
        if number == len(pieces.index.due):
            tracker.try_claim(None)
        else:
            tracker.defer_remainder()


class StreamFiles(beam.PTransform):  # type: ignore[misc]
    """The records of a job's files as an unbounded stream that ends with the files.

    ``expand`` returns outputs ``records`` and ``dead_letter`` as `ReadFiles` does.

    Args:
        job: of kind ``parquet``, ``csv`` or ``jsonl``.

    Raises:
        UsageError, RunError: see `pipelines.connectors.files.source.pieces`.
    """

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.reader = StreamReader(recording_of(job))

    def backpressure(self, backpressure: Backpressure) -> None:
        """Keep it from running ahead of the releases of a run."""
        self.reader.backpressure = backpressure

    def expand(self, begin: Any) -> Any:
        """Return ``Impulse | read``: one element, which the runner cannot split."""
        return begin | beam.Impulse() | "Read" >> read_transform(self.reader)
