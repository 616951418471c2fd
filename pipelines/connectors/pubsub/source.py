"""Pub/Sub as a source: one JSON object a message, stamped by the service when it was published.

Some readers (splittable DoFns) pull; a message is acknowledged when the runner has stored the
bundle it was in.  A message may come again, anywhere: its id, not a position, names its record.
A run that is begun again on its store seeks the subscription back to what the store does not have
yet, so the subscription must retain acknowledged messages.

The watermark of a reader is the clock, less the age of messages that may still come
(`Ages`), less ``table.settle``.  Pub/Sub has no order, so this assumes what is said
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

**Pulls** of one reader say something of the messages that are still to come (`Ages`).  A pull waits
at the service until there is something; it is a call in the background whose answer the reader
picks up, so that bundles stay short and no answer is thrown away by a timeout: messages of a lost
answer come again only after the acknowledgement deadline.

What the service says about an error never leaves: its texts may quote names or requests.
"""

import functools
import hashlib
import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import apache_beam as beam
import grpc
import numpy as np
import pyarrow as pa
from apache_beam.utils.timestamp import Timestamp
from google.api_core import exceptions
from google.api_core.gapic_v1.routing_header import to_grpc_metadata
from google.cloud.pubsub_v1 import SubscriberClient
from google.pubsub_v1.types import PullRequest, PullResponse
from typing_extensions import override

from dpstream.accounting.errors import DpstreamError, PolicyError, RunError, UsageError
from dpstream.dp_transforms.beam.clock import give_back
from dpstream.dp_transforms.telemetry import guarded
from dpstream.pipelines.connectors.inputs import (
    BACKPRESSURE_SECONDS,
    TRACKER,
    UNUSED_SECONDS,
    WATERMARK,
    Backpressure,
    Input,
    ReaderPool,
    advance,
    beam_time,
    output,
    placed,
    read_transform,
    stands,
    wall_micros,
)
from dpstream.pipelines.formats.lines import MAX_LINE_BYTES
from dpstream.pipelines.formats.rows import Part, Reason, Refused, Rows
from dpstream.pipelines.formats.texts import Objects
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.project.text import duration_micros
from dpstream.state.connecting import PASSING, reach, retry

#: Messages of one acknowledgement.
ACK_MESSAGES = 1_000
#: Seconds that a question may take.
START_SECONDS = 15.0
#: An acknowledgement waits until the runner has stored the bundle.
LEAST_ACK_DEADLINE = 60
_NAME = re.compile(r"projects/[^/]+/subscriptions/[^/]+")
_CREATE = (
    "create one with `gcloud pubsub subscriptions create NAME --topic=TOPIC --ack-deadline=60 "
    "--retain-acked-messages --message-retention-duration=7d`"
)


@functools.lru_cache(maxsize=1)
def client() -> Any:
    """Return this process's client (of the emulator where PUBSUB_EMULATOR_HOST is set)."""
    return SubscriberClient()


def described(subscription: str) -> tuple[str, int]:
    """Return the topic of a usable subscription, and its deadline of acknowledgement in seconds.

    Raises:
        UsageError: no such subscription, or its settings lose messages.
        RunError: it cannot be reached.
    """
    if not _NAME.fullmatch(subscription):
        raise UsageError(
            "table.subscription", "is no full name", "write projects/PROJECT/subscriptions/NAME"
        )
    reach(client().transport.grpc_channel, "table.subscription", "Pub/Sub")
    description = answer_of(
        lambda: client().get_subscription(subscription=subscription, **_patience())
    )
    if (
        description.push_config.push_endpoint
        or description.bigquery_config.table
        or (description.cloud_storage_config.bucket)
    ):
        raise _unusable("is delivered elsewhere, not pulled", _CREATE)
    if description.topic == "_deleted-topic_":
        raise _unusable("belongs to a topic that was deleted", _CREATE)
    if not description.retain_acked_messages and not description.topic_message_retention_duration:
        raise _unusable(
            "forgets acknowledged messages, which a restart reads again",
            "`gcloud pubsub subscriptions update NAME --retain-acked-messages "
            "--message-retention-duration=7d`",
        )
    if description.ack_deadline_seconds < LEAST_ACK_DEADLINE:
        raise _unusable(
            f"has an acknowledgement deadline below {LEAST_ACK_DEADLINE} s",
            "`gcloud pubsub subscriptions update NAME --ack-deadline=60`",
        )
    return str(description.topic), int(description.ack_deadline_seconds)


def seek(subscription: str, begin: int) -> None:
    """Deliver again all messages that were published from ``begin`` (micros) on.

    Raises:
        RunError: it cannot be reached.
    """
    at = datetime.fromtimestamp(begin / 1_000_000, UTC)
    request = {"subscription": subscription, "time": at}
    answer_of(lambda: client().seek(request=request, **_patience()))


def acknowledge(subscription: str, ack_ids: Sequence[str]) -> None:
    """Acknowledge messages that the runner has stored; a lost one comes again, and counts once."""
    for start in range(0, len(ack_ids), ACK_MESSAGES):
        chunk = list(ack_ids[start : start + ACK_MESSAGES])
        with suppress(exceptions.GoogleAPICallError, exceptions.RetryError):
            client().acknowledge(subscription=subscription, ack_ids=chunk, **_patience())


def _patience() -> dict[str, Any]:
    return {"timeout": START_SECONDS, "retry": retry(START_SECONDS)}


def _unusable(rule: str, fix: str) -> UsageError:
    return UsageError("table.subscription", rule, fix)


def answer_of(ask: Any) -> Any:
    """Return an answer of the service; the texts of its errors never leave."""
    refused: DpstreamError
    try:
        return ask()
    except exceptions.NotFound:
        refused = _unusable("does not exist", _CREATE)
    except (exceptions.PermissionDenied, exceptions.Unauthenticated):
        refused = RunError("table.subscription", "may not be read", "grant roles/pubsub.editor")
    except exceptions.GoogleAPIError as error:
        kind = type(error).__name__
        refused = RunError(
            "table.subscription", f"cannot be reached ({kind})", "check network and credentials"
        )
    raise refused


#: Messages of one pull (the service's most), and how long it waits (then it is asked again).
PULL_MESSAGES, PULL_SECONDS = 1_000, 90.0
#: How long the service may be away before the job fails; the pause after a fault.
LOST_SECONDS, PAUSE_SECONDS = 600.0, 1.0
#: A pull that waits for so long says that there is nothing.
QUIET_SECONDS = 1.0
#: An answer that was picked up later than that: nobody pulled in between.
GAP_SECONDS = 0.25
#: Ages of messages are looked at over that time.
HORIZON_SECONDS = 10.0
_PULL = "/google.pubsub.v1.Subscriber/Pull"


class Ages:
    """The greatest age of the messages that are still to come, from pulls alone.

    The service has no order and does not tell the oldest message that waits.  What is assumed: a
    pull that waited for `QUIET_SECONDS` says that nothing waits; while messages come, those
    to come are not older (at delivery) than the oldest of the last `HORIZON_SECONDS`.  Nothing
    is said before the first of the two has been seen, nor in the first ``hold`` seconds.
    """

    def __init__(self, now: float, hold: float = 0.0) -> None:
        self._begun, self._quiet_since, self._settled = now, now, False
        self._hold_until = now + hold
        self._ages: deque[tuple[float, int]] = deque()

    def hold(self, until: float) -> None:
        """Note that earlier messages may come again."""
        self._hold_until = max(until, self._hold_until)

    def came(self, now: float, oldest: int) -> None:
        """Note that messages came, the oldest of them ``oldest`` micros old."""
        self._quiet_since = now
        while self._ages and self._ages[-1][1] <= oldest:
            self._ages.pop()
        self._ages.append((now, oldest))

    def gap(self, now: float) -> None:
        """Note that nobody pulled for a while."""
        self._quiet_since = now

    def failed(self, now: float) -> None:
        """Note that a pull failed: no age is known until another one has waited."""
        self._quiet_since = self._begun = now
        self._settled = False

    def age(self, now: float) -> int | None:
        """Return the largest age (micros) of messages to come; ``None``: not known."""
        if now < self._hold_until:
            return None
        if now - self._quiet_since >= QUIET_SECONDS:
            self._ages.clear()
            self._settled = True
            return 0
        while self._ages and now - self._ages[0][0] > HORIZON_SECONDS:
            self._ages.popleft()
        self._settled = self._settled or now - self._begun > HORIZON_SECONDS
        return (self._ages[0][1] if self._ages else 0) if self._settled else None


class Puller:
    """Pulls messages of one reader in the background, one pull at a time.

    Args:
        subscription: full name of the subscription.
        hold: seconds in which messages may come again that a reader before this one had.
    """

    def __init__(self, subscription: str, hold: float = 0.0) -> None:
        channel = client().transport.grpc_channel
        self._pull = channel.unary_unary(
            _PULL,
            request_serializer=PullRequest.serialize,
            response_deserializer=PullResponse.pb().FromString,
        )
        self._request = PullRequest(subscription=subscription, max_messages=PULL_MESSAGES)
        self._metadata = [to_grpc_metadata([("subscription", subscription)])]
        self._call: Any = None
        self.used = time.monotonic()
        #: Messages that the reader will have claimed after this bundle; ``None``: not known.
        self.claimed: int | None = None
        self._ages = Ages(self.used, hold)
        self._answered = self.used
        self._lost_since: float | None = None
        self._pause_until = 0.0

    def take(self, most: int, seconds: float, more_seconds: float) -> tuple[list[Any], int | None]:
        """Return ``ReceivedMessage``s (protobuf) of the next ``seconds``, and `Ages.age`.

        After the first ones it waits only ``more_seconds``.

        Raises:
            RunError: the subscription is gone, may not be read, or is away for too long.
        """
        messages: list[Any] = []
        until = time.monotonic() + seconds
        while len(messages) < most and (time_to_wait := until - time.monotonic()) > 0:
            answer = self._answer(time_to_wait)
            if answer is None:
                break
            if answer:
                if not messages:
                    until = min(until, time.monotonic() + more_seconds)
                messages += answer
                self._ages.came(time.monotonic(), oldest_micros(answer))
        self.used = time.monotonic()
        self.claimed = None if self.claimed is None else self.claimed + len(messages)
        return messages, self._ages.age(self.used)

    def stands(self, claimed: int, hold: float) -> None:
        """Note that a bundle begins.

        Where the runner went back, or a bundle failed, the messages of this puller come again
        within ``hold`` seconds.
        """
        if self.claimed not in (None, claimed):
            self._ages.hold(time.monotonic() + hold)
        self.claimed = claimed

    def _answer(self, seconds: float) -> list[Any] | None:
        """The messages of the pull that waits; ``None``: it still does, or failed."""
        now = time.monotonic()
        if now < self._pause_until:
            time.sleep(min(seconds, self._pause_until - now))
            return None
        if self._call is None:
            self._ask()
        try:
            answer = self._call.result(timeout=seconds)
        except grpc.FutureTimeoutError:
            return None
        except (grpc.RpcError, grpc.FutureCancelledError):
            code = self._call.code()
            self._call = None
            self._failed(code)
            return None
        self._lost_since = None
        if time.monotonic() - self._answered > GAP_SECONDS:
            self._ages.gap(time.monotonic())
        self._ask()
        return list(answer.received_messages)

    def _ask(self) -> None:
        def note(_: Any) -> None:
            self._answered = time.monotonic()

        self._call = self._pull.future(self._request, timeout=PULL_SECONDS, metadata=self._metadata)
        self._call.add_done_callback(note)

    def _failed(self, code: grpc.StatusCode) -> None:
        now = time.monotonic()
        self._ages.failed(now)
        self._lost_since = self._lost_since or now
        self._pause_until = now + PAUSE_SECONDS
        if code.name not in PASSING or now - self._lost_since > LOST_SECONDS:
            raise RunError(
                "table.subscription",
                f"cannot be pulled ({code.name})",
                "check that it exists, the network and credentials, and run again",
            ) from None

    def close(self) -> None:
        """Give up the pull that waits; messages that it had come again."""
        if self._call is not None:
            self._call.cancel()
            self._call = None


def oldest_micros(messages: list[Any]) -> int:
    """Return the age of the oldest of some messages in micros, not below 0."""
    first = min(publish_micros(m.message) for m in messages)
    return max(0, time.time_ns() // 1_000 - first)


def publish_micros(message: Any) -> int:
    """Return the publish time of a message, in micros."""
    at = message.publish_time
    return int(at.seconds) * 1_000_000 + int(at.nanos) // 1_000


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
        topic, _ = described(self.subscription)
        return [b"pubsub", self.subscription.encode(), topic.encode()]

    @override
    def read(self, begin: int = 0, backpressure: Backpressure | None = None) -> Any:
        _, ack_deadline = described(self.subscription)
        if begin > 0:
            seek(self.subscription, begin)
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
            finalizer.register(functools.partial(acknowledge, self._subscription, ack_ids))
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
