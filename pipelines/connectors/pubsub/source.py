"""Pub/Sub as a source: one JSON object a message, stamped by the service when it was published.

Some readers (splittable DoFns) pull; a message is acknowledged when the runner has stored the
bundle it was in.  A message may come again, anywhere: its id, not a position, names its record.
A run that is begun again on its store seeks the subscription back to what the store does not have
yet, so the subscription must retain acknowledged messages.

The watermark of a reader is the clock, less the age of messages that may still come
(`client.Ages`), less ``table.settle``.  Pub/Sub has no order, so this assumes what is said
there.  What a dead worker held comes again only after the acknowledgement deadline, so for that
long a reader that takes over says nothing.  A message that breaks this is late and joins the next
open trigger time.  The guarantee rests on that assumption: as long as it holds nobody is late, and
what a reader has seen only makes releases wait; where it breaks, one unit's old message can make
the watermark wait for another unit's late one, and so decide that one's step (mechanism.md, rule
0).

What becomes of a message is a function of that message alone.  A position is only there for the
dead letters, so that an operator finds what they mean:

* a message that is no row: partition 1, offset = its id where that is a number below 2^63 (the
  service's are), else 63 bits of BLAKE2b of the id;
* a row that a later stage refuses: partition 0, offset = micros of publishing of the first row of
  its batch, plus its place in the batch.
"""

import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
from apache_beam.utils.timestamp import Timestamp
from typing_extensions import override

from dpstream.accounting.errors import PolicyError
from dpstream.dp_transforms.beam.clock import give_back
from dpstream.dp_transforms.telemetry import guarded
from dpstream.pipelines.connectors.inputs import (
    BACKPRESSURE_SECONDS,
    Backpressure,
    Input,
    output,
    placed,
    read_transform,
)
from dpstream.pipelines.connectors.pubsub import client as pubsub_client
from dpstream.pipelines.connectors.pubsub.client import Puller, publish_micros
from dpstream.pipelines.connectors.unbounded import (
    TRACKER,
    UNUSED_SECONDS,
    WATERMARK,
    ReaderPool,
    advance,
    beam_time,
    stands,
    wall_micros,
)
from dpstream.pipelines.formats.lines import MAX_LINE_BYTES, Objects
from dpstream.pipelines.formats.rows import Part, Reason, Refused, Rows
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.project.text import duration_micros

PUBLISH_TIME, MESSAGE_ID = "_publish_time", "_message_id"
ROWS, LETTERS = 0, 1
_INSTANT = pa.timestamp("us", "UTC")
#: Readers of a subscription; each holds one pull at a time.
READERS = 4
#: A bundle takes so long; after the first messages it waits so long for more.
TAKE_SECONDS, MORE_SECONDS = 0.1, 0.03
_FINALIZER = beam.DoFn.BundleFinalizerParam
PULLERS = ReaderPool[Puller](keep=1)


def parts(received: Sequence[Any], objects: Objects, columns: Sequence[str]) -> Iterator[Part]:
    """Yield rows (of partition `ROWS`) and refused positions (of `LETTERS`).

    Args:
        received: the service's ``ReceivedMessage``s.
        objects: decodes ``columns`` without `PUBLISH_TIME` and `MESSAGE_ID`.
        columns: of the batch, in this order: strings, and `PUBLISH_TIME` as instant.
    """
    texts = [m.message.data for m in received]
    values = objects.decode(texts, MAX_LINE_BYTES)
    bad = [i for i, value in enumerate(values) if value is None]
    if bad:
        offsets = np.array([number(received[i].message.message_id) for i in bad], np.int64)
        yield Refused(offsets, [_reason(texts[i]).value for i in bad])
        received = [m for m, value in zip(received, values, strict=True) if value is not None]
        values = [value for value in values if value is not None]
    if values:
        stamps = np.array([publish_micros(m.message) for m in received], np.int64)
        data = [c for c in columns if c not in (PUBLISH_TIME, MESSAGE_ID)]
        named = dict(zip(data, objects.arrays(values), strict=True))
        named[PUBLISH_TIME] = pa.array(stamps).cast(_INSTANT)
        named[MESSAGE_ID] = pa.array([m.message.message_id for m in received], pa.string())
        batch = pa.RecordBatch.from_arrays([named[c] for c in columns], list(columns))
        yield Rows(max(0, int(stamps[0])), batch)


def number(message_id: str) -> int:
    """Return a message's id as an offset."""
    if message_id.isascii() and message_id.isdigit() and len(message_id) < 19:
        return int(message_id)
    digest = hashlib.blake2b(message_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _reason(text: bytes) -> Reason:
    if not text:
        return Reason.EMPTY
    return Reason.MESSAGE_TOO_LONG if len(text) > MAX_LINE_BYTES else Reason.MALFORMED


class PubSubInput(Input):
    """Messages of a subscription."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        if job.plan.stamp != PUBLISH_TIME:
            raise PolicyError(
                "table.stamp",
                "must be the service's publish time: publishers fill everything else",
                "use stamp = 'publish_time'",
            )
        self.subscription = str(job.source.subscription)

    @override
    def identity(self) -> list[bytes]:
        topic, _ = pubsub_client.described(self.subscription)
        return [b"pubsub", self.subscription.encode(), topic.encode()]

    @override
    def read(self, begin: int = 0, backpressure: Backpressure | None = None) -> Any:
        _, ack_deadline = pubsub_client.described(self.subscription)
        if begin > 0:
            pubsub_client.seek(self.subscription, begin)
        return ReadPubSub(self.job, begin > 0, ack_deadline, backpressure)


class _ReadMessages(beam.DoFn):
    """Reader number -> batches; what is no row to the dead letter; errors carry no values."""

    def __init__(
        self, job: Job, again: bool, ack_deadline: int, backpressure: Backpressure | None
    ) -> None:
        self._backpressure, self._rows = backpressure, 0
        self._again, self._ack_deadline = again, ack_deadline
        self._subscription = str(job.source.subscription)
        self._columns, self._batch_rows = job.columns, job.batch_rows
        self._settle = duration_micros("table.settle", job.source.settle)

    @guarded("source")
    def setup(self) -> None:
        """Make what cannot be shipped."""
        given = (PUBLISH_TIME, MESSAGE_ID)
        self._objects = Objects([c for c in self._columns if c not in given])

    def teardown(self) -> None:
        """Let pulls go that nobody waits for."""
        PULLERS.close(UNUSED_SECONDS)

    @beam.DoFn.unbounded_per_element()
    @guarded("source")
    def process(
        self,
        element: int,
        finalizer: Any = _FINALIZER,  # before the other two: Beam fills it in by its place
        tracker: Any = TRACKER,
        watermark: Any = WATERMARK,
    ) -> Iterator[Any]:
        """What comes within `TAKE_SECONDS`."""
        now = stands(watermark)
        if self._backpressure and self._backpressure.holds(now.micros, self._rows):
            give_back(tracker, BACKPRESSURE_SECONDS)
            return
        done = tracker.current_restriction().after
        hold = self._ack_deadline if self._again or done is not None else 0
        make = functools.partial(Puller, self._subscription, hold)
        with PULLERS.lend((self._subscription, element), make) as puller:
            puller.stands(done or 0, self._ack_deadline)
            messages, age = puller.take(self._batch_rows, TAKE_SECONDS, MORE_SECONDS)
        if messages:
            if not tracker.try_claim((done or 0) + len(messages)):
                return
            ack_ids = [message.ack_id for message in messages]
            finalizer.register(
                functools.partial(pubsub_client.acknowledge, self._subscription, ack_ids)
            )
            self._rows += len(messages)
            yield from self._outputs(messages, now)
        if age is not None:
            advance(watermark, wall_micros() - age - self._settle)
        tracker.defer_remainder()

    def _outputs(self, messages: list[Any], now: Timestamp) -> Iterator[Any]:
        """Batches at their least stamp; what comes late at the watermark."""
        first = min(publish_micros(m.message) for m in messages)
        at = max(beam_time(first), now)
        for part in parts(messages, self._objects, self._columns):
            partition = LETTERS if isinstance(part, Refused) else ROWS
            for rows in placed([part], partition, self._batch_rows):
                yield output(rows, at)


class ReadPubSub(beam.PTransform):  # type: ignore[misc]
    """The messages of a subscription: outputs ``records`` and ``dead_letter``.

    Args:
        job: the job, of which source, columns and ``batch_rows`` are used.
        again: the run is begun again on its store.
        ack_deadline: of the subscription, in seconds.
        backpressure: keeps it from running ahead of the releases.
    """

    def __init__(
        self,
        job: Job,
        again: bool = False,
        ack_deadline: int = 60,
        backpressure: Backpressure | None = None,
    ) -> None:
        super().__init__()
        self._dofn = _ReadMessages(job, again, ack_deadline, backpressure)

    @override
    def expand(self, begin: Any) -> Any:
        """Return ``Create(readers) | Reshuffle | read``."""
        return (
            begin
            | "Readers" >> beam.Create(list(range(READERS)), reshuffle=False)
            | "Spread" >> beam.Reshuffle()
            | "Read" >> read_transform(self._dofn)
        )
