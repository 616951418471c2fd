"""Kafka's client library as the sink uses it: making clients, waiting for answers, naming errors.

Errors name its error codes only: its messages could quote what was sent.
"""

import re
from collections.abc import Mapping
from typing import Any, NoReturn

from dpstream.accounting.errors import DpstreamError, PolicyError, RunError, UsageError
from dpstream.accounting.limits import SINK_SECONDS
from dpstream.pipelines.connectors.kafka.options import looked_up

#: What a guarantee rests on; options may not change it.
FIXED = {
    *("bootstrap.servers", "metadata.broker.list", "enable.idempotence", "acks"),
    *("request.required.acks", "transactional.id", "enable.gapless.guarantee"),
    *("enable.auto.commit", "enable.partition.eof", "auto.offset.reset", "isolation.level"),
    "allow.auto.create.topics",  # a topic that was deleted must not come back with other settings
    *("debug", "plugin.library.paths"),  # would let the client print or load something
}
#: Settings of a producer, which would make another client warn.
_PRODUCERS_OWN = {
    *("message.timeout.ms", "delivery.timeout.ms", "linger.ms", "compression.type"),
    *("batch.size", "batch.num.messages", "queue.buffering.max.messages"),
    *("queue.buffering.max.kbytes", "message.max.bytes", "retry.backoff.ms"),
}
#: How long a message may wait; the client takes 0 for ever.
_DEADLINES = ("message.timeout.ms", "delivery.timeout.ms")


def library() -> Any:
    """The client library, loaded where it is used.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import confluent_kafka
        import confluent_kafka.admin
    except ImportError:
        raise UsageError(
            "sink.kind", "needs Kafka's client", "pip install 'dpstream[kafka]'"
        ) from None
    return confluent_kafka


def patience(options: Mapping[str, str]) -> float:
    """Seconds that the broker may be away while releases are written."""
    given = looked_up("sink", options)
    _check_deadlines(given)
    return min([SINK_SECONDS, *(int(given[name]) / 1000 for name in _DEADLINES if name in given)])


def _check_deadlines(given: Mapping[str, str]) -> None:
    for name in _DEADLINES:
        if name in given and not re.fullmatch("[1-9][0-9]{0,9}", given[name]):
            raise UsageError(
                f"sink.options.{name}", "is no deadline", "write milliseconds, at least 1"
            )


def client(kind: str, servers: str, options: Mapping[str, str], **settings: Any) -> Any:
    """A client of the library's: ``admin``, ``producer`` or ``consumer``.

    Args:
        options: of the job; values ``env:NAME`` are looked up here.
        settings: dpstream's own, of which options may change those that are not fixed.

    Raises:
        UsageError: the library is not installed, or refuses a setting.
    """
    kafka = library()
    make = {
        "admin": kafka.admin.AdminClient,
        "producer": kafka.Producer,
        "consumer": kafka.Consumer,
    }[kind]
    given = looked_up("sink", options)
    _check_deadlines(given)
    if kind != "producer":
        given = {name: v for name, v in given.items() if name not in _PRODUCERS_OWN}
    settings = {
        "bootstrap.servers": servers,
        "log_level": 0,
        "allow.auto.create.topics": False,
        **settings,
        **given,
    }
    try:
        return make(settings)
    except (kafka.KafkaException, ValueError, TypeError, AttributeError):
        raise UsageError(
            "sink.options", "are refused by Kafka's client", "correct their names and values"
        ) from None


def answer(asked: Any, seconds: float) -> Any:
    """What the client found; its own limit comes first, twice that is for a client that hangs."""
    try:
        return asked.result(2 * seconds)
    except TimeoutError:
        kafka = library()
        raise kafka.KafkaException(kafka.KafkaError(kafka.KafkaError._TIMED_OUT)) from None


def refuse(error: Any, what: str) -> NoReturn:
    """Raise what a person can do about a client's error."""
    name = error.name() if hasattr(error, "name") else type(error).__name__
    raise failed(name, what) from None


def failed(name: str, what: str) -> DpstreamError:
    """The error for one of the client's error codes."""
    if name in ("UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC"):
        return RunError(
            "sink.topic", "is not there",
            "make it: kafka-topics --create --topic NAME --config cleanup.policy=compact",
        )  # fmt: skip
    if name == "_AUTO_OFFSET_RESET":
        return PolicyError(
            "sink.topic",
            "lacks messages that it has acknowledged: it was made again, or lost them",
            "publish to a new topic: name it, and write the store's releases to it with"
            " `dpstream state releases JOB`",
        )
    return RunError(
        "sink.topic",
        f"{what}: {name}",
        "check the broker and sink.options, then run again: the store has every release",
    )
