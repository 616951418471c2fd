"""Shared parts of all kinds of sources: their contract with a run, their output, their waits.

**Waiting.**  Not every runner slows a source down when the stages behind it are busy (Prism does
not): all of a recording, or of a backlog, would then wait in memory, and be looked through at every
trigger time.  `Backpressure` delays reading and decides nothing.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import apache_beam as beam
import numpy as np
import pyarrow as pa
from apache_beam.pvalue import TaggedOutput
from apache_beam.transforms.window import TimestampedValue
from apache_beam.utils.timestamp import Timestamp

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import UsageError
from dpstream.dp_transforms.batches import DEAD_LETTER_SCHEMA, OFFSET, PARTITION
from dpstream.dp_transforms.beam.delivery import released_through
from dpstream.dp_transforms.flow import CATCH_UP_LIMIT
from dpstream.dp_transforms.run import Run
from dpstream.dp_transforms.telemetry import count
from dpstream.pipelines.connectors.input_files import SourceFile
from dpstream.pipelines.formats.rows import Part, Refused, Rows
from dpstream.pipelines.jobs.job import Job

#: Rows, about, that may be ahead; and trigger times, however few rows they have.
ROWS_AHEAD = 200_000
TRIGGER_TIMES_AHEAD = 2 * CATCH_UP_LIMIT
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
        trigger_time = 1 + max(0, watermark - timeline.start) // timeline.trigger_every
        self._first = trigger_time if self._first is None else self._first
        passed = 0 if rows is None else trigger_time - self._first
        allowed = max(TRIGGER_TIMES_AHEAD, ROWS_AHEAD * passed // max(1, rows or 0))
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
