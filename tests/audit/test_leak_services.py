"""Canaries around the clients of services: Kafka and Pub/Sub as sinks, runs that end and that fail.

The clients are native or log by themselves, so what the process itself writes is searched too.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from dpstream.pipelines.connectors.kafka.topic import KafkaTopic
from dpstream.pipelines.connectors.pubsub.sink import PubsubSink
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.state import open as stores
from tests import pubsub_emulator
from tests.audit.channels import leaks, observe
from tests.audit.leaks import KEY, UNIT, hits, make_job
from tests.kafka_broker import Broker

#: What goes wrong just before the first release is written (the manifest is sent before).
Fault = Callable[[Broker, str], Any]
FAULTS: dict[str, Fault] = {
    "nothing": lambda broker, topic: None,
    "topic gone": lambda broker, topic: broker.admin_do("delete_topics", [topic]),
    "broker gone": lambda broker, topic: broker.stop(),
}


@pytest.fixture(autouse=True)
def clean_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    yield
    stores.close_all()


def job_to(folder: Path, sink: str) -> Job:
    """The job with canaries, publishing elsewhere."""
    path = make_job(folder).path
    files = '{ kind = "parquet", path = "releases" }'
    text = path.read_text(encoding="utf-8")
    assert files in text
    path.write_text(text.replace(files, f"{{ {sink} }}"), encoding="utf-8")
    return load_job(path)


def before(nth: int, owner: Any, name: str, does: Callable[[], Any]) -> Any:
    """Something happens before a method is called for the nth time."""
    real, calls = getattr(owner, name), list[int]()

    def call(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == nth:
            does()
        return real(*args, **options)

    return mock.patch.object(owner, name, call)


def nowhere(job: Job, folder: Path, capfd: pytest.CaptureFixture[str], failed: bool) -> None:
    """A run of which no channel shows a canary."""
    channels = observe(job, folder / "tmp")
    assert bool(channels["exceptions"]) == failed
    assert leaks(channels) == set()
    assert hits("".join(capfd.readouterr())) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_kafka(
    kafka: Broker, tmp_path: Path, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, fault: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("NAME_OF_CLIENT", UNIT)  # a setting that is a secret
    topic = kafka.topic(1, cleanup_policy="compact")
    options = '{ "client.id" = "env:NAME_OF_CLIENT", "message.timeout.ms" = "3000" }'
    job = job_to(
        tmp_path / "job",
        f'kind = "kafka", topic = "{topic}", servers = "{kafka.servers}", options = {options}',
    )
    try:
        with before(2, KafkaTopic, "send", lambda: FAULTS[fault](kafka, topic)):
            nowhere(job, tmp_path, capfd, failed=fault != "nothing")
    finally:
        if fault == "broker gone":
            kafka.start()


@pytest.mark.parametrize("gone", [False, True])
def test_pubsub(tmp_path: Path, capfd: pytest.CaptureFixture[str], gone: bool) -> None:
    with pubsub_emulator.running() as started:
        topic, _ = started.subscription(enable_message_ordering=True)
        job = job_to(tmp_path / "job", f'kind = "pubsub", topic = "{topic}"')

        def fault() -> None:
            if gone:
                from google.cloud.pubsub_v1 import PublisherClient

                PublisherClient().delete_topic(topic=topic)

        with before(1, PubsubSink, "_put_rows", fault):
            nowhere(job, tmp_path, capfd, failed=gone)


def test_a_client_that_says_what_it_sends_is_caught(
    kafka: Broker, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    topic = kafka.topic(1, cleanup_policy="compact")
    job = job_to(
        tmp_path / "job", f'kind = "kafka", topic = "{topic}", servers = "{kafka.servers}"'
    )
    with (
        before(2, KafkaTopic, "send", lambda: print(f"sends {KEY}")),
        pytest.raises(AssertionError, match="stdout"),
    ):
        nowhere(job, tmp_path, capfd, failed=False)
