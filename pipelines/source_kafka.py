"""Kafka as a source: one JSON object per message, stamped by the broker when it was appended.

A Python client (librdkafka) in a splittable DoFn, not Beam's cross-language ``ReadFromKafka``:
it runs alike on Prism, Flink and Dataflow, needs no Java expansion service beside the job, and
leaves to this module what the guarantee rests on: stamps are the broker's append times
(producers could choose theirs), positions are (partition, offset), and the watermark follows
the source's progress alone.

The watermark of a partition, always less ``source.settle``:

* after reading: the append time of what was read, since append times grow with offsets;
* at the partition's end: the clock before the end was asked for, since whatever is appended
  later has a later append time.  The end is that of all messages, also of uncommitted ones.

``settle`` covers what brokers' clocks differ from each other and from the workers', and the time
a message takes to its replicas.  A message that breaks this is late, not lost (see mechanism.md,
rule 0).  New partitions are found while the job runs (`_Watch`), by the same argument.
"""

import time
from collections.abc import Iterable, Iterator
from typing import Any

import apache_beam as beam
import pyarrow as pa
from apache_beam.io.restriction_trackers import OffsetRange, OffsetRestrictionTracker
from apache_beam.io.watermark_estimators import ManualWatermarkEstimator
from apache_beam.pvalue import TaggedOutput
from apache_beam.transforms.core import RestrictionProvider
from apache_beam.transforms.window import TimestampedValue
from apache_beam.utils.timestamp import Duration, Timestamp
from confluent_kafka import KafkaException
from typing_extensions import override

from accounting.errors import PolicyError, RunError
from dp_transforms.telemetry import guarded
from pipelines.inputs import Input
from pipelines.job import Job
from pipelines.job_text import duration_micros
from pipelines.kafka_client import (
    ASK_SECONDS,
    Kafka,
    check_topic,
    refused_at_start,
)
from pipelines.kafka_messages import APPEND_TIME, Messages, parts
from pipelines.kafka_reader import READERS, Taken
from pipelines.source_jsonl import Objects
from pipelines.source_rows import Reason, Refused, refuse
from pipelines.sources import DEAD_LETTER, RECORDS, positioned, refusal

#: A bundle ends after so long, so that timers may fire; one call for messages takes so long.
BUNDLE_SECONDS, TAKE_SECONDS = 0.1, 0.05
#: Pauses when there is nothing to read, and between looks for new partitions.
IDLE_SECONDS, WATCH_SECONDS = 0.1, 0.25
_FOR_EVER = (1 << 63) - 1


class KafkaInput(Input):
    """Messages of a topic."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        if job.plan.stamp != APPEND_TIME:
            raise PolicyError(
                "source.stamp",
                "must be the broker's append time: producers fill everything else",
                "use stamp = 'append_time'",
            )
        self.kafka = Kafka.of(job.source)

    @override
    def identity(self) -> list[bytes]:
        """Cluster and topic by their own ids: a topic made again is another input."""
        return [b"kafka", self._asked(self.kafka.cluster_id).encode(), self._topic_id().encode()]

    @override
    def read(self, begin: int = 0) -> Any:
        check_topic(self._asked(self.kafka.config), self.kafka.topic)
        return ReadKafka(self.job, self.kafka, self._topic_id(), begin)

    def _topic_id(self) -> str:
        return str(self._asked(self.kafka.described)[0])

    def _asked(self, ask: Any) -> Any:
        try:
            return ask()
        except KafkaException as error:
            refused = refused_at_start(error)
        raise refused


class Unsplit(OffsetRestrictionTracker):  # type: ignore[misc]
    """An endless range of offsets for one reader: it may stop and go on, not be shared."""

    @override
    def try_split(self, fraction_of_remainder: float) -> Any:
        return super().try_split(0) if fraction_of_remainder == 0 else None

    @override
    def is_bounded(self) -> bool:
        return False


class _Endless(RestrictionProvider):  # type: ignore[misc]
    """From a number on, for ever."""

    def create_tracker(self, restriction: OffsetRange) -> Unsplit:
        return Unsplit(restriction)

    def initial_restriction(self, element: Any) -> OffsetRange:
        return OffsetRange(0, _FOR_EVER)

    def restriction_size(self, element: Any, restriction: OffsetRange) -> int:
        return 1


class _FromTime(_Endless):
    """A partition's offsets from the first one whose append time is not before ``begin``."""

    def __init__(self, kafka: Kafka, begin: int) -> None:
        self.kafka, self.begin = kafka, begin

    @override
    def initial_restriction(self, element: int) -> OffsetRange:
        try:
            return OffsetRange(self.first(element), _FOR_EVER)
        except KafkaException as error:
            refused = refused_at_start(error)
        raise refused

    def first(self, partition: int) -> int:
        """The offset to begin with."""
        if self.begin <= 0:
            return self.kafka.earliest(partition)
        return self.kafka.at(partition, self.begin // 1_000)


def advance(estimator: Any, micros: int) -> None:
    """Move a watermark to ``micros``, floored to milliseconds; never back."""
    at, now = Timestamp(micros=micros // 1_000 * 1_000), estimator.current_watermark()
    if now is None or at > now:
        estimator.set_watermark(at)


class _Watch(beam.DoFn):
    """Topic id -> numbers of its partitions, also of those that are added later."""

    def __init__(self, kafka: Kafka, settle: int) -> None:
        self.kafka, self.settle = kafka, settle

    @beam.DoFn.unbounded_per_element()
    @guarded("source")
    def process(
        self,
        element: str,
        tracker: Any = beam.DoFn.RestrictionParam(_Endless()),
        estimator: Any = beam.DoFn.WatermarkEstimatorParam(
            ManualWatermarkEstimator.default_provider()
        ),
    ) -> Iterator[Any]:
        """Look once, then again later."""
        known, before = tracker.current_restriction().start, estimator.current_watermark()
        asked = time.time_ns() // 1_000
        partitions = self._partitions(element)
        for number in range(known, partitions):
            if not tracker.try_claim(number):
                return
            yield number if before is None else TimestampedValue(number, before)
        if partitions:
            advance(estimator, asked - self.settle)
        tracker.defer_remainder(Duration(WATCH_SECONDS))

    def _partitions(self, topic_id: str) -> int:
        """How many there are now; 0 if nobody answers."""
        try:
            found, partitions = self.kafka.described(ASK_SECONDS)
        except KafkaException:
            return 0
        if found != topic_id:
            raise RunError(
                "source.topic", "was deleted and made again while it was read", "begin a new run"
            )
        return partitions


class _ReadPartition(beam.DoFn):
    """Partition -> batches; what is no row to the dead letter; errors carry no values."""

    def __init__(self, job: Job, kafka: Kafka, settle: int) -> None:
        self.kafka, self.settle = kafka, settle
        self.columns, self.data_columns = job.columns, job.data_columns
        self.batch_rows = job.performance.batch_rows

    @guarded("source")
    def setup(self) -> None:
        """Make what cannot be shipped."""
        self._objects = Objects(self.data_columns)

    def teardown(self) -> None:
        """Let connections go."""
        READERS.close()

    def read(self, partition: int, tracker: Any, estimator: Any) -> Iterator[Any]:
        """Messages from the tracker's start on, for about `BUNDLE_SECONDS`."""
        end = time.monotonic() + BUNDLE_SECONDS
        with READERS.lend(self.kafka, partition, tracker.current_restriction().start) as reader:
            stands = tracker.current_restriction().start
            while time.monotonic() < end:
                taken = reader.take(self.batch_rows, TAKE_SECONDS)
                if taken.position == stands:
                    asked = time.time_ns() // 1_000
                    if reader.caught_up():
                        advance(estimator, asked - self.settle)
                    tracker.defer_remainder(Duration(IDLE_SECONDS))
                    return
                if not tracker.try_claim(taken.position - 1):
                    return
                stands = taken.position
                yield from self._outputs(taken, partition, estimator)
            tracker.defer_remainder()

    def _outputs(self, taken: Taken, partition: int, estimator: Any) -> Iterator[Any]:
        messages = Messages.of(taken.messages)
        for part in parts(messages, self._objects, self.columns):
            if isinstance(part, Refused):
                yield TaggedOutput(DEAD_LETTER, refusal(part, partition))
                continue
            for batch in positioned(part, partition, self.batch_rows):
                first = batch.column(APPEND_TIME).cast("int64").to_numpy().min()
                yield TimestampedValue(batch, Timestamp(micros=int(first)))
        if taken.deleted is not None:
            lost = refuse(taken.deleted, Reason.DELETED_BEFORE_READ)
            yield TaggedOutput(DEAD_LETTER, refusal(lost, partition))
        if messages.last_append >= 0:
            advance(estimator, messages.last_append * 1_000 - self.settle)


def _partition_reader(begin: int, job: Job, kafka: Kafka, settle: int) -> _ReadPartition:
    """The DoFn; its parameters must be in the signature of ``process``, so it is made here."""

    class ReadPartition(_ReadPartition):
        @beam.DoFn.unbounded_per_element()
        @guarded("source")
        def process(
            self,
            element: int,
            tracker: Any = beam.DoFn.RestrictionParam(_FromTime(kafka, begin)),
            estimator: Any = beam.DoFn.WatermarkEstimatorParam(
                ManualWatermarkEstimator.default_provider()
            ),
        ) -> Iterable[Any]:
            yield from self.read(element, tracker, estimator)

    return ReadPartition(job, kafka, settle)


class ReadKafka(beam.PTransform):  # type: ignore[misc]
    """The messages of a topic: outputs ``records`` and ``dead_letter``.

    Args:
        job: its columns and ``performance.batch_rows`` are used.
        kafka: the topic.
        topic_id: the topic's own id; the run fails if it becomes another one.
        begin: micros; messages appended before are not read.
    """

    def __init__(self, job: Job, kafka: Kafka, topic_id: str, begin: int) -> None:
        super().__init__()
        self._job, self._kafka, self._topic_id, self._begin = job, kafka, topic_id, begin

    @override
    def expand(self, begin: Any) -> Any:
        settle = duration_micros("source.settle", self._job.source.settle)
        read = _partition_reader(self._begin, self._job, self._kafka, settle)
        batches = beam.ParDo(read).with_output_types(pa.RecordBatch)
        return (
            begin
            | "Topic" >> beam.Create([self._topic_id], reshuffle=False)
            | "Watch" >> beam.ParDo(_Watch(self._kafka, settle)).with_output_types(int)
            | "Spread" >> beam.Reshuffle()
            | "Read" >> batches.with_outputs(DEAD_LETTER, main=RECORDS)
        )
