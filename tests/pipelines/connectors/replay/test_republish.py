"""A recording published again: the same rows arrive, at the pace asked for."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from dpstream.accounting.errors import RunError, UsageError
from dpstream.pipelines.cli.main import cli
from dpstream.pipelines.connectors.folder.store import Folder
from dpstream.pipelines.connectors.folder.watch import Markers, nothing_seen
from dpstream.pipelines.connectors.pubsub.client import Puller
from dpstream.pipelines.connectors.replay import republish
from dpstream.pipelines.connectors.replay import source as replay_index
from dpstream.pipelines.jobs.job import Job
from tests.kafka_broker import Broker
from tests.pipelines.connectors.replay.test_source import SECOND, messy, table, write
from tests.projects import typed
from tests.pubsub_emulator import HOST, running
from tests.relay import Relay

MakeJob = Callable[..., Job]


@pytest.fixture(autouse=True)
def _no_index_of_old_files() -> None:
    replay_index.index_of.cache_clear()


def call(job: Job, *args: str) -> dict[str, float]:
    printed = CliRunner().invoke(cli, typed("replay", job.path, "--json", "--operator", *args))
    assert printed.exit_code == 0, printed.output
    counts: dict[str, float] = json.loads(printed.output)["operator_only"]
    return counts


def expected(job: Job) -> list[str]:
    """The rows of the recording as text, sorted."""
    source = pa.concat_tables(
        [pq.read_table(path) for path in sorted(Path(job.source.path).parent.glob("?.parquet"))]
    )
    return sorted(text.decode() for text in republish.json_rows(source.to_batches()[0]))


def recorded(folder: Path, seconds: int = 100) -> None:
    write(folder / "a.parquet", "parquet", table([i * SECOND for i in range(seconds)]), group=1000)


def test_into_a_folder(tmp_path: Path, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job("parquet")
    recorded(tmp_path / "in")
    monkeypatch.setattr(republish, "FILE_SECONDS", 0.3)
    begin = time.monotonic()
    counts = call(job, "--to", f"folder:{tmp_path / 'out'}", "--speed", "80")
    assert counts["rows"] == 100 and counts["refused"] == 0
    assert 1.2 <= time.monotonic() - begin < 4
    folder = Folder(str(tmp_path / "out"))
    steps = list(Markers(folder).steps(nothing_seen(0, True), 1 << 62))
    names = [file[0] for step in steps for file in step.files]
    assert len(names) >= 3 and len(set(names)) == len(names)
    assert [step.upto for step in steps] == sorted(step.upto or 0 for step in steps)
    rows = pa.concat_tables([pq.read_table(folder.path(name)) for name in names])
    texts = [t.decode() for b in rows.combine_chunks().to_batches() for t in republish.json_rows(b)]
    assert sorted(texts) == expected(job)
    assert not list((tmp_path / "out").rglob("*.tmp"))


def test_refused_rows_are_not_published(tmp_path: Path, make_job: MakeJob) -> None:
    job = make_job("jsonl")
    messy(tmp_path / "in", "jsonl")
    counts = call(job, "--to", f"folder:{tmp_path / 'out'}")
    lines = sum(len(path.read_bytes().splitlines()) for path in (tmp_path / "in").glob("*.jsonl"))
    assert counts["refused"] > 50 and counts["rows"] + counts["refused"] == lines


def test_into_kafka(tmp_path: Path, make_job: MakeJob, kafka: Broker) -> None:
    from confluent_kafka import Consumer

    job = make_job("parquet")
    recorded(tmp_path / "in")
    topic = kafka.topic(2)
    assert call(job, "--to", f"kafka:{kafka.servers}/{topic}")["rows"] == 100
    consumer = Consumer(
        {"bootstrap.servers": kafka.servers, "group.id": "t", "auto.offset.reset": "earliest"}
    )
    consumer.subscribe([topic])
    texts: list[str] = []
    until = time.monotonic() + 30
    while len(texts) < 100 and time.monotonic() < until:
        texts += [m.value().decode() for m in consumer.consume(100, 0.2) if m.error() is None]
    consumer.close()
    assert sorted(texts) == expected(job)


def test_a_broker_that_takes_nothing(
    tmp_path: Path, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job("parquet")
    recorded(tmp_path / "in", 3)
    monkeypatch.setattr(republish, "FLUSH_SECONDS", 0.5)
    with pytest.raises(RunError, match="did not take all"):
        republish.republish(job, republish.KafkaTarget("127.0.0.1:1", "none"), None)


def test_into_pubsub(tmp_path: Path, make_job: MakeJob) -> None:
    job = make_job("parquet")
    recorded(tmp_path / "in")
    with running() as emulator:
        topic, subscription = emulator.subscription()
        puller, texts = Puller(subscription), list[str]()
        assert call(job, "--to", f"pubsub:{topic}")["rows"] == 100
        until = time.monotonic() + 20
        while len(texts) < 100 and time.monotonic() < until:
            texts += [m.message.data.decode() for m in puller.take(1000, 0.2, 0.1)[0]]
        puller.close()
    assert sorted(texts) == expected(job)


def test_a_topic_that_is_not_there(tmp_path: Path, make_job: MakeJob) -> None:
    with running(), pytest.raises(RunError, match="--to: is not there"):
        republish.target_of("pubsub:projects/test-project/topics/none")


def test_pubsub_gives_up_once(
    tmp_path: Path, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A topic that takes nothing is a coded error after one deadline, not one for each message."""
    job = make_job("parquet")
    recorded(tmp_path / "in")
    with running() as emulator:
        topic, _ = emulator.subscription()
        monkeypatch.setattr(republish, "FLUSH_SECONDS", 1.0)
        relay = Relay(os.environ[HOST])
        monkeypatch.setenv(HOST, relay.host)
        target = republish.PubSubTarget(topic)
        relay.down()
        begin = time.monotonic()
        with pytest.raises(RunError, match="--to: did not take all messages: TimeoutError"):
            republish.republish(job, target, None)
        assert time.monotonic() - begin < 20
        monkeypatch.undo()


def test_options_of_kafka(monkeypatch: pytest.MonkeyPatch) -> None:
    where = "kafka:127.0.0.1:1/t"
    monkeypatch.setenv("KAFKA_PASSWORD", "CANARY7741")
    secure = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN",
              "sasl.username": "u", "sasl.password": "env:KAFKA_PASSWORD"}  # fmt: skip
    republish.target_of(where, secure)
    for options, words in [
        ({"sasl.password": "CANARY7741"}, "is a secret"),
        ({"acks": "0"}, "is set by dpstream"),
        ({"delivery.timeout.ms": "0"}, "is set by dpstream"),
        ({"no.such": "CANARY7741"}, "are refused"),
        ({"error_cb": "CANARY7741"}, "are refused"),
    ]:
        with pytest.raises(UsageError, match=words) as caught:
            republish.target_of(where, options)
        assert caught.value.field.startswith("--option") and "CANARY" not in str(caught.value)
    with pytest.raises(UsageError, match="is for kafka"):
        republish.target_of("folder:out", secure)


def test_targets_that_are_none(make_job: MakeJob) -> None:
    for text in ("", "folder:", "kafka:localhost", "ftp:x", "pubsub:"):
        with pytest.raises(UsageError, match="--to"):
            republish.target_of(text)
