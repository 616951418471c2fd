"""The topic of a source: the requests to its broker at the start and while it is read."""

import functools
from collections.abc import Iterable
from typing import Any

import msgspec
from confluent_kafka import Consumer, IsolationLevel, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, OffsetSpec

from dpstream.accounting.errors import DpstreamError, RunError, UsageError
from dpstream.pipelines.connectors.kafka.client import (
    CONSUMERS_OWN,
    answer,
    check_options,
    looked_up,
    make_client,
    name_of,
)
from dpstream.pipelines.project.job_parts import SourceConfig

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


class Kafka(msgspec.Struct, frozen=True):
    """A topic and its addresses; public.

    Attributes:
        servers: ``host:port,host:port``.
        topic: its name.
        options: settings of librdkafka; a value ``env:NAME`` is looked up where it is used.
    """

    servers: str
    topic: str
    options: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, source: SourceConfig) -> "Kafka":
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
    if "compact" in _properties_of(config.get("cleanup.policy", "")):
        raise UsageError(
            "table.topic",
            "has cleanup.policy=compact, so that a message removes earlier ones with its key",
            f"{alter} cleanup.policy=delete",
        )


def _properties_of(text: str) -> Iterable[str]:
    return map(str.strip, text.split(","))
