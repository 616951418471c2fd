"""Shared parts of all kinds of sources: their contract with a run, output, waits and readers.

**Waiting.**  Not every runner slows a source down when the stages behind it are busy (Prism does
not): all of a recording, or of a backlog, would then wait in memory, and be looked through at every
trigger time.  `Backpressure` delays reading and decides nothing.

**A source without end** is one splittable element.  Its restriction says after which position it
goes on; the reader gives the rest back to the runner (`defer_remainder`) many times a second, so
that bundles end and timers fire.  Positions are whatever the source orders its records by.

**Readers** stay in a worker process between bundles (`ReaderPool`): a reader holds a connection,
and what it has fetched ahead.  The runner decides with each bundle where it begins, so one that is
not in use belongs to nobody.
"""

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import apache_beam as beam
import numpy as np
import pyarrow as pa
from apache_beam.io.iobase import RestrictionProgress, RestrictionTracker
from apache_beam.io.watermark_estimators import ManualWatermarkEstimator
from apache_beam.pvalue import TaggedOutput
from apache_beam.transforms.window import TimestampedValue
from apache_beam.utils.timestamp import MAX_TIMESTAMP, MIN_TIMESTAMP, Timestamp
from typing_extensions import override

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import UsageError
from dpstream.dp_transforms.batches import DEAD_LETTER_SCHEMA, OFFSET, PARTITION
from dpstream.dp_transforms.beam.delivery import released_through
from dpstream.dp_transforms.flow import stride
from dpstream.dp_transforms.run import Run
from dpstream.dp_transforms.telemetry import count
from dpstream.pipelines.connectors.input_files import SourceFile
from dpstream.pipelines.formats.rows import Part, Refused, Rows
from dpstream.pipelines.jobs.job import Job

#: Rows, about, that may be ahead; and strides (`flow.stride`), however few rows these have.
ROWS_AHEAD, STRIDES_AHEAD = 200_000, 2
#: Time between two questions to the store.
ASK_SECONDS = 0.05
#: How long a source waits before it asks again whether the store has kept up.
BACKPRESSURE_SECONDS = 0.02
RECORDS, DEAD_LETTER = "records", "dead_letter"
#: A batch with positions; or refused positions, with the partition of all or of each.
ReadRows: TypeAlias = pa.RecordBatch | tuple[Refused, int | Int64]


class Backpressure:
    """Decides when a source should wait, from its watermark and the store's releases.

    Args:
        run: the run that the source feeds.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._done, self._checked_at = -(1 << 62), 0.0
        self._first: int | None = None

    def __reduce__(self) -> tuple[type, tuple[Run]]:
        return type(self), (self._run,)

    def holds(self, watermark: int, rows: int | None = None) -> bool:
        """Return whether to wait a moment.

        A source whose watermark is within a stride of the released trigger times never waits, so
        two partitions cannot wait for each other.

        Args:
            watermark: of the source, in micros.
            rows: rows this worker's source has given, ``None``: not known.
        """
        timeline = self._run.plan.timeline
        if timeline.end is not None:
            watermark = min(watermark, timeline.instant_of(timeline.last_trigger_time))
        trigger_time = 1 + max(0, timeline.passed(watermark))
        self._first = trigger_time if self._first is None else self._first
        passed = 0 if rows is None else trigger_time - self._first
        allowed = max(STRIDES_AHEAD * stride(timeline), ROWS_AHEAD * passed // max(1, rows or 0))
        if trigger_time - self._done <= allowed:
            return False
        if time.monotonic() - self._checked_at >= ASK_SECONDS:
            self._done, self._checked_at = released_through(self._run), time.monotonic()
        return trigger_time - self._done > allowed


class Input(ABC):
    """A job's source.

    Attributes:
        bounded: whether all of it is there when the run begins.
    """

    bounded = False

    def __init__(self, job: Job) -> None:
        self.job = job

    @abstractmethod
    def identity(self) -> list[bytes]:
        """Return the parts that distinguish this input; a store continues with no other.

        Raises:
            UsageError, RunError: there is no such source, or it cannot be reached.
        """

    @abstractmethod
    def read(self, begin: int = 0, backpressure: Backpressure | None = None) -> Any:
        """Return a transform from ``PBegin`` to the outputs ``records`` and ``dead_letter``.

        Batches of ``records`` have the columns ``job.columns`` and say in their schema's metadata
        where their first row stands (see `pipelines.connectors.files.source`).  A transform whose
        elements have watermarks of their own also offers ``as_one()``: the same reader as a single
        element with a single watermark, for engines that keep no more than one.

        Args:
            begin: records with stamps (micros) before it are not needed any more.
            backpressure: keeps a source without end from running ahead of the releases.
        """

    def scan(self) -> Iterator[ReadRows]:
        """Yield the present rows, by the functions that `read` uses, without changing the source.

        Raises:
            UsageError: a source of this kind gives a message to one reader only.
        """
        raise UsageError(
            "table.format",
            "gives each message to one reader, so reading it would take messages from the run",
            "write a sample of the messages to a .jsonl file, and check a job with that source",
        )

    def locate(self, partition: int, offset: int) -> tuple[str, int]:
        """Return the name of the file or part, and the row in it, that a dead letter's position
        is.
        """
        return f"partition {partition}", offset

    def damaged(self) -> dict[str, str]:
        """Return the files that runs have not read to their end, by name, with the reason.

        Only damage that no record can bring about is a reason (`formats.rows.DAMAGE`): public.
        """
        return {}

    def files(self) -> tuple[SourceFile, ...]:
        """Return the files of a source that ends, which must stay as they are while a run reads
        them.
        """
        return ()


def positioned(rows: Rows, partition: int, batch_rows: int) -> Iterator[pa.RecordBatch]:
    """Yield batches of at most ``batch_rows`` rows with their positions as metadata."""
    for start in range(0, rows.batch.num_rows, batch_rows):
        where = {PARTITION: str(partition), OFFSET: str(rows.offset + start)}
        yield rows.batch.slice(start, batch_rows).replace_schema_metadata(where)


def placed(parts: Iterable[Part], partition: int, batch_rows: int) -> Iterator[ReadRows]:
    """Yield the rows of a partition in batches with their positions, and its refused positions."""
    for part in parts:
        if isinstance(part, Refused):
            yield part, partition
        else:
            yield from positioned(part, partition, batch_rows)


def output(read: ReadRows, at: Timestamp | None = None) -> Any:
    """Return rows as an element of ``records``, refused positions as one of ``dead_letter``.

    Args:
        at: time of the new element; ``None``: the time of the element that is being read.
    """
    rows = read if isinstance(read, pa.RecordBatch) else refusal(*read)
    element = rows if at is None else TimestampedValue(rows, at)
    return element if rows is read else TaggedOutput(DEAD_LETTER, element)


def refusal(refused: Refused, partition: int | Int64) -> pa.RecordBatch:
    """Return refused positions as a batch of ``DEAD_LETTER_SCHEMA``, counted for the operator.

    Args:
        partition: of all of them, or of each.
    """
    count("operator_dead_letters", len(refused.offsets))
    count("operator_dead_source", len(refused.offsets))
    columns = [
        pa.array(np.broadcast_to(partition, refused.offsets.shape).astype(np.int32)),
        pa.array(refused.offsets, pa.int64()),
        pa.array(refused.reasons, pa.string()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=DEAD_LETTER_SCHEMA)


def read_transform(reader: beam.DoFn) -> Any:
    """Return a reader's transform with two outputs of batches, ``records`` and ``dead_letter``.

    It declares the type of the elements, because Beam pickles elements of an undeclared type.
    """
    read = beam.ParDo(reader).with_output_types(pa.RecordBatch, **{DEAD_LETTER: pa.RecordBatch})
    return read.with_outputs(DEAD_LETTER, main=RECORDS)


#: A bundle of a source ends after that many rows or seconds.
BUNDLE_ROWS = 40_000
BUNDLE_SECONDS = 0.1
WATERMARK = beam.DoFn.WatermarkEstimatorParam(ManualWatermarkEstimator.default_provider())
#: A reader that nobody used for so long is closed: what it read is read elsewhere.
UNUSED_SECONDS = 60.0


class Progress(NamedTuple):
    """The rest of a source.

    Attributes:
        after: the last position that is done; ``None`` before the first.
        begun: wall clock in micros when the source began.
        done: nothing is left of it.
    """

    after: Any
    begun: int
    done: bool = False


class ProgressTracker(RestrictionTracker):  # type: ignore[misc]
    """Claims positions in their order; only the rest as a whole can be split off.

    ``try_claim(position)`` before its records leave; ``try_claim(None)`` at the end of a source
    that has one.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    @override
    def current_restriction(self) -> Progress:
        return self._progress

    @override
    def current_progress(self) -> RestrictionProgress:
        done = self._progress.done
        # Beam puts the bytes of its outputs, perhaps NaN, in place of what is completed.
        return RestrictionProgress(
            fraction=1.0 if done else 0.5, completed=1, remaining=0 if done else 1
        )

    @override
    def try_claim(self, position: Any) -> bool:
        if self._progress.done:
            return False
        if position is None:
            self._progress = self._progress._replace(done=True)
        else:
            self._progress = self._progress._replace(after=position)
        return True

    @override
    def try_split(self, fraction_of_remainder: float) -> tuple[Progress, Progress] | None:
        if fraction_of_remainder > 0 or self._progress.done:
            return None
        rest = self._progress
        self._progress = rest._replace(done=True)
        return self._progress, rest

    @override
    def check_done(self) -> None:
        if not self._progress.done:
            raise ValueError("a reader returned without giving back the rest of its source")

    @override
    def is_bounded(self) -> bool:
        return False


class ProgressProvider(beam.transforms.core.RestrictionProvider):  # type: ignore[misc]
    """The restriction of a source of which nothing has been read."""

    @override
    def initial_restriction(self, element: Any) -> Progress:
        return Progress(None, wall_micros())

    @override
    def create_tracker(self, restriction: Progress) -> ProgressTracker:
        return ProgressTracker(restriction)

    @override
    def restriction_size(self, element: Any, restriction: Progress) -> int:
        return 0 if restriction.done else 1

    @override
    def truncate(self, element: Any, restriction: Progress) -> None:
        """Do nothing: a drained pipeline stops reading."""
        return None


#: Default arguments of a source's ``process``.
TRACKER = beam.DoFn.RestrictionParam(ProgressProvider())


def wall_micros() -> int:
    """Return the wall clock in micros since the epoch."""
    return time.time_ns() // 1000


def stands(watermark: ManualWatermarkEstimator) -> Timestamp:
    """Return the watermark; outputs before it are late."""
    return watermark.current_watermark() or MIN_TIMESTAMP


def beam_time(micros: int) -> Timestamp:
    """Return Beam's time at or before an instant: whole milliseconds, within Beam's bounds."""
    floored = micros // 1000 * 1000
    return Timestamp(micros=min(max(floored, MIN_TIMESTAMP.micros), MAX_TIMESTAMP.micros))


def advance(estimator: ManualWatermarkEstimator, micros: int) -> None:
    """Move a watermark on to an instant; never back (a wall clock can be set back)."""
    target, now = beam_time(micros), estimator.current_watermark()
    if now is None or target > now:
        estimator.set_watermark(target)


class Bundle:
    """The limits of a reader's bundle: `BUNDLE_ROWS` or `BUNDLE_SECONDS`."""

    def __init__(self) -> None:
        self._rows, self._until = 0, time.monotonic() + BUNDLE_SECONDS

    def add(self, rows: int) -> bool:
        """Count rows that left; whether the bundle is full."""
        self._rows += rows
        return self._rows >= BUNDLE_ROWS or time.monotonic() >= self._until


class Pooled(Protocol):
    """A reader: its last use (`time.monotonic`), and how to close its connection."""

    used: float

    def close(self) -> None:
        """Let the connection go."""


PooledReader = TypeVar("PooledReader", bound=Pooled)


class ReaderPool(Generic[PooledReader]):
    """The unused readers of this process, by their source.

    Args:
        keep: readers of one thing that are kept; what waits in one that nobody uses is late.
    """

    def __init__(self, keep: int | None = None) -> None:
        self._keep = keep
        self._lock = threading.Lock()
        self._free: defaultdict[Hashable, list[PooledReader]] = defaultdict(list)

    @contextlib.contextmanager
    def lend(self, key: Hashable, make: Callable[[], PooledReader]) -> Iterator[PooledReader]:
        """Lend a reader to one caller at a time; one that fails is closed.

        Args:
            key: what it reads.
            make: a new one, where none is free.
        """
        with self._lock:
            reader = self._free[key].pop(0) if self._free[key] else None
        self.close(UNUSED_SECONDS)
        reader = make() if reader is None else reader
        try:
            yield reader
        except BaseException:
            reader.close()
            raise
        reader.used = time.monotonic()
        with self._lock:
            readers = [reader, *self._free[key]]
            self._free[key], rest = readers[: self._keep], readers[len(readers[: self._keep]) :]
        self._end(rest)

    def close(self, unused: float = 0.0) -> None:
        """Close those that are not in use, and were not for some seconds."""
        since = time.monotonic() - unused
        with self._lock:
            free = [(key, reader) for key, readers in self._free.items() for reader in readers]
            self._free.clear()
            for key, reader in free:
                if reader.used > since:
                    self._free[key].append(reader)
        self._end([reader for _, reader in free if reader.used <= since])

    @staticmethod
    def _end(readers: list[PooledReader]) -> None:
        for reader in readers:
            reader.close()
