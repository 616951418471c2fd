"""One Kafka topic through its client: what it is, writing to it with acknowledgements, reading it.

The client (librdkafka) keeps connections, batches, retries and their back-off; nothing is tried
again here.  Errors name its error codes only: its messages could quote what was sent.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from apache_beam.utils.retry import with_exponential_backoff

from accounting.errors import DpstreamError, RunError, UsageError
from accounting.limits import SINK_SECONDS
from pipelines.jobs.kafka_options import looked_up

#: What a guarantee rests on; options may not change it.
FIXED = {
    *("bootstrap.servers", "metadata.broker.list", "enable.idempotence", "acks"),
    *("request.required.acks", "transactional.id", "enable.gapless.guarantee"),
    *("enable.auto.commit", "enable.partition.eof", "auto.offset.reset", "isolation.level"),
    *("debug", "plugin.library.paths"),  # would let the client print or load something
}
#: Settings of a producer, which would make another client warn.
_PRODUCERS_OWN = {
    *("message.timeout.ms", "delivery.timeout.ms", "linger.ms", "compression.type"),
    *("batch.size", "batch.num.messages", "queue.buffering.max.messages"),
    *("queue.buffering.max.kbytes", "message.max.bytes", "retry.backoff.ms"),
}
#: Messages taken from the client at once.
_CHUNK = 10_000
#: Looking at the topic when a run begins: nothing is lost by giving up early.
LOOK_SECONDS = 30.0


class KafkaTopic:
    """A topic.

    Args:
        servers: ``bootstrap.servers``.
        topic: its name.
        options: further settings of the client; values ``env:NAME`` are read where it is used.
    """

    def __init__(self, servers: str, topic: str, options: Mapping[str, str]) -> None:
        self.servers, self.topic, self.options = servers, topic, dict(options)
        self._producer: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_producer": None}

    def _client(self, kind: str, **settings: Any) -> Any:
        """A client of the library's; its absence and its refusals become coded errors."""
        try:
            import confluent_kafka
            import confluent_kafka.admin
        except ImportError:
            raise UsageError(
                "sink.kind", "needs Kafka's client", "pip install 'dpstream[kafka]'"
            ) from None
        settings = {"bootstrap.servers": self.servers, "log_level": 0, **settings}
        make = {
            "admin": confluent_kafka.admin.AdminClient,
            "producer": confluent_kafka.Producer,
            "consumer": confluent_kafka.Consumer,
        }[kind]
        given = looked_up("sink", self.options)
        if kind != "producer":
            given = {name: v for name, v in given.items() if name not in _PRODUCERS_OWN}
        try:
            return make({**settings, **given})
        except confluent_kafka.KafkaException:
            raise UsageError(
                "sink.options", "are refused by Kafka's client", "correct their names and values"
            ) from None

    def describe(self, seconds: float = LOOK_SECONDS) -> tuple[int, set[str]]:
        """(partitions, cleanup policies) of the topic, which is never made by asking.

        Args:
            seconds: how long the broker may be away.

        Raises:
            RunError: there is none, or the broker cannot be reached.
        """
        from confluent_kafka import KafkaException, TopicCollection
        from confluent_kafka.admin import ConfigResource

        admin = self._client("admin")
        try:
            asked = TopicCollection([self.topic])
            topics = admin.describe_topics(asked, request_timeout=seconds)
            found = topics[self.topic].result(2 * seconds)
            resource = ConfigResource(ConfigResource.Type.TOPIC, self.topic)
            config = admin.describe_configs([resource], request_timeout=seconds)
            policy = config[resource].result(2 * seconds)["cleanup.policy"].value
        except KafkaException as error:
            _refuse(error.args[0], "cannot be described")
        return len(found.partitions), {part.strip() for part in policy.split(",")}

    def written(self) -> bool:
        """Whether anything was ever written to it, also if it is gone by now."""
        from confluent_kafka import IsolationLevel, KafkaException, TopicPartition
        from confluent_kafka.admin import OffsetSpec

        partitions, _ = self.describe()
        admin = self._client("admin")  # held: without its client an answer never comes
        asked = {TopicPartition(self.topic, n): OffsetSpec.latest() for n in range(partitions)}

        @with_exponential_backoff(7, 0.1, retry_filter=_has_no_leader, logger=lambda *_: None)
        def ends() -> list[int]:
            found = admin.list_offsets(
                asked,
                isolation_level=IsolationLevel.READ_UNCOMMITTED,
                request_timeout=LOOK_SECONDS,
            )
            return [end.result(2 * LOOK_SECONDS).offset for end in found.values()]

        try:
            return any(end > 0 for end in ends())
        except KafkaException as error:
            _refuse(error.args[0], "cannot be read")

    def read(
        self, partitions: Sequence[int], seconds: float = LOOK_SECONDS
    ) -> Iterator[tuple[str, bytes]]:
        """(key, value) of every message of some partitions, to the end that each has when it is
        reached; in the order of their offsets within a partition.

        Args:
            seconds: how long the broker may be away.
        """
        consumer = self._consumer()
        try:
            consumer.assign([self._first(consumer, number) for number in partitions])
            left = set(partitions)
            while left:
                batch = self._some(consumer, seconds)
                for message in batch:
                    if message.error() is None:
                        yield _text(message.key()), message.value() or b""
                    else:  # nothing but the end comes this far
                        left.discard(message.partition())
        finally:
            consumer.close()

    def _first(self, consumer: Any, partition: int) -> Any:
        """The beginning of a partition, asked for: otherwise the client takes half a second."""
        from confluent_kafka import OFFSET_BEGINNING, KafkaException, TopicPartition

        try:
            where = TopicPartition(self.topic, partition)
            first, _ = consumer.get_watermark_offsets(where, timeout=1.0, cached=False)
        except KafkaException:  # away, or not yet its leader: the client asks again by itself
            first = OFFSET_BEGINNING
        return TopicPartition(self.topic, partition, first)

    def _some(self, consumer: Any, seconds: float) -> list[Any]:
        """The next messages and ends of partitions; the client reconnects by itself meanwhile."""
        from confluent_kafka import KafkaError

        passing = (KafkaError._ALL_BROKERS_DOWN, KafkaError._TRANSPORT, KafkaError._RESOLVE)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            found = []
            for message in consumer.consume(_CHUNK, timeout=0.05):
                error = message.error()
                if error is None or error.code() == KafkaError._PARTITION_EOF:
                    found.append(message)
                elif not error.retriable() and error.code() not in passing:
                    _refuse(error, "cannot be read")
            if found:
                return found
        raise _failed("_TIMED_OUT", "cannot be read")

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
        from confluent_kafka import KafkaException

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
        failed: list[Any] = []

        def told(error: Any, _: Any) -> None:
            if error is not None:
                failed.append(error)

        try:
            for key, value, partition in messages:
                self._queue(key, value, partition, told)
            # Each message ends by itself, by an acknowledgement or by its own deadline.
            while self._producer.flush(1.0):
                pass
        except KafkaException as error:
            failed.append(error.args[0])
        if failed:
            self.close()  # a producer that gave up may refuse what comes after
            _refuse(failed[0], "did not take a release")

    def _queue(self, key: str, value: bytes, partition: int, told: Any) -> None:
        """Hand a message to the client; where its queue is full, wait until some are through.

        One by one: the client's ``produce_batch`` takes no partition by message, and is slower.
        """
        while True:
            try:
                self._producer.produce(self.topic, value, key, partition, told)
                return
            except BufferError:
                self._producer.poll(0.1)

    def close(self) -> None:
        """Let go of the producer; what it has not delivered is dropped."""
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.purge()
            producer.flush(1.0)


def _text(key: bytes | None) -> str:
    return (key or b"").decode("ascii", "replace")


def _has_no_leader(error: Exception) -> bool:
    """A topic that was just made has no leaders yet; the client does not ask again here."""
    name = getattr(error.args[0], "name", str)() if error.args else ""
    return name in ("NOT_LEADER_FOR_PARTITION", "LEADER_NOT_AVAILABLE")


def _refuse(error: Any, what: str) -> NoReturn:
    name = error.name() if hasattr(error, "name") else type(error).__name__
    raise _failed(name, what) from None


def _failed(name: str, what: str) -> DpstreamError:
    if name in ("UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC"):
        return RunError(
            "sink.topic", "is not there",
            "make it: kafka-topics --create --topic NAME --config cleanup.policy=compact",
        )  # fmt: skip
    return RunError(
        "sink.topic",
        f"{what}: {name}",
        "check the broker and sink.options, then run again: the store has every release",
    )
