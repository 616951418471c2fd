"""The topic of a sink: its description, writing with acknowledgements, reading."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from apache_beam.utils.retry import with_exponential_backoff

from dpstream.accounting.limits import SINK_SECONDS
from dpstream.pipelines.connectors.kafka.client import (
    PRODUCERS_OWN,
    answer,
    check_deadlines,
    connect,
    failed,
    has_no_leader,
    library,
    looked_up,
    make_client,
    passes,
    refuse,
)

#: What a guarantee rests on; options may not change it.
FIXED = {
    *("bootstrap.servers", "metadata.broker.list", "enable.idempotence", "acks"),
    *("request.required.acks", "transactional.id", "enable.gapless.guarantee"),
    *("enable.auto.commit", "enable.partition.eof", "auto.offset.reset", "isolation.level"),
    "allow.auto.create.topics",  # a topic that was deleted must not come back with other settings
    *("debug", "plugin.library.paths"),  # would let the client print or load something
}
#: Messages taken from the client at once.
_CHUNK = 10_000
#: Looking at the topic when a run begins: nothing is lost by giving up early.
LOOK_SECONDS = 30.0


class TopicDescription(NamedTuple):
    """The description of a topic.

    Attributes:
        partitions: how many it has.
        policies: words of its ``cleanup.policy``.
        replicas: copies of each message.
        in_sync: how many of them must be there when one is acknowledged.
    """

    partitions: int
    policies: set[str]
    replicas: int
    in_sync: int


class KafkaTopic:
    """A topic.

    Args:
        servers: ``bootstrap.servers``.
        topic: name of the topic.
        options: further settings of the client; values ``env:NAME`` are read where it is used.
    """

    def __init__(self, servers: str, topic: str, options: Mapping[str, str]) -> None:
        self.servers, self.topic, self.options = servers, topic, dict(options)
        self._producer: Any = None
        self._follower: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_producer": None, "_follower": None}

    def _client(self, kind: str, **settings: Any) -> Any:
        given = looked_up("sink", self.options)
        check_deadlines(given)
        if kind != "producer":
            given = {name: v for name, v in given.items() if name not in PRODUCERS_OWN}
        ours = {"log_level": 0, "allow.auto.create.topics": False, **settings}
        return make_client(kind, {"bootstrap.servers": self.servers, **ours, **given})

    def describe(self, seconds: float = LOOK_SECONDS) -> TopicDescription:
        """Return the topic's description; the request never creates it.

        Args:
            seconds: how long the broker may be away.

        Raises:
            RunError: there is none, or the broker cannot be reached.
        """
        kafka, admin = library(), self._client("admin")
        if seconds <= LOOK_SECONDS:  # while a run goes on it waits longer for an answer
            connect(admin, "sink")
        try:
            request = kafka.TopicCollection([self.topic])
            topics = admin.describe_topics(request, request_timeout=seconds)
            partitions = answer(topics[self.topic], seconds).partitions
            resource = kafka.admin.ConfigResource(kafka.admin.ConfigResource.Type.TOPIC, self.topic)
            request = admin.describe_configs([resource], request_timeout=seconds)
            config = answer(request[resource], seconds)
        except kafka.KafkaException as error:
            refuse(error.args[0], "cannot be described")
        policies = {part.strip() for part in config["cleanup.policy"].value.split(",")}
        replicas = max(len(partition.replicas) for partition in partitions)
        return TopicDescription(
            len(partitions), policies, replicas, int(config["min.insync.replicas"].value)
        )

    def written(self) -> bool:
        """Return whether anything was ever written to it, also if it is gone by now."""
        kafka, partitions = library(), self.describe().partitions
        admin = self._client("admin")  # held: without its client an answer never comes
        latest = kafka.admin.OffsetSpec.latest()
        specs = {kafka.TopicPartition(self.topic, n): latest for n in range(partitions)}

        @with_exponential_backoff(7, 0.1, retry_filter=has_no_leader, logger=lambda *_: None)
        def ends() -> list[int]:
            futures = admin.list_offsets(
                specs,
                isolation_level=kafka.IsolationLevel.READ_UNCOMMITTED,
                request_timeout=LOOK_SECONDS,
            )
            return [answer(end, LOOK_SECONDS).offset for end in futures.values()]

        try:
            return any(end > 0 for end in ends())
        except kafka.KafkaException as error:
            refuse(error.args[0], "cannot be read")

    def read(
        self, partitions: Sequence[int], seconds: float = LOOK_SECONDS
    ) -> Iterator[tuple[str, bytes]]:
        """Yield (key, value) of every message of some partitions, in the order of offsets in each.

        It ends at the end that each partition has when it is reached.

        Args:
            seconds: how long the broker may be away.
        """
        consumer = self._consumer()
        try:
            places = [self._place(consumer, number)[0] for number in partitions]
            for message in self._messages(consumer, places, seconds):
                yield _text(message.key()), message.value() or b""
        finally:
            consumer.close()

    def follow(
        self, partition: int, since: int, seconds: float
    ) -> Iterator[tuple[int, str, bytes]]:
        """Yield (offset, key, value) of a partition's messages from an offset on, to its end.

        Its client is kept, so that asking whether there is more takes the broker one answer.

        Args:
            since: the offset after the last one that was read; 0: from the beginning.
            seconds: how long the broker may be away.

        Raises:
            PolicyError: the partition does not reach to there any more.
        """
        if self._follower is None:
            self._follower = self._consumer()
        consumer = self._follower
        place, end = self._place(consumer, partition, since)
        if end is not None and end < since:
            raise failed("_AUTO_OFFSET_RESET", "")
        if end == since:
            return
        try:
            for message in self._messages(consumer, [place], seconds):
                yield message.offset(), _text(message.key()), message.value() or b""
        finally:
            consumer.unassign()  # or it would go on asking for more

    def _place(self, consumer: Any, partition: int, since: int = 0) -> tuple[Any, int | None]:
        """Where to read a partition from, and its end, if the broker answers at once.

        Asked for: where the client finds the beginning by itself it takes half a second.
        """
        kafka = library()
        where = kafka.TopicPartition(self.topic, partition)
        try:
            low, end = consumer.get_watermark_offsets(where, timeout=1.0, cached=False)
        except kafka.KafkaException:  # away, or not yet its leader: the client asks again itself
            low, end = kafka.OFFSET_BEGINNING, None
        return kafka.TopicPartition(self.topic, partition, max(low, since) if since else low), end

    def _messages(self, consumer: Any, places: Sequence[Any], seconds: float) -> Iterator[Any]:
        """Every message from some places on, to the end that each partition has when it is
        reached."""
        consumer.assign(places)
        left = {place.partition for place in places}
        while left:
            for message in self._next_batch(consumer, seconds):
                if message.error() is None:
                    yield message
                else:  # nothing but the end comes this far
                    left.discard(message.partition())

    def _next_batch(self, consumer: Any, seconds: float) -> list[Any]:
        """The next messages and ends of partitions; the client reconnects by itself meanwhile."""
        at_end = library().KafkaError._PARTITION_EOF
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            messages = []
            for message in consumer.consume(_CHUNK, timeout=0.05):
                error = message.error()
                if error is None or error.code() == at_end:
                    messages.append(message)
                elif not passes(error):
                    refuse(error, "cannot be read")
            if messages:
                return messages
        raise failed("_TIMED_OUT", "cannot be read")

    def _consumer(self) -> Any:
        return self._client(
            "consumer",
            **{
                "group.id": "dpstream-sink",  # asked for by the client; nothing is committed to it
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "auto.offset.reset": "error",
                "fetch.wait.max.ms": 50,  # what the broker waits at the end before it says so
                "fetch.queue.backoff.ms": 20,
            },
        )

    def send(self, messages: Sequence[tuple[str, bytes, int]]) -> None:
        """Write (key, value, partition) and wait until the broker has acknowledged all.

        Raises:
            RunError: it has not, for ten minutes; some may be written.
        """
        kafka = library()
        if self._producer is None:
            self._producer = self._client(
                "producer",
                **{
                    "enable.idempotence": True,
                    "acks": "all",
                    "compression.type": "zstd",
                    "linger.ms": 5,
                    "message.timeout.ms": int(1000 * SINK_SECONDS),
                },
            )
        untaken: list[Any] = []

        def note_error(error: Any, _: Any) -> None:
            if error is not None:
                untaken.append(error)

        try:
            for key, value, partition in messages:
                self._queue(key, value, partition, note_error)
            # Each message ends by itself, by an acknowledgement or by its own deadline.
            while self._producer.flush(1.0):
                pass
        except kafka.KafkaException as error:
            untaken.append(error.args[0])
        if untaken:
            self.close()  # a producer that gave up may refuse what comes after
            refuse(untaken[0], "did not take a release")

    def _queue(self, key: str, value: bytes, partition: int, callback: Any) -> None:
        """Hand a message to the client; where its queue is full, wait until some are through.

        One by one: the client's ``produce_batch`` takes no partition by message, and is slower.
        """
        while True:
            try:
                self._producer.produce(self.topic, value, key, partition, callback)
                return
            except BufferError:
                self._producer.poll(0.1)

    def close(self) -> None:
        """Close the clients; undelivered messages of the producer are dropped."""
        producer, self._producer = self._producer, None
        follower, self._follower = self._follower, None
        if follower is not None:
            follower.close()
        if producer is not None:
            producer.purge()
            producer.flush(1.0)


def _text(key: bytes | None) -> str:
    return (key or b"").decode("ascii", "replace")
