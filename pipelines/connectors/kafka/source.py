"""Kafka as a source: one JSON object per message, stamped by the broker when it was appended.

A Python client (librdkafka) in a splittable DoFn, not Beam's cross-language ``ReadFromKafka``:
it runs alike on Prism, Flink and Dataflow, needs no Java expansion service beside the job, and
leaves to this module what the guarantee rests on: stamps are the broker's append times
(producers could choose theirs), positions are (partition, offset), and the watermark follows
the source's progress alone.

The watermark of a partition, always less ``table.settle``:

* after reading: the append time of what was read, since append times grow with offsets;
* at the partition's end: the clock before the end was asked for, since whatever is appended
  later has a later append time.  The end is that of all messages, also of uncommitted ones.

``settle`` covers what brokers' clocks differ from each other and from the workers', and the time
a message takes to its replicas.  A message that breaks this is late, not lost (see mechanism.md,
rule 0).  New partitions are found while the job runs (`WatchPartitions`), by the same argument.
"""

import contextlib
import copy
import functools
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import apache_beam as beam
import pyarrow as pa
from apache_beam.io.watermark_estimators import ManualWatermarkEstimator
from apache_beam.transforms.window import TimestampedValue
from apache_beam.utils.timestamp import MAX_TIMESTAMP, MIN_TIMESTAMP
from confluent_kafka import KafkaException
from typing_extensions import override

from dpstream.accounting.errors import PolicyError, RunError
from dpstream.dp_transforms.beam.clock import give_back
from dpstream.dp_transforms.telemetry import guarded
from dpstream.pipelines.connectors.inputs import (
    BACKPRESSURE_SECONDS,
    BUNDLE_SECONDS,
    TRACKER,
    WATERMARK,
    Backpressure,
    Bundle,
    Input,
    ReadRows,
    advance,
    beam_time,
    output,
    placed,
    read_transform,
    stands,
    wall_micros,
)
from dpstream.pipelines.connectors.kafka.client import connect
from dpstream.pipelines.connectors.kafka.reader import (
    APPEND_TIME,
    ASK_SECONDS,
    READERS,
    FetchedMessages,
    Kafka,
    PartitionMessages,
    Reader,
    check_topic,
    parts,
    refused_at_start,
)
from dpstream.pipelines.formats.rows import Reason, refuse
from dpstream.pipelines.formats.texts import Objects
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.project.text import duration_micros

#: Pause when there is nothing to read.
IDLE_SECONDS = 0.1
#: How long a check waits for a message that is there.
SCAN_SECONDS = 30.0
#: Before each look for new partitions, inside the bundle: a runner may round pauses to nothing.
WATCH_SECONDS = 0.1


class KafkaInput(Input):
    """Messages of a topic."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        if job.plan.stamp != APPEND_TIME:
            raise PolicyError(
                "table.stamp",
                "must be the broker's append time: producers fill everything else",
                "use stamp = 'append_time'",
            )
        self.kafka = Kafka.of(job.source)

    @override
    def identity(self) -> list[bytes]:
        """Return the ids of cluster and topic; a topic that is created again is another input."""
        connect(self.kafka.admin(), "table")
        check_topic(self._answer_of(self.kafka.config), self.kafka.topic)
        return [
            b"kafka",
            self._answer_of(self.kafka.cluster_id).encode(),
            self._topic_id().encode(),
        ]

    @override
    def read(self, begin: int = 0, backpressure: Backpressure | None = None) -> Any:
        return ReadKafka(self.job, self.kafka, self._topic_id(), begin, backpressure)

    @override
    def scan(self) -> Iterator[ReadRows]:
        """Yield every partition up to its end; consumers of no group, so no offset is committed."""
        self.identity()  # the topic is there, and as it must be
        columns, rows = self.job.columns, self.job.batch_rows
        objects = Objects(self.job.data_columns)
        for partition in range(self._answer_of(self.kafka.described)[1]):
            with contextlib.closing(Reader(self.kafka, partition)) as reader:
                for taken in _to_the_end(reader, rows):
                    messages = PartitionMessages.of(taken.messages)
                    yield from placed(parts(messages, objects, columns), partition, rows)

    def _topic_id(self) -> str:
        return str(self._answer_of(self.kafka.described)[0])

    def _answer_of(self, ask: Any) -> Any:
        try:
            return ask()
        except KafkaException as error:
            refused = refused_at_start(error)
        raise refused


def _to_the_end(reader: Reader, rows: int) -> Iterator[FetchedMessages]:
    """The messages that a partition has now.

    Raises:
        RunError: none arrived within `SCAN_SECONDS`.
    """
    last, position = time.monotonic(), None
    while time.monotonic() - last < SCAN_SECONDS:
        if position is None:
            position = reader.first(0)
            continue
        reader.seek(position)
        if reader.caught_up():
            return
        taken = reader.take(rows, BUNDLE_SECONDS)
        if taken.position != position:
            last, position = time.monotonic(), taken.position
            yield taken
    raise RunError(
        "table.topic",
        f"no message arrived within {SCAN_SECONDS:.0f} s",
        "check that the brokers of its partitions run",
    )


class WatchPartitions(beam.DoFn):
    """Topic id -> numbers of its partitions, also of those that are added later."""

    def __init__(self, kafka: Kafka, settle: int) -> None:
        self.kafka, self.settle = kafka, settle

    @beam.DoFn.unbounded_per_element()
    @guarded("source")
    def process(self, element: str, tracker: Any = TRACKER, watermark: Any = WATERMARK) -> Any:
        """Look once, then again later."""
        last = tracker.current_restriction().after
        if last is not None:
            time.sleep(WATCH_SECONDS)
        now = wall_micros()
        partitions = self.partitions(element)
        for number in range(0 if last is None else last + 1, partitions):
            if not tracker.try_claim(number):
                return
            yield TimestampedValue(number, stands(watermark))
        if partitions:
            advance(watermark, now - self.settle)
        tracker.defer_remainder()

    def partitions(self, topic_id: str) -> int:
        """How many there are now; 0 if nobody answers."""
        try:
            current_id, partitions = self.kafka.described(ASK_SECONDS)
        except KafkaException:
            return 0
        if current_id != topic_id:
            raise RunError(
                "table.topic", "was deleted and made again while it was read", "begin a new run"
            )
        return partitions


class TopicProgress(NamedTuple):
    """The progress of reading partitions of a topic.

    Attributes:
        parts: by partition, the last offset that is done (``None``: not begun) and the watermark
            (micros).
        silent_until: instant (micros) until which no other partition had messages.
    """

    parts: Mapping[int, tuple[int | None, int]]
    silent_until: int

    def at(self, number: int, last: int, reached: int) -> "TopicProgress":
        """Return the progress with a partition's last offset that is done and its watermark."""
        return self._replace(parts={**self.parts, number: (last, reached)})


#: The progress of a partition before its first message is read.
_FRESH = None, MIN_TIMESTAMP.micros


class ReadPartition(beam.DoFn):
    """Partition -> batches; what is no row to the dead letter; errors carry no values."""

    def __init__(
        self,
        job: Job,
        kafka: Kafka,
        settle: int,
        begin: int,
        backpressure: Backpressure | None = None,
    ) -> None:
        self.kafka, self.settle, self.begin = kafka, settle, begin
        self.backpressure, self._rows = backpressure, 0
        self.columns, self.data_columns = job.columns, job.data_columns
        self.batch_rows = job.batch_rows
        self._objects: Objects | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_objects": None}

    def teardown(self) -> None:
        """Let connections go."""
        READERS.close()

    @beam.DoFn.unbounded_per_element()
    @guarded("source")
    def process(self, element: Any, tracker: Any = TRACKER, watermark: Any = WATERMARK) -> Any:
        """Each partition in turn, until the bundle is full or none has anything ready."""
        bundle = Bundle()
        if self.backpressure and self.backpressure.holds(stands(watermark).micros, self._rows):
            give_back(tracker, BACKPRESSURE_SECONDS)
            return
        progress = self._progress_of(element, tracker.current_restriction().after)
        while True:
            before = self._rows
            for number in progress.parts:
                key = self.kafka, number
                with READERS.lend(key, functools.partial(Reader, *key)) as reader:
                    taken, progress = self._taken(reader, number, progress)
                    if not tracker.try_claim(progress):
                        return
                    estimator = ManualWatermarkEstimator(beam_time(progress.parts[number][1]))
                    if taken is None:
                        continue
                    if taken.messages or taken.deleted is not None:
                        yield from self._outputs(taken, number, estimator)
                        self._rows += len(taken.messages)
                    else:
                        self._idle(reader, estimator)
                    progress = progress.at(number, taken.position - 1, stands(estimator).micros)
            tracker.try_claim(progress)
            if progress.parts:
                done = (reached for _, reached in progress.parts.values())
                advance(watermark, min(progress.silent_until, *done))
            if self._rows == before:
                give_back(tracker, IDLE_SECONDS)
                return
            if bundle.add(self._rows - before):
                tracker.defer_remainder()
                return

    def _progress_of(self, element: Any, progress: TopicProgress | None) -> TopicProgress:
        """The progress of what the element names; there are no other partitions."""
        return progress or TopicProgress({element: _FRESH}, MAX_TIMESTAMP.micros)

    def _taken(
        self, reader: Reader, number: int, progress: TopicProgress
    ) -> tuple[FetchedMessages | None, TopicProgress]:
        """What a partition has ready (``None``: nobody knows where it begins)."""
        last, reached = progress.parts[number]
        if last is None:
            first = reader.first(self.begin)
            if first is None:
                return None, progress
            last = first - 1
        reader.seek(last + 1)
        # All partitions together take a bundle's time, because the watermark waits for the slowest.
        taken = reader.take(self.batch_rows, BUNDLE_SECONDS / len(progress.parts))
        return taken, progress.at(number, taken.position - 1, reached)

    def _idle(self, reader: Reader, watermark: Any) -> None:
        """At the partition's end the clock before asking for it is a promise."""
        now = wall_micros()
        if reader.caught_up():
            advance(watermark, now - self.settle)

    def _outputs(self, taken: FetchedMessages, partition: int, watermark: Any) -> Iterator[Any]:
        self._objects = self._objects or Objects(self.data_columns)
        messages, now = PartitionMessages.of(taken.messages), stands(watermark)
        read = placed(parts(messages, self._objects, self.columns), partition, self.batch_rows)
        for rows in read:
            at = now
            if isinstance(rows, pa.RecordBatch):
                first = int(rows.column(APPEND_TIME).cast(pa.int64()).to_numpy().min())
                at = max(beam_time(first), now)
            yield output(rows, at)
        if taken.deleted is not None:
            yield output((refuse(taken.deleted, Reason.DELETED_BEFORE_READ), partition), now)
        if messages.last_append >= 0:
            advance(watermark, messages.last_append * 1_000 - self.settle)


class ReadTopic(ReadPartition):
    """Topic id -> batches of all its partitions, in one element with one watermark.

    For runners that keep one watermark for a source, whatever its elements say.
    """

    _looked = -WATCH_SECONDS

    @override
    def _progress_of(self, element: Any, progress: TopicProgress | None) -> TopicProgress:
        """With partitions that were added; asked for now and then."""
        progress = progress or TopicProgress({}, MIN_TIMESTAMP.micros)
        if time.monotonic() - self._looked < WATCH_SECONDS:
            return progress
        now = wall_micros()
        partitions = WatchPartitions(self.kafka, self.settle).partitions(element)
        if not partitions:
            return progress
        self._looked = time.monotonic()
        parts = {**dict.fromkeys(range(partitions), _FRESH), **progress.parts}
        return TopicProgress(parts, max(progress.silent_until, now - self.settle))


class ReadKafka(beam.PTransform):  # type: ignore[misc]
    """The messages of a topic: outputs ``records`` and ``dead_letter``.

    Args:
        job: the job, of which columns and ``batch_rows`` are used.
        kafka: the topic.
        topic_id: the topic's own id; the run fails if it becomes another one.
        begin: micros; messages appended before are not read.
        backpressure: keeps it from running ahead of the releases.
    """

    def __init__(
        self,
        job: Job,
        kafka: Kafka,
        topic_id: str,
        begin: int,
        backpressure: Backpressure | None = None,
    ) -> None:
        super().__init__()
        self._spread = True
        self._job, self._kafka, self._topic_id = job, kafka, topic_id
        self._begin, self._backpressure = begin, backpressure

    def as_one(self) -> "ReadKafka":
        """Return the same reader with one element, and so one watermark, for all partitions."""
        one = copy.copy(self)
        one._spread = False
        return one

    @override
    def expand(self, begin: Any) -> Any:
        settle = duration_micros("table.settle", self._job.source.settle)
        kind = ReadPartition if self._spread else ReadTopic
        dofn = kind(self._job, self._kafka, settle, self._begin, self._backpressure)
        topic = begin | "Topic" >> beam.Create([self._topic_id], reshuffle=False)
        if not self._spread:
            return topic | "Read" >> read_transform(dofn)
        return (
            topic
            | "Watch" >> beam.ParDo(WatchPartitions(self._kafka, settle)).with_output_types(int)
            | "Spread" >> beam.Reshuffle()
            | "Read" >> read_transform(dofn)
        )
