"""The topic of a source: the requests to its broker, and the reader of one of its partitions.

The broker is asked at the start and while the topic is read (`Kafka`).  A reader reads one
partition from any offset on, and makes rows of its messages.  A worker goes on with the same reader
from bundle to bundle (`READERS`), because a consumer fetches ahead; the place a bundle begins at
comes from the runner, and a reader that stands elsewhere moves there.

What becomes of a message is a function of that message alone.  Offsets have holes (control
records of transactions, messages that were rolled back): a batch holds consecutive ones only.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from operator import methodcaller
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
from confluent_kafka import (
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, ConfigResource, OffsetSpec

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import DpstreamError, RunError, UsageError, required
from dpstream.pipelines.connectors.inputs import ReaderPool
from dpstream.pipelines.connectors.kafka.client import (
    CONSUMERS_OWN,
    answer,
    check_options,
    looked_up,
    make_client,
    name_of,
)
from dpstream.pipelines.formats.lines import MAX_LINE_BYTES
from dpstream.pipelines.formats.rows import Part, Reason, Refused, runs
from dpstream.pipelines.formats.texts import Objects
from dpstream.pipelines.project.source import Source

#: Seconds a question may take at the start, and from a worker (which asks again later).
START_SECONDS, ASK_SECONDS = 30.0, 3.0
#: Settings that decide what is read, or would let the client print or load something.
_OURS = {
    "bootstrap.servers": "",
    "metadata.broker.list": "",
    "isolation.level": "read_committed",
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "error",
    "enable.partition.eof": True,
    "log_level": 0,
    "debug": "",
    "plugin.library.paths": "",
}
#: Settings that ``table.options`` may change.
_USUAL = {
    "client.id": "dpstream",
    "group.id": "dpstream",  # asked for by the client; nothing is committed to it
    "queued.max.messages.kbytes": "32768",
    "max.partition.fetch.bytes": "4194304",  # one partition is all a consumer reads
    "fetch.queue.backoff.ms": "20",
    "reconnect.backoff.max.ms": "2000",
}
_REFUSED = ("table.options", "are not accepted by Kafka's client", "see librdkafka's settings")
#: What Kafka calls a stamp that the broker gave (1: the producer did).
LOG_APPEND_TIME = 2
APPEND_TIME = "_append_time"
_INSTANT = pa.timestamp("us", "UTC")
#: Messages asked for at once, and bytes after which a batch is handed on.
_ASK_FOR = 2_000
_BATCH_BYTES = 8 << 20
#: How long a first message may take; the client fetches ahead, so what there is, is here.
_READY_SECONDS = 0.02
#: A broker that is silent for longer ends the bundle with an error.
LOST_SECONDS = 600.0
#: Errors of rights: the client goes on asking, and others' questions are answered.
_DENIED = (
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError._AUTHENTICATION,
)


class Kafka(msgspec.Struct, frozen=True):
    """A topic and its addresses; public.

    Attributes:
        servers: ``host:port,host:port``.
        topic: name of the topic.
        options: settings of librdkafka; a value ``env:NAME`` is looked up where it is used.
    """

    servers: str
    topic: str
    options: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, source: Source) -> "Kafka":
        """Return the topic of a job's source.

        Raises:
            UsageError: see `check_options`.
        """
        check_options("table", source.options, _OURS)
        options = tuple(sorted(source.options.items()))
        return cls(source.servers or "", source.topic or "", options)

    def __repr__(self) -> str:
        return f"Kafka({self.topic!r})"

    def settings(self) -> dict[str, Any]:
        """Return the client's settings, which hold secrets and must never be shown."""
        ours = {name: value for name, value in _OURS.items() if value != ""}
        return {
            **_USUAL,
            **looked_up("table", dict(self.options)),
            **ours,
            "bootstrap.servers": self.servers,
        }

    def consumer(self) -> Consumer:
        """Return a new consumer with nothing assigned."""
        return make_client("consumer", self.settings(), _REFUSED)

    def admin(self) -> AdminClient:
        """Return the process's client for questions."""
        return _admin(self)

    def partition(self, number: int, offset: int = 0) -> TopicPartition:
        """Return a place in the topic."""
        return TopicPartition(self.topic, number, offset)

    def cluster_id(self) -> str:
        """Return the cluster's own name."""
        future = self.admin().describe_cluster(request_timeout=START_SECONDS)
        return str(answer(future, START_SECONDS).cluster_id)

    def described(self, seconds: float = START_SECONDS) -> tuple[str, int]:
        """Return (id of the topic, number of partitions): a topic made again has another id.

        Raises:
            KafkaException: no answer, or no such topic.
        """
        names = TopicCollection([self.topic])
        futures = self.admin().describe_topics(names, request_timeout=seconds)
        topic = answer(futures[self.topic], seconds)
        return str(topic.topic_id), len(topic.partitions)

    def config(self) -> dict[str, str]:
        """Return the topic's settings.

        Raises:
            KafkaException: no answer, or no such topic.
        """
        resource = ConfigResource(ConfigResource.Type.TOPIC, self.topic)
        futures = self.admin().describe_configs([resource], request_timeout=START_SECONDS)
        entries = answer(futures[resource], START_SECONDS)
        return {name: str(entry.value) for name, entry in entries.items()}

    def earliest(self, partition: int) -> int:
        """Return the first offset that is still there."""
        return self._offset(partition, OffsetSpec.earliest())

    def end(self, partition: int) -> int:
        """Return the offset after the last message, whether its transaction is committed or not.

        A consumer that reads committed messages would be told the end of those: messages of an
        open transaction, stamped already, would come after a watermark that trusts it.
        """
        return self._offset(partition, OffsetSpec.latest())

    def at(self, partition: int, millis: int) -> int:
        """Return the first offset with an append time of ``millis`` or later, else the end."""
        end = self.end(partition)  # asked first: what comes in between is read
        offset = self._offset(partition, OffsetSpec.for_timestamp(millis))
        return end if offset < 0 else offset

    def _offset(self, partition: int, spec: OffsetSpec) -> int:
        place = self.partition(partition)
        futures = self.admin().list_offsets(
            {place: spec},
            isolation_level=IsolationLevel.READ_UNCOMMITTED,
            request_timeout=ASK_SECONDS,
        )
        return int(answer(futures[place], ASK_SECONDS).offset)


@functools.cache
def _admin(kafka: Kafka) -> AdminClient:
    settings = {n: v for n, v in kafka.settings().items() if n not in CONSUMERS_OWN}
    return make_client("admin", settings, _REFUSED)


def refused_at_start(error: BaseException) -> DpstreamError:
    """Return the error that tells a person how to fix a client's error at the start."""
    name = name_of(error)
    if name == "UNKNOWN_TOPIC_OR_PART":
        return UsageError("table.topic", "is not on the broker", "create it, or correct the name")
    return RunError(
        "table.servers", f"did not answer ({name})", "check the address and table.options"
    )


def check_topic(config: dict[str, str], topic: str) -> None:
    """Refuse topics on which one user's messages can change what becomes of others'.

    Raises:
        UsageError: stamps are the producers', or messages are removed by their keys.
    """
    alter = f"kafka-configs --alter --topic {topic} --add-config"
    if config.get("message.timestamp.type") != "LogAppendTime":
        raise UsageError(
            "table.topic",
            "has message.timestamp.type=CreateTime, so that producers choose the stamps",
            f"{alter} message.timestamp.type=LogAppendTime",
        )
    if "compact" in map(str.strip, config.get("cleanup.policy", "").split(",")):
        raise UsageError(
            "table.topic",
            "has cleanup.policy=compact, so that a message removes earlier ones with its key",
            f"{alter} cleanup.policy=delete",
        )


class PartitionMessages(NamedTuple):
    """n messages in the order of their offsets.

    Attributes:
        offsets: (n,) int64.
        stamp_kinds: (n,) int64, see `LOG_APPEND_TIME`.
        stamps: (n,) int64 milliseconds.
        values: n payloads, ``None`` where there is none.
    """

    offsets: Int64
    stamp_kinds: Int64
    stamps: Int64
    values: list[bytes | None]

    @classmethod
    def of(cls, messages: Sequence[Any]) -> "PartitionMessages":
        """Return the client's messages, without a Python loop over them."""
        offsets = np.fromiter(map(methodcaller("offset"), messages), np.int64, len(messages))
        pairs = np.array(list(map(methodcaller("timestamp"), messages)), np.int64).reshape(-1, 2)
        values = list(map(methodcaller("value"), messages))
        return cls(offsets, pairs[:, 0], pairs[:, 1], values)

    @property
    def last_append(self) -> int:
        """The latest append time in milliseconds, or -1."""
        given = self.stamps[self.stamp_kinds == LOG_APPEND_TIME]
        return int(given.max()) if len(given) else -1


def parts(messages: PartitionMessages, objects: Objects, columns: Sequence[str]) -> Iterator[Part]:
    """Yield the rows and refused positions of messages.

    Args:
        messages: of one partition.
        objects: decodes ``columns`` without `APPEND_TIME`.
        columns: of every batch, in this order: strings, and `APPEND_TIME` as instant.
    """
    texts = [b"" if value is None else value for value in messages.values]
    values = objects.decode(texts, MAX_LINE_BYTES)
    good = messages.stamp_kinds == LOG_APPEND_TIME
    if None in values:
        good &= np.array([value is not None for value in values])
    offsets, stamps = messages.offsets, messages.stamps
    if not good.all():
        yield _refused(messages, texts, good)
        values = [value for value, keep in zip(values, good.tolist(), strict=True) if keep]
        offsets, stamps = offsets[good], stamps[good]
    if values:
        given = [column for column in columns if column != APPEND_TIME]
        named = dict(zip(given, objects.arrays(values), strict=True))
        named[APPEND_TIME] = pa.array(stamps * 1_000, pa.int64()).cast(_INSTANT)
        yield from runs(offsets, pa.RecordBatch.from_pydict({c: named[c] for c in columns}))


def _refused(messages: PartitionMessages, texts: list[bytes], good: Any) -> Refused:
    """Why each message that is not good is none; the first reason that holds."""
    bad = np.flatnonzero(~good)
    sizes = np.array([len(texts[i]) for i in bad])
    reasons = np.where(sizes == 0, Reason.EMPTY.value, Reason.MALFORMED.value)
    reasons = np.where(sizes > MAX_LINE_BYTES, Reason.MESSAGE_TOO_LONG.value, reasons)
    foreign = messages.stamp_kinds[bad] != LOG_APPEND_TIME
    reasons = np.where(foreign, Reason.NOT_THE_BROKERS_STAMP.value, reasons)
    return Refused(messages.offsets[bad], reasons.tolist())


class FetchedMessages(NamedTuple):
    """The messages that one call fetched.

    Attributes:
        messages: the client's messages, in the order of their offsets.
        position: the offset to go on from.
        deleted: an offset whose message the broker had removed already, if one was met.
    """

    messages: list[Any]
    position: int
    deleted: int | None = None


class Reader:
    """A consumer of one partition; one caller at a time."""

    def __init__(self, kafka: Kafka, partition: int) -> None:
        self._kafka, self._partition = kafka, partition
        self._consumer: Consumer | None = None
        self._position = -1
        self._heard = self.used = time.monotonic()
        self._denied: tuple[float, str] | None = None

    def seek(self, offset: int) -> None:
        """Go on from ``offset``."""
        if self._consumer is None:
            self._consumer = self._kafka.consumer()
            self._position = -1
        if self._position != offset:
            self._consumer.assign([self._kafka.partition(self._partition, offset)])
            self._position = offset

    def take(self, rows: int, seconds: float) -> FetchedMessages:
        """Return at most ``rows`` messages from here on, after at most about ``seconds``.

        A partition that has none ready is left at once, so that others get their turn.

        Raises:
            RunError: the partition has lost messages that were read.
        """
        consumer, messages = required(self._consumer, "`seek` comes first"), list[Any]()
        size, end = 0, time.monotonic() + seconds
        while len(messages) < rows and size < _BATCH_BYTES:
            left = max(end - time.monotonic(), 0.0)
            wait = left if messages else min(left, _READY_SECONDS)
            got = consumer.consume(min(_ASK_FOR, rows - len(messages)), wait)
            good, errors = got, []
            if any(map(methodcaller("error"), got)):
                good = [message for message in got if message.error() is None]
                errors = [message for message in got if message.error() is not None]
            if good:
                messages += good
                size += sum(map(len, good))
                self._position = good[-1].offset() + 1
            if self._handle_errors(errors):
                return self._lost(messages)
            if not messages or not left:
                break
        if messages:
            self._heard, self._denied = time.monotonic(), None
        return FetchedMessages(messages, self._position)

    def _handle_errors(self, errors: list[Any]) -> bool:
        """Heed what is not a message; whether the position is not in the log."""
        lost = False
        for message in errors:
            code = message.error().code()
            if code == KafkaError._PARTITION_EOF:
                self._position = max(self._position, message.offset())
                self._heard = time.monotonic()
            elif code in _DENIED and self._denied is None:
                self._denied = time.monotonic(), message.error().name()
            # Everything is tried again by the client; `_answer` and `caught_up` count the time.
            lost |= code in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE)
        return lost

    def _lost(self, messages: list[Any]) -> FetchedMessages:
        """The log does not hold the position: retention was faster, or the log was cut."""
        position = self._position
        with contextlib.suppress(KafkaException):
            first, end = self._kafka.earliest(self._partition), self._kafka.end(self._partition)
            if end < position:
                raise RunError(
                    "table.topic",
                    "has lost messages at its end that were read already",
                    "begin a new run; use replicas and no unclean election of leaders",
                )
            if first > position:
                self.seek(first)
                return FetchedMessages(messages, first, position)
        self._position = -1
        self.seek(position)
        return FetchedMessages(messages, position)

    def first(self, begin: int) -> int | None:
        """Return the first offset with an append time of ``begin`` (micros) or later; ``None``:
        unknown.

        Raises:
            RunError: the broker has not answered for `LOST_SECONDS`.
        """
        if begin <= 0:
            return self._answer(lambda: self._kafka.earliest(self._partition))
        return self._answer(lambda: self._kafka.at(self._partition, begin // 1_000))

    def caught_up(self) -> bool:
        """Return whether the partition's end, asked now, is where the reader stands.

        Raises:
            RunError: the broker has not answered, or let nobody read, for `LOST_SECONDS`.
        """
        if self._denied is not None and time.monotonic() - self._denied[0] > LOST_SECONDS:
            raise RunError(
                "table.topic",
                f"may not be read ({self._denied[1]})",
                "check table.options and the topic's access rules",
            )
        end = self._answer(lambda: self._kafka.end(self._partition))
        return end is not None and end <= self._position

    def _answer(self, ask: Callable[[], int]) -> int | None:
        try:
            answer = ask()
        except KafkaException as error:
            if time.monotonic() - self._heard > LOST_SECONDS:
                raise RunError(
                    "table.servers",
                    f"did not answer for {LOST_SECONDS:.0f} s ({name_of(error)})",
                    "check the broker; the run goes on where it stopped",
                ) from None
            return None
        self._heard = time.monotonic()
        return answer

    def close(self) -> None:
        """Let the connection go."""
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None


READERS = ReaderPool[Reader]()
