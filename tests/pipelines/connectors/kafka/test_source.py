"""Kafka as a source: rows of partitions in order, watermarks, whole topics, and lost messages."""

import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from apache_beam.io.watermark_estimators import ManualWatermarkEstimator
from apache_beam.runners.sdf_utils import RestrictionTrackerView, ThreadsafeRestrictionTracker
from confluent_kafka import IsolationLevel, KafkaException, TopicPartition
from confluent_kafka.admin import NewPartitions, OffsetSpec

from dpstream.accounting.errors import DpstreamError, PolicyError, RunError, UsageError
from dpstream.pipelines.connectors import inputs
from dpstream.pipelines.connectors.inputs import Progress, ProgressTracker, ReaderPool
from dpstream.pipelines.connectors.kafka import reader as kafka_reader
from dpstream.pipelines.connectors.kafka import source as source_kafka
from dpstream.pipelines.connectors.kafka.reader import (
    Kafka,
    PartitionMessages,
    Reader,
    check_topic,
    parts,
)
from dpstream.pipelines.connectors.kafka.source import KafkaInput, ReadTopic, WatchPartitions
from dpstream.pipelines.connectors.registry import input_of
from dpstream.pipelines.formats.lines import MAX_LINE_BYTES
from dpstream.pipelines.formats.rows import Rows
from dpstream.pipelines.formats.texts import Objects
from dpstream.pipelines.operate.check import check_source
from tests.golden.refusals import Refused
from tests.kafka_broker import Broker
from tests.pipelines.kafka_jobs import Driver, kafka_job, record

Drive = Callable[..., Driver]


def test_everything_comes_once_at_its_place(kafka: Broker, drive: Drive) -> None:
    topic = kafka.topic(2)
    begin = time.time() * 1e6
    sent = [[record(i) for i in range(2_500)], [record(i) for i in range(5_000, 5_007)]]
    for partition, values in enumerate(sent):
        assert kafka.produce(topic, values, partition) == list(range(len(values)))
    for partition, values in enumerate(sent):
        driver = drive(topic, partition)
        outputs = driver.until(len(values))
        assert outputs.users == {(partition, i): v["user"] for i, v in enumerate(values)}
        assert outputs.dead == []
        assert driver.after == len(values) - 1
        assert begin // 1000 * 1000 <= min(driver.stamps)
        assert max(driver.stamps) <= time.time() * 1e6


def test_batches_have_the_jobs_columns(kafka: Broker, drive: Drive, tmp_path: Path) -> None:
    topic = kafka.topic()
    kafka.produce(topic, [{"key": 1.5, "user": None, "more": [1]}, record(1)])
    job = kafka_job(tmp_path, kafka.servers, topic)
    batches = drive(topic).until(2).records
    assert batches[0].schema.names == list(job.columns)
    kinds = {"_append_time": pa.timestamp("us", "UTC")}
    assert [f.type for f in batches[0].schema] == [kinds.get(c, pa.string()) for c in job.columns]
    assert batches[0].column("key").to_pylist() == ["1.5", "k1"]
    assert batches[0].column("user").to_pylist() == [None, "u1"]


POISON: list[tuple[bytes | None, str]] = [
    (None, "empty"),
    (b"", "empty"),
    (b"{", "malformed"),
    (b"[]", "malformed"),
    (b'"x"', "malformed"),
    (b'{"user": {"a": 1}}', "malformed"),
    (b'{"user": "\xff"}', "malformed"),
    (b'{"more":' + b"[" * 300 + b"]" * 300 + b"}", "malformed"),
    (b'{"more": "' + b"x" * MAX_LINE_BYTES + b'"}', "message_too_long"),
]


def test_a_poisoned_message_goes_to_the_dead_letter(kafka: Broker, drive: Drive) -> None:
    topic = kafka.topic(max_message_bytes="4000000")
    sent: list[Any] = [record(0)]
    for i, (bad, _) in enumerate(POISON):
        sent += [bad, record(i + 1)]
    kafka.produce(topic, sent)
    driver = drive(topic).until(len(sent))
    assert driver.users == {(0, 2 * i): f"u{i}" for i in range(len(POISON) + 1)}
    assert driver.dead == [(0, 2 * i + 1, reason) for i, (_, reason) in enumerate(POISON)]


def test_a_check_reads_a_topic_and_leaves_no_trace(kafka: Broker, tmp_path: Path) -> None:
    """To its end; what `dpstream check` calls unusable has the reasons that a run gives it."""
    topic = kafka.topic(2, max_message_bytes="4000000")
    kafka.produce(topic, [record(0), *(bad for bad, _ in POISON), {**record(1), "user": None}], 0)
    kafka.produce(topic, [record(i) for i in range(50)], 1)
    checked = check_source(kafka_job(tmp_path, kafka.servers, topic))
    reasons = {of.reason: of.records for of in checked.unusable}
    # Event times of 2024, appended today: of these records a run would say the same.
    assert (reasons.pop("unit"), reasons.pop("late")) == (1, 51)
    assert reasons == Counter(reason for _, reason in POISON)
    assert checked.usable == 0 and checked.read == 52 + len(POISON)
    first = {of.reason: of.first[0] for of in checked.unusable}
    assert first["unit"] == ("partition 0", len(POISON) + 1)
    assert first["late"] == ("partition 0", 0) and first["empty"] == ("partition 0", 1)
    assert not kafka.admin().list_consumer_groups().result().valid
    assert check_source(kafka_job(tmp_path, kafka.servers, topic), limit=1).complete is False


def test_one_message_decides_nothing_about_others() -> None:
    """A pure function: any company gives every message the outcome it has alone."""
    objects = Objects(["user"])
    values = [bad for bad, _ in POISON] + [b'{"user": "a"}', b'{"user": 1}']

    def outcome(chosen: list[int]) -> dict[int, Any]:
        n = len(chosen)
        kinds = np.array([1 if i % 5 == 4 else 2 for i in chosen])
        given = PartitionMessages(
            np.array(chosen), kinds, np.arange(n), [values[i] for i in chosen]
        )
        out: dict[int, Any] = {}
        for part in parts(given, objects, ["user", "_append_time"]):
            if isinstance(part, Rows):
                users = part.batch.column(0).to_pylist()
                out |= {part.offset + i: user for i, user in enumerate(users)}
            else:
                out |= dict(zip(part.offsets.tolist(), part.reasons, strict=True))
        return out

    everything = outcome(list(range(len(values))))
    assert sorted(everything) == list(range(len(values)))
    assert everything[4] == "not_the_brokers_stamp"
    assert everything == {i: outcome([i])[i] for i in range(len(values))}


def produce_with_holes(kafka: Broker, topic: str) -> dict[tuple[int, int], str]:
    """Committed, rolled back and plain messages; where the ones to be read stand."""
    producer = kafka.producer(transactional_id=topic)
    producer.init_transactions()
    expected = dict[tuple[int, int], str]()
    for round_ in range(6):
        producer.begin_transaction()
        offsets: list[int] = []
        for i in range(3):
            producer.produce(
                topic, b'{"user": "%d"}' % (10 * round_ + i), partition=0,
                on_delivery=lambda _, message, into=offsets: into.append(message.offset()),
            )  # fmt: skip
        producer.flush()
        if round_ % 2:
            producer.abort_transaction()
            continue
        producer.commit_transaction()
        expected |= {(0, at): str(10 * round_ + i) for i, at in enumerate(offsets)}
    return expected


def test_batches_end_at_holes(kafka: Broker, drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = kafka.topic()
    expected = produce_with_holes(kafka, topic)
    driver = drive(topic)
    assert driver.until(len(expected)).users == expected
    for _ in range(20):
        driver.bundle()
    assert driver.after == 23, "goes on behind the last marker"
    monkeypatch.setattr(kafka_reader, "runs", lambda at, batch: [Rows(int(at[0]), batch)])
    assert drive(topic).until(len(expected)).users != expected, "one that batches over holes"


def committed_end(self: Kafka, partition: int) -> int:
    """Sabotaged `Kafka.end`: what a consumer of committed messages is told."""
    place = self.partition(partition)
    offsets = self.admin().list_offsets(
        {place: OffsetSpec.latest()}, isolation_level=IsolationLevel.READ_COMMITTED
    )
    return int(offsets[place].result(5).offset)


@pytest.mark.parametrize("sabotaged", [False, True])
def test_an_open_transaction_holds_the_watermark(
    kafka: Broker, drive: Drive, monkeypatch: pytest.MonkeyPatch, sabotaged: bool
) -> None:
    if sabotaged:
        monkeypatch.setattr(Kafka, "end", committed_end)
    topic = kafka.topic()
    kafka.produce(topic, [record(0)])
    driver = drive(topic, settle="50ms")
    driver.until(1)
    producer = kafka.producer(transactional_id=topic)
    producer.init_transactions()
    producer.begin_transaction()
    producer.produce(topic, b'{"user": "open"}', partition=0)
    producer.flush()
    time.sleep(0.2)
    for _ in range(3):
        driver.bundle()
    producer.commit_transaction()
    broken = pytest.raises(AssertionError, match="later than")
    with broken if sabotaged else nullcontext():
        assert driver.until(2).stamps[-1] >= driver.watermark


@pytest.mark.parametrize("ahead_ms", [0, 1_000])
def test_the_watermark_keeps_its_promise_and_goes_on(
    kafka: Broker, drive: Drive, monkeypatch: pytest.MonkeyPatch, ahead_ms: int
) -> None:
    """Messages at odd times: none is older than the watermark before it.  A sabotage breaks it."""
    honest = inputs.advance

    def early(estimator: Any, micros: int) -> None:
        honest(estimator, micros + ahead_ms * 1_000)

    monkeypatch.setattr(source_kafka, "advance", early)
    topic = kafka.topic()
    driver = drive(topic)
    rng = np.random.default_rng(7)
    broken = pytest.raises(AssertionError, match=r"later than|behind the watermark")
    with broken if ahead_ms else nullcontext():
        for sent in range(12):
            kafka.produce(topic, [record(sent)])
            for _ in range(rng.integers(4)):
                driver.bundle()  # checks the promise
        quiet = driver.until(12).watermark
        assert len(driver.users) == 12
        time.sleep(0.3)
        driver.bundle()
        assert driver.watermark >= quiet + 200_000, "goes on without messages"
        assert driver.watermark % 1_000 == 0


def test_a_bundle_ends_soon_and_goes_on(
    kafka: Broker, drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (source_kafka, inputs):
        monkeypatch.setattr(module, "BUNDLE_SECONDS", 0.02)
    topic = kafka.topic()
    kafka.produce(topic, (record(i) for i in range(60_000)))
    driver = drive(topic, batch_rows=500)
    bundles = 0
    while sum(map(len, driver.records)) < 60_000:
        driver.bundle()
        bundles += 1
    assert driver.users == {(0, i): f"u{i}" for i in range(60_000)}
    assert bundles >= 5, "rows alone would end two of them"


def test_what_was_not_claimed_is_read_again(kafka: Broker, drive: Drive) -> None:
    topic = kafka.topic()
    kafka.produce(topic, [record(i) for i in range(10)])
    driver = drive(topic)
    tracker = ThreadsafeRestrictionTracker(ProgressTracker(driver.progress))
    view, watermark = RestrictionTrackerView(tracker), ManualWatermarkEstimator(None)
    reading = driver.dofn.process(0, view, watermark)
    _, rest = tracker.try_split(0)  # the runner checkpoints before the first claim
    assert list(reading) == []
    tracker.check_done()
    assert rest.after is None
    assert driver.until(10).users == {(0, i): f"u{i}" for i in range(10)}


def test_messages_that_are_gone_are_told(kafka: Broker, drive: Drive, refused: Refused) -> None:
    topic = kafka.topic()
    kafka.produce(topic, [record(i) for i in range(10)])
    kafka.admin_do("delete_records", [TopicPartition(topic, 0, 6)])
    driver = drive(topic, start=2).until(5)
    assert driver.users == {(0, i): f"u{i}" for i in range(6, 10)}
    assert driver.dead == [(0, 2, "deleted_before_read")]
    refused(lambda: drive(topic, start=50).until(1))


BEFORE, AFTER = 1_500_000_000_000_000, 5_000_000_000_000_000


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


def test_partitions_are_found_while_it_runs(
    kafka: Broker, tmp_path: Path, refused: Refused
) -> None:
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
    refused(look, watch, topic_id, 2)


def test_stamps_of_producers_are_refused(
    kafka: Broker, tmp_path: Path, drive: Drive, refused: Refused
) -> None:
    topic = kafka.topic(message_timestamp_type="CreateTime")
    source = input_of(kafka_job(tmp_path, kafka.servers, topic))
    refused(source.identity)
    kafka.produce(topic, [record(0), b"{"])
    kafka.set(topic, "message.timestamp.type", "LogAppendTime")
    kafka.produce(topic, [record(1)])
    source.identity()
    driver = drive(topic).until(3)
    assert driver.users == {(0, 2): "u1"}
    assert driver.dead == [(0, i, "not_the_brokers_stamp") for i in (0, 1)]


def test_compacted_topics_are_refused(kafka: Broker, tmp_path: Path, refused: Refused) -> None:
    for policy in ("compact", "compact,delete"):
        topic = kafka.topic(cleanup_policy=policy)
        refused(input_of(kafka_job(tmp_path, kafka.servers, topic)).identity)
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


def test_a_missing_client_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    monkeypatch.delitem(sys.modules, "dpstream.pipelines.connectors.kafka.source")
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    refused(lambda: input_of(kafka_job(tmp_path, "localhost:1", "t")))


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
        with pytest.raises(RunError, match="did not answer for 1 s"):  # and one of two codes
            driver.until(1)
    finally:
        kafka.start()


def test_a_topic_that_may_not_be_read_is_an_error(
    kafka: Broker, drive: Drive, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    topic = kafka.topic()
    kafka.produce(topic, [record(0)])
    kafka.deny_reading(topic)
    driver = drive(topic)
    for _ in range(10):
        driver.bundle()  # rights may come
    monkeypatch.setattr(kafka_reader, "LOST_SECONDS", 0.5)
    time.sleep(0.5)
    refused(driver.until, 1)


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


def test_a_restart_of_a_whole_topic_begins_at_a_time(kafka: Broker, tmp_path: Path) -> None:
    topic = kafka.topic(2)
    kafka.produce(topic, [record(0)], 0)
    time.sleep(0.05)
    begin = time.time_ns() // 1_000
    time.sleep(0.05)
    kafka.produce(topic, [record(1)], 0)
    kafka.produce(topic, [record(2)], 1)
    driver = drive(kafka, topic, tmp_path, begin=begin).until(2)
    assert driver.users == {(0, 1): "u1", (1, 0): "u2"}
