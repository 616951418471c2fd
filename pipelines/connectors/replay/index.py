"""Where the stamps of a recording lie: an index of its parts in the order of a replay.

The recording's content is fixed and known, so one pass over the stamp column (Parquet: that
column alone, about 100M rows/s; the statistics of a row group would say nothing about where in
the group its stamps are) tells for every row the **due** time: the least stamp of it and of all
rows behind it in its piece.  Due times do not fall within a piece, so that pieces are read from
front to back; across pieces, parts (some consecutive rows) follow each other by due time.
Everything before a part's due time has then been read, in whatever order a file has its rows.

Stamps are clipped into the job's time: what lies outside becomes a dead letter wherever it is.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dpstream.accounting.arrays import Int64
from dpstream.dp_transforms.ingest.columns import instant
from dpstream.pipelines.connectors.files.source import Piece, pieces, read_piece
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
    """What an index is made of: hashable, the same on every machine.

    Attributes:
        pieces: in manifest order (see `pipelines.connectors.files.source.pieces`).
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
    """The recording that a job's files are.

    Raises:
        UsageError, RunError: see `pipelines.connectors.files.source.pieces`.
    """
    plan, line = job.plan, job.plan.timeline
    stamp = plan.event_time if plan.stamp == "event_time" else plan.stamp
    end = line.instant_of(line.last_trigger_time)
    rows = job.performance.batch_rows
    return Recording(tuple(pieces(job)), job.columns, stamp, line.start, end, rows, speed)


@functools.lru_cache(maxsize=2)
def index_of(recording: Recording) -> Index:
    """The index of a recording; once a process.

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
    except OSError:
        raise unreadable(piece[1]) from None


def clipped(rows: Rows, recording: Recording) -> tuple[Int64, npt.NDArray[np.bool_]]:
    """Stamps of rows inside the job's time, and which rows have one."""
    stamp, timed = instant(rows.batch.column(recording.stamp))
    return stamp.clip(recording.begin, recording.end), timed


def due_times(least: Int64, behind: int, before: int) -> Int64:
    """Least of each entry and all behind it; ``behind``: of what follows the array.

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
    """First and last stamp (micros) of a job's files, inside the job's time.

    Raises:
        UsageError, RunError: see `pipelines.connectors.files.source.pieces`.
    """
    return index_of(recording_of(job, None)).bounds


def part_at(index: Index, row: int) -> int:
    """The part that holds global row ``row``."""
    return int(np.searchsorted(index.start, row, "right")) - 1
