"""A recording as an unbounded stream: ``pipeline | Replay(job, speed=60)``.

The files of a job of kind ``parquet``, ``csv`` or ``jsonl`` are read by one splittable DoFn,
unpaced or at a speed, with the same positions, batches and dead letters as `ReadFiles`; so the
releases are the same bytes.  Speed delays rows and decides nothing.

The watermark is the least stamp that remains to be read, and at a speed not later than the
stream's own time.  That is a fact of the source and no policy that follows the data's flow: the
content of a recording is fixed and known before the first row is read (the index below).  A row
with an early stamp behind later ones makes releases wait until it is read; it changes none.

**The index** says where the stamps of a recording lie: its parts in the order of a replay.  The
recording's content is fixed and known, so one pass over the stamp column (Parquet: that column
alone, about 100M rows/s; the statistics of a row group would say nothing about where in the group
its stamps are) tells for every row the **due** time: the least stamp of it and of all rows behind
it in its piece.  Due times do not fall within a piece, so that pieces are read from front to back;
across pieces, parts (some consecutive rows) follow each other by due time.  Everything before a
part's due time has then been read, in whatever order a file has its rows.

Stamps are clipped into the job's time: what lies outside becomes a dead letter wherever it is.
"""

import functools
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import apache_beam as beam
import numpy as np
import numpy.typing as npt

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import UsageError
from dpstream.dp_transforms.beam.clock import give_back
from dpstream.dp_transforms.ingest.columns import instant
from dpstream.dp_transforms.telemetry import guarded
from dpstream.pipelines.connectors.files.source import Piece, pieces, read_piece
from dpstream.pipelines.connectors.inputs import (
    BACKPRESSURE_SECONDS,
    Backpressure,
    output,
    placed,
    read_transform,
)
from dpstream.pipelines.connectors.unbounded import (
    BUNDLE_SECONDS,
    TRACKER,
    WATERMARK,
    Bundle,
    advance,
    beam_time,
    stands,
    wall_micros,
)
from dpstream.pipelines.formats.rows import Part, Refused, Rows, unreadable
from dpstream.pipelines.jobs.job import Job

#: Stamps of a piece that the index knows one by one; of a longer one those of 2, 4, ... rows
#: together.
MAX_GRAINS = 1 << 22
UNPACED_GRAIN = 16
#: Wall seconds that a part of a paced replay spans, and the most parts of a piece it makes.
PART_SECONDS = 0.1
MAX_PARTS = 1 << 16
#: Least and largest of no stamps.
NEVER, NONE = np.iinfo(np.int64).max, np.iinfo(np.int64).min


class Recording(NamedTuple):
    """The parameters that an index is made from: hashable, the same on every machine.

    Attributes:
        pieces: all pieces, in manifest order (see `pipelines.connectors.files.source.pieces`).
        stamp: the column of stamps; ``columns``: all that are read.
        begin, end: stamps are clipped to these instants.
        batch_rows: most rows of a part.
        speed: seconds of stream a second; ``None``: unpaced.
    """

    pieces: tuple[Piece, ...]
    columns: tuple[str, ...]
    stamp: str
    begin: int
    end: int
    batch_rows: int
    speed: float | None


class Index(NamedTuple):
    """Parts of a recording in the order of a replay; int64 arrays, one entry a part.

    Attributes:
        start: global number of the part's first row, ascending from 0.
        piece: index into the recording's pieces.
        row, end: rows ``row`` <= r < ``end`` of its file.  The last part of a piece has a row
            more than is known, where a piece says that it broke off.
        due: least stamp of this part and of what follows in its piece, ascending.
        behind: the same of what follows in its piece.
        last: largest stamp in the part.
        rows: global rows of the whole.
        bounds: first and last stamp.
    """

    start: Int64
    piece: Int64
    row: Int64
    end: Int64
    due: Int64
    behind: Int64
    last: Int64
    rows: int
    bounds: tuple[int, int]


def recording_of(job: Job, speed: float | None) -> Recording:
    """Return the recording that a job's files are.

    Raises:
        UsageError, RunError: see `pipelines.connectors.files.source.pieces`.
    """
    plan, timeline = job.plan, job.plan.timeline
    stamp = plan.event_time if plan.stamp == "event_time" else plan.stamp
    end = timeline.instant_of(timeline.last_trigger_time)
    rows = job.performance.batch_rows
    return Recording(tuple(pieces(job)), job.columns, stamp, timeline.start, end, rows, speed)


@functools.lru_cache(maxsize=2)
def index_of(recording: Recording) -> Index:
    """Return the index of a recording; once a process.

    Raises:
        RunError: the operating system cannot read a file.
    """
    parts = [_parts(number, piece, recording) for number, piece in enumerate(recording.pieces)]
    table = np.concatenate(parts, axis=1) if parts else np.zeros((6, 0), np.int64)
    piece, row, end, due, behind, last = table[:, np.lexsort((table[1], table[0], table[3]))]
    stops = np.cumsum(end - row)
    rows = int(stops[-1]) if len(stops) else 0
    timed = last != NONE
    low = int(due[timed].min()) if timed.any() else recording.begin
    bounds = low, int(last[timed].max()) if timed.any() else low
    return Index(stops - (end - row), piece, row, end, due, behind, last, rows, bounds)


class _StampRanges(NamedTuple):
    """Least and largest stamp of ``size`` rows each: numbers ascending, rows in all."""

    size: int
    number: Int64
    least: Int64
    largest: Int64
    rows: int


def _stamp_ranges(piece: Piece, recording: Recording) -> _StampRanges:
    """The stamps of a piece."""
    none, size = np.zeros(0, np.int64), 1 if recording.speed else UNPACED_GRAIN
    done, new, held, rows = _StampRanges(size, none, none, none, 0), list[Int64](), 0, 0
    for part in _read(piece, recording.stamp):
        if isinstance(part, Refused):
            rows = max(rows, int(part.offsets[-1]) + 1 - piece[4])
            continue
        start = part.offset - piece[4]
        stamp, timed = clipped(part, recording)
        edges = np.arange(-(start % done.size), len(stamp), done.size).clip(0)
        least = np.minimum.reduceat(np.where(timed, stamp, NEVER), edges)
        largest = np.maximum.reduceat(np.where(timed, stamp, NONE), edges)
        new.append(np.stack([(start + edges) // done.size, least, largest]))
        held, rows = held + len(edges), max(rows, start + len(stamp))
        if held > MAX_GRAINS // 2:
            done, new, held = _coarser(done, new), [], 0
    return _coarser(done, new)._replace(rows=rows)


def _coarser(done: _StampRanges, new: list[Int64]) -> _StampRanges:
    """Ranges with new ones (of the same size) added, larger where there would be too many."""
    size, number, least, largest = done.size, done.number, done.least, done.largest
    if new:
        more = np.concatenate(new, axis=1)
        number = np.concatenate([number, more[0]])
        least, largest = np.concatenate([least, more[1]]), np.concatenate([largest, more[2]])
    while True:
        edges = np.flatnonzero(np.diff(number, prepend=-1))
        if len(edges) < len(number):
            least = np.minimum.reduceat(least, edges)
            number, largest = number[edges], np.maximum.reduceat(largest, edges)
        if len(number) <= MAX_GRAINS:
            return _StampRanges(size, number, least, largest, 0)
        size, number = size * 2, number // 2


def _read(piece: Piece, column: str) -> Iterator[Part]:
    try:
        yield from read_piece(piece, (column,))
    except OSError as error:
        raise unreadable(piece[1], error) from None


def clipped(rows: Rows, recording: Recording) -> tuple[Int64, npt.NDArray[np.bool_]]:
    """Return (n,) stamps of rows, clipped to the job's time, and (n,) whether a row has one."""
    stamp, timed = instant(rows.batch.column(recording.stamp))
    return stamp.clip(recording.begin, recording.end), timed


def due_times(least: Int64, behind: int, before: int) -> Int64:
    """Return (n,) the least of each entry and all after it; ``behind``: of what follows the array.

    Entries at the end without any stamp are due with the one before them, at least ``before``.
    """
    due = np.minimum(np.minimum.accumulate(least[::-1])[::-1], behind)
    times = due[due != NEVER]
    return np.where(due == NEVER, times[-1] if len(times) else before, due)


def _parts(number: int, piece: Piece, recording: Recording) -> Int64:
    """(6, n): piece, row, end, due, behind, last of a piece's parts."""
    ranges = _stamp_ranges(piece, recording)
    if not len(ranges.number):
        none = np.array([0]), np.array([NEVER]), np.array([NONE])
        ranges = _StampRanges(1, *none, ranges.rows)
    due = due_times(ranges.least, NEVER, recording.begin)
    row = ranges.number * ranges.size
    row[0] = 0
    # A part begins where batch_rows are full and, paced, where another stretch of time begins.
    cell = row // max(ranges.size, recording.batch_rows)
    if recording.speed is not None:
        span = (int(due[-1]) - int(due[0])) // MAX_PARTS
        time = (due - due[0]) // max(1, span, int(recording.speed * PART_SECONDS * 1e6))
        cell = cell + time * (1 + ranges.rows)
    at = np.flatnonzero(np.diff(cell, prepend=-1))
    row = piece[4] + row[at]
    end = np.append(row[1:], piece[4] + ranges.rows + 1)
    behind = np.append(due[at[1:]], NEVER)
    last = np.maximum.reduceat(ranges.largest, at)
    return np.stack([np.full(len(at), number), row, end, due[at], behind, last])


def replay_bounds(job: Job) -> tuple[int, int]:
    """Return the first and last stamp (micros) of a job's files, inside the job's time.

    Raises:
        UsageError, RunError: see `pipelines.connectors.files.source.pieces`.
    """
    return index_of(recording_of(job, None)).bounds


def part_at(index: Index, row: int) -> int:
    """Return the part that holds global row ``row``."""
    return int(np.searchsorted(index.start, row, "right")) - 1


#: Files that are read at the same time and stay open; beyond it they are opened again.
OPEN_PIECES = 64


def parse_speed(text: str) -> float | None:
    """Return the seconds of stream per second: a number, or ``max`` (``None``: unpaced).

    Raises:
        UsageError: neither.
    """
    try:
        speed = None if text == "max" else float(text)
    except ValueError:
        speed = 0.0
    _check_speed(speed)
    return speed


def _check_speed(speed: float | None) -> None:
    if speed is not None and not 1e-6 <= speed <= 1e9:
        raise UsageError(
            "--speed", "must be 'max' or seconds of stream a second", "write for example 60"
        )


class Slice(NamedTuple):
    """Consecutive rows that are emitted together.

    Attributes:
        last: global number of the last of them; ``due``: least stamp of theirs or a later one.
        rest: least stamp of all that remains, `NEVER` at the end.
        partition, parts: their file, rows and refused positions.
    """

    last: int
    due: int
    rest: int
    partition: int
    parts: list[Part]


class OpenPieces:
    """The open pieces of a recording: `Replay` without Beam and without a clock."""

    def __init__(self, recording: Recording) -> None:
        self.recording, self.index = recording, index_of(recording)
        self._open: OrderedDict[int, _OpenPiece] = OrderedDict()

    def slices(self, row: int, now: int | None) -> Iterator[Slice]:
        """Yield the slices that are due from global row ``row`` on, in order.

        Args:
            row: the first row that has not left.
            now: the stream's time in micros; ``None``: everything is due.
        """
        index = self.index
        while row < index.rows:
            number = part_at(index, row)
            stop = int(index.start[number] + index.end[number] - index.row[number])
            if now is not None and index.due[number] > now:
                return
            made = self._slice(number, row, stop, now)
            if made is None:
                return
            yield made
            row = made.last + 1

    def _slice(self, number: int, row: int, stop: int, now: int | None) -> Slice | None:
        """Rows from ``row`` of a part that are due."""
        index, piece = self.index, self.recording.pieces[int(self.index.piece[number])]
        first = int(index.row[number] + row - index.start[number])
        end = int(index.end[number])
        opened = self._open_piece(int(index.piece[number]), piece, first)
        all_due = now is None or index.last[number] <= now
        due, to = int(index.due[number]), end
        rest = self._next(number)
        if not all_due:
            times = self._due(index, number, opened.upto(end), first, end)
            ready = int(np.searchsorted(times, now or 0, "right"))
            if not ready:
                return None
            due, to = int(times[0]), first + ready
            rest = min(int(times[ready]), rest) if ready < len(times) else rest
        parts = opened.take(to)
        return Slice(row + to - first - 1, due, rest, piece[1], parts)

    def _next(self, number: int) -> int:
        """Instant (micros) at which the next part begins."""
        return int(self.index.due[number + 1]) if number + 1 < len(self.index.due) else NEVER

    def _due(self, index: Index, number: int, parts: list[Part], first: int, end: int) -> Any:
        """Due time of every row of a part from file row ``first`` on."""
        stamps = np.full(end - first, NEVER)
        for part in parts:
            if isinstance(part, Rows):
                stamp, timed = clipped(part, self.recording)
                at = part.offset - first
                stamps[at : at + len(stamp)] = np.where(timed, stamp, NEVER)
        return due_times(stamps, int(index.behind[number]), int(index.due[number]))

    def _open_piece(self, number: int, piece: Piece, row: int) -> "_OpenPiece":
        """The open piece at file row ``row``: opened again only after a restart."""
        opened = self._open.pop(number, None)
        if opened is None or opened.row > row:
            opened = _OpenPiece(piece, self.recording.columns)
        opened.skip(row)
        self._open[number] = opened
        if len(self._open) > OPEN_PIECES:
            self._open.popitem(last=False)
        return opened


class _OpenPiece:
    """One piece, read from front to back; holds what was decoded beyond what was taken."""

    def __init__(self, piece: Piece, columns: tuple[str, ...]) -> None:
        self.row, self._partition = piece[4], piece[1]
        self._parts, self._held = read_piece(piece, columns), list[Part]()
        self._read = False

    def skip(self, row: int) -> None:
        """Go on at a later row."""
        while self.row < row:
            step = min(row, self.row + 100_000)
            self.take(step)

    def upto(self, end: int) -> list[Part]:
        """What lies before row ``end``; it stays."""
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
        return [part for held in self._held for part in _between(held, self.row, end)]

    def take(self, end: int) -> list[Part]:
        """What lies before row ``end``; the piece goes on there."""
        parts = self.upto(end)
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


class _ReplayFn(beam.DoFn):
    """One splittable element: the recording."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self.backpressure: Backpressure | None = None
        self._pieces: OpenPieces | None = None
        self._rows = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pieces": None, "_rows": 0}

    @beam.DoFn.unbounded_per_element()
    @guarded("source")
    def process(
        self,
        element: bytes,
        tracker: Any = TRACKER,
        watermark: Any = WATERMARK,
    ) -> Iterator[Any]:
        """What is due, until the bundle is full or the next row has to wait."""
        self._pieces = pieces = self._pieces or OpenPieces(self._recording)
        progress = tracker.current_restriction()
        row = -1 if progress.after is None else progress.after
        if self.backpressure and self.backpressure.holds(stands(watermark).micros, self._rows):
            give_back(tracker, BACKPRESSURE_SECONDS)
            return
        now = self._stream_time(pieces, progress.begun)
        bundle = Bundle()
        for part in pieces.slices(row + 1, now):
            if not tracker.try_claim(part.last):
                return
            row = part.last
            # Neither later than a stamp nor behind the watermark, which is not later either.
            at = max(beam_time(part.due), stands(watermark))
            for rows in placed(part.parts, part.partition, self._recording.batch_rows):
                yield output(rows, at)
            advance(watermark, part.rest if now is None else min(part.rest, now))
            size = sum(
                len(rows.offsets) if isinstance(rows, Refused) else rows.batch.num_rows
                for rows in part.parts
            )
            self._rows += size
            if bundle.add(size):
                break
        if row + 1 >= pieces.index.rows:
            tracker.try_claim(None)
            return
        if now is None:
            tracker.defer_remainder()
            return
        due = int(pieces.index.due[part_at(pieces.index, row + 1)])
        advance(watermark, min(due, now))
        give_back(tracker, BUNDLE_SECONDS / 2)

    def _stream_time(self, pieces: OpenPieces, begun: int) -> int | None:
        speed = self._recording.speed
        if speed is None:
            return None
        return pieces.index.bounds[0] + int((wall_micros() - begun) * speed)


class Replay(beam.PTransform):  # type: ignore[misc]
    """The records of a job's files as an unbounded stream that ends with the recording.

    ``expand`` returns outputs ``records`` and ``dead_letter`` as `ReadFiles` does.

    Args:
        job: of kind ``parquet``, ``csv`` or ``jsonl``.
        speed: seconds of stream a second; ``None``: as fast as it can be read.

    Raises:
        UsageError, RunError: a job without files, or see
        `pipelines.connectors.files.source.pieces`.
    """

    def __init__(self, job: Job, speed: float | None = None) -> None:
        super().__init__()
        if job.source.unbounded:
            raise UsageError(
                "table.format", "is not a recording", "replay files: parquet, csv or jsonl"
            )
        _check_speed(speed)
        self.speed = speed
        self._dofn = _ReplayFn(recording_of(job, speed))

    def backpressure(self, backpressure: Backpressure) -> None:
        """Keep it from running ahead of the releases of a run."""
        self._dofn.backpressure = backpressure

    def expand(self, begin: Any) -> Any:
        """Return ``Impulse | read``: one element, which the runner cannot split."""
        return begin | beam.Impulse() | "Read" >> read_transform(self._dofn)
