"""A topic as one element, for runners that keep one watermark for a source."""

import time
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaException

from dpstream.pipelines.connectors.kafka.reader import Kafka
from dpstream.pipelines.connectors.kafka.source import KafkaInput, ReadTopic
from tests.kafka_broker import Broker
from tests.pipelines.kafka_jobs import Driver, kafka_job, record


def drive(kafka: Broker, topic: str, folder: Path, begin: int = 0, **job: Any) -> Driver:
    made = kafka_job(folder, kafka.servers, topic, **job)
    source = KafkaInput(made)
    driver = Driver(ReadTopic(made, source.kafka, 100_000, begin))
    driver.element = source._topic_id()
    return driver


@pytest.mark.parametrize("fresh", [False, True])
def test_all_partitions_once(kafka: Broker, tmp_path: Path, fresh: bool) -> None:
    """The driver checks the watermark at every output: that of the slowest partition."""
    topic = kafka.topic(3)
    sent: list[Any] = [record(i) for i in range(3_000)]
    sent[5] = b"{"
    kafka.produce(topic, sent, 0)
    kafka.produce(topic, [record(i) for i in range(40)], 2)
    driver = drive(kafka, topic, tmp_path, batch_rows=500)
    driver.fresh = fresh
    driver.until(3_040)
    kafka.produce(topic, [record(40)], 2)
    kafka.grow(topic, 4)
    kafka.produce(topic, [record(7)], 3)
    driver.until(3_042)
    users = {(0, i): f"u{i}" for i in range(3_000) if i != 5}
    assert driver.users == users | {(2, i): f"u{i}" for i in range(41)} | {(3, 0): "u7"}
    assert driver.dead == [(0, 5, "malformed")]


def test_the_watermark_is_the_slowest_partitions(
    kafka: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, at = kafka.topic(2), Kafka.at
    kafka.produce(topic, [record(0)], 1)
    driver = drive(kafka, topic, tmp_path, begin=1)

    def one_knows(self: Kafka, partition: int, millis: int) -> int:
        if partition == 1:
            raise KafkaException
        return at(self, partition, millis)

    with monkeypatch.context() as patch:
        patch.setattr(Kafka, "at", one_knows)
        for _ in range(3):
            driver.bundle()
        assert driver.watermark < 0 and not driver.records
    start = time.time_ns() // 1_000
    driver.until(1)
    for _ in range(3):
        driver.bundle()
    assert start - 200_000 < driver.watermark < time.time_ns() // 1_000


def test_a_restart_begins_at_a_time(kafka: Broker, tmp_path: Path) -> None:
    topic = kafka.topic(2)
    kafka.produce(topic, [record(0)], 0)
    time.sleep(0.05)
    begin = time.time_ns() // 1_000
    time.sleep(0.05)
    kafka.produce(topic, [record(1)], 0)
    kafka.produce(topic, [record(2)], 1)
    driver = drive(kafka, topic, tmp_path, begin=begin).until(2)
    assert driver.users == {(0, 1): "u1", (1, 0): "u2"}
