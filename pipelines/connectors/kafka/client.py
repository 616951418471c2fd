"""Kafka's client library as sources and sinks use it: options, making clients, answers, errors.

``options`` of a job are settings of librdkafka, secrets by reference.  A literal secret would stand
in the project file and be shipped to the workers with the pipeline, so settings that hold one
must name an environment variable: ``env:NAME``.  Settings that make the client load code, run a
command, or open files other than certificates are refused: whoever may write a job's options must
not get more than the job.

librdkafka connects, retries and backs off by itself; nothing is tried again here but what it leaves
to its user (`has_no_leader`).  Its log is switched off, and errors name its codes only: what it
says about an error may quote addresses, settings or what was sent.
"""

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

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
