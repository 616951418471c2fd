"""A real Apache Kafka broker (KRaft mode, one node), started and stopped by the tests.

Its jars are looked for in KAFKA_JARS, then in ``.tools/kafka`` (``make kafka``).  With CI=true a
missing part fails the tests; elsewhere they are skipped, loudly.
"""

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

from tests.emulator import free_port

_HEAP = ("-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")
_START_SECONDS = 60.0
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

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port, self._controller = free_port(), free_port()
        self.servers = f"127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

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
                "offsets.topic.replication.factor=1",
                "offsets.topic.num.partitions=1",
                "transaction.state.log.replication.factor=1",
                "transaction.state.log.num.partitions=1",
                "transaction.state.log.min.isr=1",
                "group.initial.rebalance.delay.ms=0",
                "log.segment.delete.delay.ms=100",
                "log.retention.check.interval.ms=500",
                "log.initial.task.delay.ms=100",
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
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient

        with (self.folder / "stderr").open("wb") as told:
            self._process = subprocess.Popen(
                self._java("kafka.Kafka", self._config), stdout=subprocess.DEVNULL, stderr=told
            )
        admin = AdminClient({"bootstrap.servers": self.servers, "log_level": 0})
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
            self._process.wait(60)

    def kill(self) -> None:
        """End it at once, as a lost machine would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def topic(self, partitions: int = 1, **config: str) -> str:
        """A new topic; stamps are the broker's unless ``config`` says otherwise (``_`` for dots)."""
        from confluent_kafka.admin import AdminClient, NewTopic

        name = f"t{os.getpid()}-{next(_numbers)}"
        given = {"message.timestamp.type": "LogAppendTime"}
        given |= {key.replace("_", "."): value for key, value in config.items()}
        admin = AdminClient({"bootstrap.servers": self.servers})
        topic = NewTopic(name, partitions, 1, config=given)
        admin.create_topics([topic])[name].result(30)
        return name

    def produce(self, topic: str, values: Iterable[Any], partition: int = 0) -> list[int]:
        """Append messages (bytes, ``None``, or something to write as JSON); their offsets."""
        from confluent_kafka import Producer

        offsets: list[int] = []

        def told(error: Any, message: Any) -> None:
            assert error is None, error
            offsets.append(message.offset())

        producer = Producer({"bootstrap.servers": self.servers, "linger.ms": 5, "log_level": 0})
        for value in values:
            raw = value if value is None or isinstance(value, bytes) else json.dumps(value).encode()
            while True:
                try:
                    producer.produce(topic, raw, partition=partition, on_delivery=told)
                    break
                except BufferError:
                    producer.poll(0.1)
        assert producer.flush(60) == 0
        return offsets


@contextmanager
def running(folder: Path) -> Iterator[Broker]:
    """A running broker."""
    pytest.importorskip("confluent_kafka") if os.environ.get("CI") != "true" else None
    with Broker(folder) as broker:
        yield broker
