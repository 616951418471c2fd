"""A Kafka topic as an input: identity, restarts, refusals, outages.  A real broker."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from apache_beam.io.watermark_estimators import ManualWatermarkEstimator
from apache_beam.runners.sdf_utils import RestrictionTrackerView, ThreadsafeRestrictionTracker
from confluent_kafka.admin import NewPartitions

from dpstream.accounting.errors import DpstreamError, PolicyError, RunError, UsageError
from dpstream.pipelines.connectors.kafka import reader as kafka_reader
from dpstream.pipelines.connectors.kafka.reader import Kafka, Reader, check_topic
from dpstream.pipelines.connectors.kafka.source import KafkaInput, WatchPartitions
from dpstream.pipelines.connectors.registry import input_of
from dpstream.pipelines.connectors.unbounded import Progress, ProgressTracker, ReaderPool
from tests.kafka_broker import Broker
from tests.pipelines.kafka_jobs import Driver, kafka_job, record

BEFORE, AFTER = 1_500_000_000_000_000, 5_000_000_000_000_000


Drive = Callable[..., Driver]


def first_of(reader: kafka_reader.Reader, begin: int) -> int:
    """The first offset at a time, asked again while a busy broker does not answer."""
    while (first := reader.first(begin)) is None:
        time.sleep(0.05)
    return first


def test_a_restart_begins_at_a_time(kafka: Broker, drive: Drive, tmp_path: Path) -> None:
    topic = kafka.topic()
    kafka.produce(topic, [record(i) for i in range(3)])
    time.sleep(0.05)
    between = time.time_ns() // 1_000
    time.sleep(0.05)
    kafka.produce(topic, [record(3)])
    job = kafka_job(tmp_path, kafka.servers, topic)
    reader = kafka_reader.Reader(KafkaInput(job).kafka, 0)
    assert [first_of(reader, begin) for begin in (0, BEFORE, between, AFTER)] == [0, 0, 3, 4]
    assert drive(topic, begin=between).until(1).users == {(0, 3): "u3"}


def test_identity(kafka: Broker, tmp_path: Path) -> None:
    topic, other = kafka.topic(), kafka.topic()
    first = input_of(kafka_job(tmp_path, kafka.servers, topic))
    assert isinstance(first, KafkaInput)
    assert not first.bounded
    before = first.identity()
    assert first.identity() == before
    assert input_of(kafka_job(tmp_path, kafka.servers, other)).identity() != before
    again(kafka, topic)
    assert first.identity() != before, "a topic made again is another input"


def again(kafka: Broker, topic: str) -> None:
    """Delete a topic and make it again under its name."""
    kafka.recreate(topic, 1, {"message.timestamp.type": "LogAppendTime"})


def look(
    watch: WatchPartitions, topic_id: str, last_partition: int | None
) -> tuple[list[Any], int, Any]:
    """One look for partitions: (outputs, the last one known then, watermark)."""
    tracker = ThreadsafeRestrictionTracker(ProgressTracker(Progress(last_partition, 0)))
    estimator = ManualWatermarkEstimator(None)
    outputs = list(watch.process(topic_id, RestrictionTrackerView(tracker), estimator))
    tracker.check_done()
    rest = tracker.deferred_status()[0]
    return [o.value for o in outputs], rest.after, estimator.current_watermark()


def test_partitions_are_found_while_it_runs(kafka: Broker, tmp_path: Path) -> None:
    topic = kafka.topic(2)
    source = KafkaInput(kafka_job(tmp_path, kafka.servers, topic))
    watch, topic_id = WatchPartitions(source.kafka, 0), source._topic_id()
    start = time.time_ns() // 1_000
    partitions, last_partition, watermark = look(watch, topic_id, None)
    assert (partitions, last_partition) == ([0, 1], 1)
    assert start - 1_000 <= watermark.micros <= time.time_ns() // 1_000
    assert look(watch, topic_id, 1)[:2] == ([], 1)
    kafka.admin_do("create_partitions", [NewPartitions(topic, 3)])
    assert look(watch, topic_id, 1)[:2] == ([2], 2)
    again(kafka, topic)
    with pytest.raises(RunError, match="made again"):
        look(watch, topic_id, 2)


def test_stamps_of_producers_are_refused(kafka: Broker, tmp_path: Path, drive: Drive) -> None:
    topic = kafka.topic(message_timestamp_type="CreateTime")
    source = input_of(kafka_job(tmp_path, kafka.servers, topic))
    with pytest.raises(UsageError, match="producers choose the stamps"):
        source.identity()
    kafka.produce(topic, [record(0), b"{"])
    kafka.set(topic, "message.timestamp.type", "LogAppendTime")
    kafka.produce(topic, [record(1)])
    source.identity()
    driver = drive(topic).until(3)
    assert driver.users == {(0, 2): "u1"}
    assert driver.dead == [(0, i, "not_the_brokers_stamp") for i in (0, 1)]


def test_compacted_topics_are_refused(kafka: Broker, tmp_path: Path) -> None:
    for policy in ("compact", "compact,delete"):
        topic = kafka.topic(cleanup_policy=policy)
        with pytest.raises(UsageError, match="removes earlier ones"):
            input_of(kafka_job(tmp_path, kafka.servers, topic)).identity()
    check_topic({"message.timestamp.type": "LogAppendTime", "cleanup.policy": "delete"}, "t")


SECRET = "s3cret-value"


@pytest.mark.parametrize(
    ("topic", "servers", "more", "error", "rule"),
    [
        ("nowhere", None, "", UsageError, "table.topic: is not on the broker"),
        ("t", "127.0.0.1:1", "", RunError, "table.servers: no Kafka broker answered"),
        ("t", None, "options = { 'isolation.level' = 'x' }", UsageError, "is set by dpstream"),
        ("t", None, "options = { 'log.queue' = 'x' }", UsageError, "is set by dpstream"),
        ("t", None, f"options = {{ 'no.such' = '{SECRET}' }}", UsageError, "are not accepted"),
        ("t", None, "options = { 'sasl.password' = 'env:NO_SUCH' }", UsageError, "is not set"),
        (
            "t",
            None,
            "options = { 'security.protocol' = 'env:MECH' }",
            UsageError,
            "are not accepted",
        ),
        ("t", None, "stamp = 'time'", PolicyError, "must be the broker's append time"),
    ],
)
def test_refusals(
    kafka: Broker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    topic: str,
    servers: str | None,
    more: str,
    error: type[DpstreamError],
    rule: str,
) -> None:
    monkeypatch.setattr("dpstream.pipelines.connectors.kafka.reader.START_SECONDS", 1.0)
    monkeypatch.setenv("MECH", SECRET)
    job = kafka_job(tmp_path, servers or kafka.servers, topic, more)
    with pytest.raises(error, match=rule) as caught:
        input_of(job).identity() and input_of(job).identity()
    assert SECRET not in str(caught.value)
    assert caught.value.__context__ is None or caught.value.__suppress_context__
    printed = capfd.readouterr()
    assert printed.out + printed.err == "", "the client is silent"


def test_a_missing_client_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "dpstream.pipelines.connectors.kafka.source")
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    with pytest.raises(UsageError, match=r"table\.format: .*`kafka`.*\[kafka\]"):
        input_of(kafka_job(tmp_path, "localhost:1", "t"))


def test_secrets_stay_where_they_are_used(
    kafka: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NAME_OF_CLIENT", SECRET)
    more = "options = { 'client.id' = 'env:NAME_OF_CLIENT' }"
    job = kafka_job(tmp_path, kafka.servers, kafka.topic(), more)
    client = Kafka.of(job.source)
    assert client.settings()["client.id"] == SECRET
    assert SECRET not in repr(client)
    assert SECRET not in str(job.plan)
    assert "env:" not in repr(client)


def outage(kafka: Broker, drive: Drive, seconds: float) -> None:
    """The broker is gone for a while: no error, no watermark, then everything once."""
    topic = kafka.topic()
    kafka.produce(topic, [record(i) for i in range(100)])
    driver = drive(topic)
    driver.until(100)
    driver.bundle()
    kafka.kill()
    try:
        driver.bundle()  # what it is told before it knows
        held, end = driver.watermark, time.monotonic() + seconds
        while time.monotonic() < end:
            driver.bundle()
            assert driver.watermark == held
    finally:
        kafka.start()
    kafka.produce(topic, [record(i) for i in range(100, 200)])
    assert driver.until(200).users == {(0, i): f"u{i}" for i in range(200)}
    assert driver.dead == []
    for _ in range(5):
        driver.bundle()
    assert driver.watermark > held + seconds * 1e6


def test_a_broker_that_is_down_for_seconds(kafka: Broker, drive: Drive) -> None:
    outage(kafka, drive, 4)


@pytest.mark.slow
def test_a_broker_that_is_down_for_a_minute(kafka: Broker, drive: Drive) -> None:
    outage(kafka, drive, 60)


def test_a_broker_that_stays_away_is_an_error(
    kafka: Broker, drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = kafka.topic()
    driver = drive(topic)
    driver.bundle()
    monkeypatch.setattr(kafka_reader, "LOST_SECONDS", 1.0)
    kafka.kill()
    try:
        with pytest.raises(RunError, match="did not answer for 1 s"):
            driver.until(1)
    finally:
        kafka.start()


def test_a_topic_that_may_not_be_read_is_an_error(
    kafka: Broker, drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = kafka.topic()
    kafka.produce(topic, [record(0)])
    kafka.deny_reading(topic)
    driver = drive(topic)
    for _ in range(10):
        driver.bundle()  # rights may come
    monkeypatch.setattr(kafka_reader, "LOST_SECONDS", 0.5)
    time.sleep(0.5)
    with pytest.raises(RunError, match=r"may not be read \(TOPIC_AUTHORIZATION_FAILED\)"):
        driver.until(1)


def test_readers_are_kept_and_closed(kafka: Broker, drive: Drive) -> None:
    topic = kafka.topic()
    kafka.produce(topic, [record(i) for i in range(10)])
    client = drive(topic).dofn.kafka
    readers = ReaderPool[Reader]()

    def lend(partition: int) -> Any:
        return readers.lend(partition, lambda: Reader(client, partition))

    with lend(0) as first:
        first.seek(0)
        while not first.take(10, 0.1).messages:
            pass
    with lend(0) as second, lend(0) as third:
        assert second is first, "goes on"
        assert third is not first, "one caller at a time"
    first.used -= 100
    third.used -= 100
    with pytest.raises(ValueError), lend(1):
        raise ValueError
    assert first._consumer is None, "unused ones are closed"
    assert not any(readers._free.values()), "a reader that failed is not used again"
