"""Kafka's client library as sources and sinks use it: options, answers, errors, a sink's topic.

``options`` of a job are settings of librdkafka, secrets by reference.  A literal secret would stand
in the project file and be shipped to the workers with the pipeline, so settings that hold one
must name an environment variable: ``env:NAME``.  Settings that make the client load code, run a
command, or open files other than certificates are refused: whoever may write a job's options must
not get more than the job.

librdkafka connects, retries and backs off by itself; nothing is tried again here but what it leaves
to its user (`has_no_leader`).  Its log is switched off, and errors name its codes only: what it
says about an error may quote addresses, settings or what was sent.

`KafkaTopic` is the topic of a sink: described, written with acknowledgements, and read.
"""

import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from apache_beam.utils.retry import with_exponential_backoff

from dpstream.accounting.errors import DpstreamError, PolicyError, RunError, UsageError
from dpstream.accounting.extras import require
from dpstream.accounting.limits import SINK_SECONDS
from dpstream.state.connecting import CONNECT_SECONDS, connecting

_ENV = "env:"
#: What the names of librdkafka's settings with secrets end in.
_SECRET = ("password", "passphrase", "secret", ".pem", "oauthbearer.config")
#: Files that a client may read.
CERTIFICATES = frozenset(
    f"{name}.location"
    for name in ("ssl.key", "ssl.certificate", "ssl.ca", "ssl.crl", "ssl.keystore", "https.ca")
)
#: Others that name files, and plugins, engines and providers, which are code.  Functions cannot be
#: given as text: the client refuses them.
_REACHING = re.compile(
    r".*\.(location|file|path|paths|cmd)|plugin\..*|ssl\.engine\..*|ssl\.providers"
    r"|offset\.store\.method"
)
#: Kerberos: the client runs ``kinit`` in a shell, with some of these settings in its line.
_KERBEROS = "sasl.kerberos."
_MECHANISMS = ("sasl.mechanism", "sasl.mechanisms")


def check_options(table: str, options: Mapping[str, str], ours: Iterable[str]) -> None:
    """Refuse settings that a guarantee rests on, and secrets that are written out.

    Args:
        table: ``source`` or ``sink``, for the message.
        options: of the job.
        ours: names that dpstream sets.

    Raises:
        UsageError: names the option.
    """
    fixed = set(ours)
    for name, value in options.items():
        if name in fixed or name.startswith("log"):
            raise UsageError(f"{table}.options.{name}", "is set by dpstream", "remove it")
        if name not in CERTIFICATES and (name.startswith(_KERBEROS) or _REACHING.fullmatch(name)):
            raise UsageError(
                f"{table}.options.{name}",
                "would load code, run a command or open files of this machine",
                "remove it; certificates go into ssl.*.location",
            )
        if name.endswith(_SECRET) and not value.startswith(_ENV):
            raise UsageError(
                f"{table}.options.{name}",
                "is a secret, and a literal would travel with the pipeline",
                "write env:NAME and set that variable on the launcher and on every worker",
            )
    _refuse_kerberos(table, options)


def looked_up(table: str, options: Mapping[str, str]) -> dict[str, str]:
    """Return the settings with their secrets: never to be shown.

    Raises:
        UsageError: a variable is not set here.
    """
    settings = {}
    for name, value in options.items():
        variable = value.removeprefix(_ENV)
        if variable != value and variable not in os.environ:
            raise UsageError(
                f"{table}.options.{name}",
                "names an environment variable that is not set",
                "set it on the launcher and on every worker",
            )
        settings[name] = os.environ[variable] if variable != value else value
    _refuse_kerberos(table, settings)
    return settings


def _refuse_kerberos(table: str, options: Mapping[str, str]) -> None:
    """Refuse the mechanism that runs a command; it is what the client takes if none is named."""
    protocol = options.get("security.protocol", "").upper()
    named = [name for name in _MECHANISMS if name in options]
    defaulted = protocol.startswith("SASL") and not named
    if defaulted or any(options[name].upper() == "GSSAPI" for name in named):
        raise UsageError(
            f"{table}.options.sasl.mechanism",
            "must be named, and not GSSAPI, which runs a command",
            "use PLAIN, SCRAM-SHA-256, SCRAM-SHA-512 or OAUTHBEARER",
        )


#: Settings of producers, and of consumers, that would make a client of another kind warn.
PRODUCERS_OWN = {
    *("message.timeout.ms", "delivery.timeout.ms", "linger.ms", "compression.type"),
    *("batch.size", "batch.num.messages", "queue.buffering.max.messages"),
    *("queue.buffering.max.kbytes", "message.max.bytes", "retry.backoff.ms"),
}
CONSUMERS_OWN = {
    *("isolation.level", "enable.auto.commit", "enable.auto.offset.store", "auto.offset.reset"),
    *("enable.partition.eof", "group.id", "queued.max.messages.kbytes"),
    *("max.partition.fetch.bytes", "fetch.wait.max.ms", "fetch.queue.backoff.ms"),
}
_GRACE_SECONDS = 5.0


def library(field: str = "sink.kind") -> Any:
    """Return the client library, loaded where it is used.

    Raises:
        UsageError: it is not installed.
    """
    require("kafka", field)
    import confluent_kafka
    import confluent_kafka.admin

    return confluent_kafka


#: What is said of options that the client does not take: field, rule, fix.
REFUSED = ("sink.options", "are refused by Kafka's client", "correct their names and values")


def make_client(
    kind: str, settings: Mapping[str, Any], refused: tuple[str, str, str] = REFUSED
) -> Any:
    """Return a client of the library's.

    Args:
        kind: ``admin``, ``producer`` or ``consumer``.
        settings: settings in which references to secrets are replaced.
        refused: what is said of settings that the client does not take.

    Raises:
        UsageError: the library is not installed, or refuses a setting.
    """
    kafka = library()
    make = {
        "admin": kafka.admin.AdminClient,
        "producer": kafka.Producer,
        "consumer": kafka.Consumer,
    }[kind]
    try:
        return make(dict(settings))
    except (kafka.KafkaException, ValueError, TypeError, AttributeError):
        raise UsageError(*refused) from None


def answer(future: Any, seconds: float) -> Any:
    """Return the client's result; ``seconds`` and a grace only limit a client that hangs."""
    try:
        return future.result(seconds + _GRACE_SECONDS)
    except TimeoutError:
        kafka = library()
        raise kafka.KafkaException(kafka.KafkaError(kafka.KafkaError._TIMED_OUT)) from None


def connect(admin: Any, where: str) -> None:
    """Wait briefly for any broker to answer, before any other request.

    Args:
        admin: the client; where: ``source`` or ``sink``.

    Raises:
        RunError: none answered within `CONNECT_SECONDS`.
    """
    kafka = library()
    try:
        with connecting("Kafka"):
            admin.list_topics(timeout=CONNECT_SECONDS)
    except kafka.KafkaException as error:
        raise RunError(
            f"{where}.servers",
            f"no Kafka broker answered within {CONNECT_SECONDS:.0f} s ({name_of(error)})",
            f"check the addresses in {where}.servers, that a broker runs there and that this "
            f"machine reaches its port, and the security settings in {where}.options",
        ) from None


def name_of(error: Any) -> str:
    """Return the public name of a client's error, or of what its exception carries; never its
    text.
    """
    for candidate in (error, *getattr(error, "args", ())[:1]):
        if callable(name := getattr(candidate, "name", None)):
            return str(name())
    return type(error).__name__


def passes(error: Any) -> bool:
    """Return whether the client itself retries a request that failed with this error."""
    codes = library().KafkaError
    passing = (codes._ALL_BROKERS_DOWN, codes._TRANSPORT, codes._RESOLVE)
    return bool(error.retriable()) or error.code() in passing


def has_no_leader(error: Exception) -> bool:
    """Return whether a partition has no known leader, which the client does not retry.

    A topic was just made, or a broker has not heard of its newest leader.
    """
    return name_of(error) in (
        "NOT_LEADER_FOR_PARTITION",
        "LEADER_NOT_AVAILABLE",
        "UNKNOWN_LEADER_EPOCH",
        "FENCED_LEADER_EPOCH",
    )


#: How long a message may wait; the client takes 0 for ever.
_DEADLINES = ("message.timeout.ms", "delivery.timeout.ms")


def patience(options: Mapping[str, str]) -> float:
    """Return the seconds that the broker may be away while releases are written."""
    given = looked_up("sink", options)
    check_deadlines(given)
    return min([SINK_SECONDS, *(int(given[name]) / 1000 for name in _DEADLINES if name in given)])


def check_deadlines(given: Mapping[str, str]) -> None:
    """Refuse what is no time that a message may wait.

    Raises:
        UsageError: names the option.
    """
    for name in _DEADLINES:
        if name in given and not re.fullmatch("[1-9][0-9]{0,9}", given[name]):
            raise UsageError(
                f"sink.options.{name}", "is no deadline", "write milliseconds, at least 1"
            )


def refuse(error: Any, rule: str) -> NoReturn:
    """Raise what a person can do about a client's error."""
    raise failed(name_of(error), rule) from None


def failed(name: str, rule: str) -> DpstreamError:
    """Return the error for one of the client's error codes."""
    if name in ("UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC"):
        return RunError(
            "sink.topic",
            "is not there",
            "make it: kafka-topics --create --topic NAME --config cleanup.policy=compact",
        )
    if name == "_AUTO_OFFSET_RESET":
        return PolicyError(
            "sink.topic",
            "lacks messages that it has acknowledged: it was made again, or lost them",
            "publish to a new topic: name it, and write the store's releases to it with"
            " `dpstream state releases JOB`",
        )
    return RunError(
        "sink.topic",
        f"{rule}: {name}",
        "check the broker and sink.options, then run again: the store has every release",
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


#: Key, value and partition of a message, and its headers, if it has some.
Message = tuple[str, bytes, int] | tuple[str, bytes, int, Sequence[tuple[str, bytes]]]


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
        not_served = {place.partition for place in places}
        while not_served:
            for message in self._next_batch(consumer, seconds):
                if message.error() is None:
                    yield message
                else:  # nothing but the end comes this far
                    not_served.discard(message.partition())

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

    def send(self, messages: Sequence[Message]) -> None:
        """Write messages, and wait until the broker has acknowledged all.

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
            for message in messages:
                self._queue(message, note_error)
            # Each message ends by itself, by an acknowledgement or by its own deadline.
            while self._producer.flush(1.0):
                pass
        except kafka.KafkaException as error:
            untaken.append(error.args[0])
        if untaken:
            self.close()  # a producer that gave up may refuse what comes after
            refuse(untaken[0], "did not take a release")

    def _queue(self, message: Message, callback: Any) -> None:
        """Hand a message to the client; where its queue is full, wait until some are through.

        One by one: the client's ``produce_batch`` takes no partition by message, and is slower.
        """
        key, value, partition = message[:3]
        own = {"on_delivery": callback, "headers": list(message[3]) if len(message) > 3 else []}
        while True:
            try:
                self._producer.produce(self.topic, value, key, partition, **own)
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
