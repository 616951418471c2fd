"""A real Apache Kafka broker (KRaft mode, one node), started and stopped by the tests.

Its jars are looked for in KAFKA_JARS, then in ``.tools/kafka`` (``make kafka``).  With CI=true a
missing part fails the tests; elsewhere they are skipped, loudly.
"""

import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from tests import guarded
from tests.emulator import free_port

_HEAP = ("-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")
_START_SECONDS = 300.0
#: Seconds that a broker may take for what was asked of it, on a busy machine.
_PATIENCE = 120.0
_numbers = itertools.count(1)


def jars() -> Path | None:
    """The folder of the broker's jars, if there is one."""
    named = os.environ.get("KAFKA_JARS")
    folder = Path(named) if named else Path(__file__).parents[1] / ".tools" / "kafka"
    return folder if any(folder.glob("kafka_2*.jar")) else None


def missing(text: str) -> None:
    """No broker or no client: a failure where it must be there, a loud skip elsewhere."""
    if os.environ.get("CI") == "true":
        pytest.fail(text)
    warnings.warn(pytest.PytestWarning(text), stacklevel=2)
    pytest.skip(text)


class Broker:
    """A broker on a folder of its own; it can be stopped and started again on the same data."""

    def __init__(self, folder: Path, more: str = "") -> None:
        self.folder, self._more = folder, more
        self.port, self._controller = free_port(), free_port()
        self.servers = f"127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None
        self._producer: Any = None

    def __enter__(self) -> "Broker":
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "server.properties").write_text(self._settings())
        format_it = ("format", "-t", "dpstreamdpstreamdpstrQ", "-c", self._config)
        subprocess.run(self._java("kafka.tools.StorageTool", *format_it), check=True,
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    @property
    def _config(self) -> str:
        return str(self.folder / "server.properties")

    def _settings(self) -> str:
        return "\n".join(
            [
                "process.roles=broker,controller",
                "node.id=1",
                f"controller.quorum.voters=1@127.0.0.1:{self._controller}",
                f"listeners=PLAINTEXT://{self.servers},CONTROLLER://127.0.0.1:{self._controller}",
                "controller.listener.names=CONTROLLER",
                f"log.dirs={self.folder / 'data'}",
                "auto.create.topics.enable=false",
                "authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer",
                "allow.everyone.if.no.acl.found=true",
                "offsets.topic.replication.factor=1",
                "offsets.topic.num.partitions=1",
                "transaction.state.log.replication.factor=1",
                "transaction.state.log.num.partitions=1",
                "transaction.state.log.min.isr=1",
                "group.initial.rebalance.delay.ms=0",
                "broker.session.timeout.ms=1500",
                "broker.heartbeat.interval.ms=300",
                "log.segment.delete.delay.ms=100",
                "log.retention.check.interval.ms=500",
                "log.initial.task.delay.ms=100",
                self._more,
            ]
        )

    def _java(self, main: str, *arguments: str) -> list[str]:
        folder = jars()
        java = shutil.which("java")
        if folder is None or java is None:
            missing("Kafka's broker is missing (`make kafka`, and a Java of 11 or later)")
        return [str(java), *_HEAP, "-cp", f"{folder}/*", main, *arguments]

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self._producer = None
        from confluent_kafka import KafkaException

        with (self.folder / "stderr").open("wb") as log:
            self._process = guarded.start(
                self._java("kafka.Kafka", self._config), stdout=subprocess.DEVNULL, stderr=log
            )
        admin = self.admin()
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end and self._process.poll() is None:
            with suppress(KafkaException):
                if admin.list_topics(timeout=0.5).brokers:
                    return
            time.sleep(0.1)
        raise RuntimeError((self.folder / "stderr").read_text()[-2000:])

    def stop(self) -> None:
        """Shut down in order."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(_PATIENCE)

    def kill(self) -> None:
        """End it at once, as a lost machine would."""
        if self._process is not None:
            guarded.kill(self._process)

    def topic(self, partitions: int = 1, **config: str) -> str:
        """A new topic with the broker's stamps; ``config`` are settings (``_`` for dots)."""
        name = f"t{os.getpid()}-{next(_numbers)}"
        given = {"message.timestamp.type": "LogAppendTime"}
        given |= {key.replace("_", "."): value for key, value in config.items()}
        self.create(name, partitions, given)
        return name

    def create(self, name: str, partitions: int, config: dict[str, str]) -> None:
        """A topic of that name, and wait until clients are told of it."""
        from confluent_kafka.admin import NewTopic

        self.admin_do("create_topics", [NewTopic(name, partitions, 1, config=config)])
        self._await_metadata(name, partitions)

    def recreate(self, name: str, partitions: int, config: dict[str, str]) -> None:
        """Delete a topic and make it again under its name, once the broker has let it go."""
        from confluent_kafka import KafkaError, KafkaException

        self._producer = None  # it counts the messages of the old one
        self.admin_do("delete_topics", [name])
        end = time.monotonic() + _PATIENCE
        while True:
            try:
                self.create(name, partitions, config)
                return
            except KafkaException as error:
                exists = error.args[0].code() == KafkaError.TOPIC_ALREADY_EXISTS
                if not exists or time.monotonic() > end:
                    raise
            time.sleep(0.05)

    def grow(self, topic: str, partitions: int) -> None:
        """Give a topic more partitions, and wait until clients are told of them."""
        from confluent_kafka.admin import NewPartitions

        self._producer = None  # it knows of fewer
        self.admin_do("create_partitions", [NewPartitions(topic, partitions)])
        self._await_metadata(topic, partitions)

    def _await_metadata(self, topic: str, partitions: int) -> None:
        """Wait until the broker names a topic with that many partitions."""
        end, admin = time.monotonic() + _PATIENCE, self.admin()
        while len(admin.list_topics(topic, timeout=30).topics[topic].partitions) < partitions:
            assert time.monotonic() < end, "no partitions in time"
            time.sleep(0.05)

    def set(self, topic: str, name: str, value: str) -> None:
        """Change a setting of a topic."""
        from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource

        entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=[entry])
        self.admin_do("incremental_alter_configs", [resource])

    def deny_reading(self, topic: str) -> None:
        """Everybody may still ask about the topic."""
        from confluent_kafka.admin import (
            AclBinding,
            AclOperation,
            AclPermissionType,
            ResourcePatternType,
            ResourceType,
        )

        for operation, permission in (("READ", "DENY"), ("DESCRIBE", "ALLOW")):
            rule = AclBinding(
                ResourceType.TOPIC, topic, ResourcePatternType.LITERAL, "User:ANONYMOUS", "*",
                AclOperation[operation], AclPermissionType[permission],
            )  # fmt: skip
            self.admin_do("create_acls", [rule])

    def admin_do(self, method: str, what: list[Any]) -> None:
        """An admin call for each of ``what``, and its end."""
        from confluent_kafka import KafkaError, KafkaException

        end = time.monotonic() + _PATIENCE
        while True:
            admin = self.admin()  # an answer is lost with its client
            try:
                for answer in getattr(admin, method)(what, request_timeout=10).values():
                    answer.result(_PATIENCE)
                return
            except KafkaException as error:
                # A client that is told of a broker before its controller never sends the call.
                sent = "waiting for controller" not in error.args[0].str()
                late = error.args[0].code() != KafkaError._TIMED_OUT or time.monotonic() > end
                if sent or late:
                    raise

    def produce(self, topic: str, values: Iterable[Any], partition: int = 0) -> list[int]:
        """Append messages (bytes, ``None``, or something to write as JSON); their offsets."""
        offsets: list[int] = []

        def delivered(error: Any, message: Any) -> None:
            assert error is None, error
            offsets.append(message.offset())

        # Sent again after a slow answer, messages would else come twice, or in another order.
        # Its number is asked for once: a new client for each call would take most of the time.
        if self._producer is None:
            self._producer = self.producer(enable_idempotence=True)
        producer = self._producer
        for value in values:
            producer.produce(topic, raw(value), partition=partition, on_delivery=delivered)
            if producer.poll(0) == 0 and len(producer) > 50_000:
                producer.flush(_PATIENCE)
        assert producer.flush(_PATIENCE) == 0
        return offsets

    def producer(self, **settings: Any) -> Any:
        """A client that appends (``_`` for dots in the names of settings)."""
        from confluent_kafka import Producer

        ours = {"bootstrap.servers": self.servers, "linger.ms": 5, "log_level": 0}
        ours |= {"message.max.bytes": 8 << 20}
        return Producer(ours | {name.replace("_", "."): v for name, v in settings.items()})

    def admin(self) -> Any:
        """A client that manages topics."""
        from confluent_kafka.admin import AdminClient

        return AdminClient({"bootstrap.servers": self.servers, "log_level": 0})


def raw(value: Any) -> bytes | None:
    """A message's payload: bytes and ``None`` as they are, anything else as JSON."""
    return value if value is None or isinstance(value, bytes) else json.dumps(value).encode()


@contextmanager
def running(folder: Path, more: str = "") -> Iterator[Broker]:
    """A running broker; ``more``: further lines of its settings."""
    if importlib.util.find_spec("confluent_kafka") is None:
        missing("Kafka's client is missing (pip install 'dpstream[kafka]')")
    with Broker(folder, more) as broker:
        yield broker
