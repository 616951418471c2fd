"""Kafka as a source, against a real broker: bundles driven by hand."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from apache_beam.io.watermark_estimators import ManualWatermarkEstimator
from apache_beam.runners.sdf_utils import RestrictionTrackerView, ThreadsafeRestrictionTracker
from confluent_kafka import IsolationLevel, TopicPartition
from confluent_kafka.admin import NewPartitions, OffsetSpec

from accounting.errors import DpstreamError, PolicyError, RunError, UsageError
from pipelines import endless, kafka_messages, kafka_reader, source_kafka
from pipelines.endless import Progress, ProgressTracker
from pipelines.inputs import input_of
from pipelines.kafka_client import Kafka, check_topic
from pipelines.kafka_messages import Messages, parts
from pipelines.source_jsonl import Objects
from pipelines.source_kafka import KafkaInput, _ReadPartition, _Watch
from pipelines.source_lines import MAX_LINE_BYTES
from pipelines.source_rows import Rows
from tests.kafka_broker import Broker
from tests.pipelines.kafka_jobs import Driver, kafka_job, record

BEFORE, AFTER = 1_500_000_000_000_000, 5_000_000_000_000_000


@pytest.fixture
def drive(kafka: Broker, tmp_path: Path) -> Callable[..., Driver]:
    """``drive(topic, partition)``: the source's reader of a partition."""

    def make(
        topic: str, partition: int = 0, start: int | None = None, begin: int = 0, **job: Any
    ) -> Driver:
        made = kafka_job(tmp_path, kafka.servers, topic, **job)
        settle = int(made.source.settle.removesuffix("ms")) * 1_000
        dofn = _ReadPartition(made, KafkaInput(made).kafka, settle, begin)
        return Driver(dofn, partition, start)

    return make


Drive = Callable[..., Driver]


def test_everything_comes_once_at_its_place(kafka: Broker, drive: Drive) -> None:
    topic = kafka.topic(2)
    begin = time.time() * 1e6
    sent = [[record(i) for i in range(2_500)], [record(i) for i in range(5_000, 5_007)]]
    for partition, values in enumerate(sent):
        assert kafka.produce(topic, values, partition) == list(range(len(values)))
    for partition, values in enumerate(sent):
        driver = drive(topic, partition)
        found = driver.until(len(values))
        assert found.users == {(partition, i): v["user"] for i, v in enumerate(values)}
        assert found.dead == []
        assert driver.progress.after == len(values) - 1
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
    found = drive(topic).until(len(sent))
    assert found.users == {(0, 2 * i): f"u{i}" for i in range(len(POISON) + 1)}
    assert found.dead == [(0, 2 * i + 1, reason) for i, (_, reason) in enumerate(POISON)]


def test_one_message_decides_nothing_about_others() -> None:
    """A pure twin: any company gives every message the outcome it has alone."""
    objects = Objects(["user"])
    values = [bad for bad, _ in POISON] + [b'{"user": "a"}', b'{"user": 1}']

    def outcome(chosen: list[int]) -> dict[int, Any]:
        n = len(chosen)
        kinds = np.array([1 if i % 5 == 4 else 2 for i in chosen])
        given = Messages(np.array(chosen), kinds, np.arange(n), [values[i] for i in chosen])
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
    expected = {}
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
    assert driver.progress.after == 23, "goes on behind the last marker"
    monkeypatch.setattr(kafka_messages, "runs", lambda at, batch: [Rows(int(at[0]), batch)])
    assert drive(topic).until(len(expected)).users != expected, "a twin that batches over holes"


def committed_end(self: Kafka, partition: int) -> int:
    """Sabotaged `Kafka.end`: what a consumer of committed messages is told."""
    place = self.partition(partition)
    asked = self.admin().list_offsets(
        {place: OffsetSpec.latest()}, isolation_level=IsolationLevel.READ_COMMITTED
    )
    return int(asked[place].result(5).offset)


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
    """Messages at odd times: none is older than the watermark before it.  A twin breaks it."""
    honest = source_kafka.advance

    def early(estimator: Any, micros: int) -> None:
        honest(estimator, micros + ahead_ms * 1_000)

    monkeypatch.setattr(source_kafka, "advance", early)
    topic = kafka.topic()
    driver = drive(topic)
    rng = np.random.default_rng(7)
    broken = pytest.raises(AssertionError, match="later than")
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
    for module in (source_kafka, endless):
        monkeypatch.setattr(module, "BUNDLE_SECONDS", 0.02)
    topic = kafka.topic()
    kafka.produce(topic, (record(i) for i in range(60_000)))
    driver = drive(topic, batch_rows=500)
    bundles, longest = 0, 0.0
    while sum(map(len, driver.records)) < 60_000:
        begin = time.monotonic()
        driver.bundle()
        longest, bundles = max(longest, time.monotonic() - begin), bundles + 1
    assert driver.users == {(0, i): f"u{i}" for i in range(60_000)}
    assert bundles >= 5
    assert longest < 3, "a self-checkpoint every 0.02 s or so"


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


def test_messages_that_are_gone_are_told(kafka: Broker, drive: Drive) -> None:
    topic = kafka.topic()
    kafka.produce(topic, [record(i) for i in range(10)])
    kafka.admin_do("delete_records", [TopicPartition(topic, 0, 6)])
    found = drive(topic, start=2).until(5)
    assert found.users == {(0, i): f"u{i}" for i in range(6, 10)}
    assert found.dead == [(0, 2, "deleted_before_read")]
    with pytest.raises(RunError, match="has lost messages at its end"):
        drive(topic, start=50).until(1)


def test_a_restart_begins_at_a_time(kafka: Broker, drive: Drive, tmp_path: Path) -> None:
    topic = kafka.topic()
    kafka.produce(topic, [record(i) for i in range(3)])
    time.sleep(0.05)
    cut = time.time_ns() // 1_000
    time.sleep(0.05)
    kafka.produce(topic, [record(3)])
    job = kafka_job(tmp_path, kafka.servers, topic)
    reader = kafka_reader.Reader(KafkaInput(job).kafka, 0)
    assert [reader.first(begin) for begin in (0, BEFORE, cut, AFTER)] == [0, 0, 3, 4]
    assert drive(topic, begin=cut).until(1).users == {(0, 3): "u3"}


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
    kafka.admin_do("delete_topics", [topic])
    time.sleep(0.5)
    kafka.create(topic, 1, {"message.timestamp.type": "LogAppendTime"})


def look(watch: _Watch, topic_id: str, known: int | None) -> tuple[list[Any], int, Any]:
    """One look for partitions: (outputs, the last one known then, watermark)."""
    tracker = ThreadsafeRestrictionTracker(ProgressTracker(Progress(known, 0)))
    estimator = ManualWatermarkEstimator(None)
    found = list(watch.process(topic_id, RestrictionTrackerView(tracker), estimator))
    tracker.check_done()
    rest = tracker.deferred_status()[0]
    return [o.value for o in found], rest.after, estimator.current_watermark()


def test_partitions_are_found_while_it_runs(kafka: Broker, tmp_path: Path) -> None:
    topic = kafka.topic(2)
    source = KafkaInput(kafka_job(tmp_path, kafka.servers, topic))
    watch, topic_id = _Watch(source.kafka, 0), source._topic_id()
    asked = time.time_ns() // 1_000
    found, known, watermark = look(watch, topic_id, None)
    assert (found, known) == ([0, 1], 1)
    assert asked - 1_000 <= watermark.micros <= time.time_ns() // 1_000
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
        source.read()
    kafka.produce(topic, [record(0), b"{"])
    kafka.set(topic, "message.timestamp.type", "LogAppendTime")
    kafka.produce(topic, [record(1)])
    source.read()
    found = drive(topic).until(3)
    assert found.users == {(0, 2): "u1"}
    assert found.dead == [(0, i, "not_the_brokers_stamp") for i in (0, 1)]


def test_compacted_topics_are_refused(kafka: Broker, tmp_path: Path) -> None:
    for policy in ("compact", "compact,delete"):
        topic = kafka.topic(cleanup_policy=policy)
        with pytest.raises(UsageError, match="removes earlier ones"):
            input_of(kafka_job(tmp_path, kafka.servers, topic)).read()
    check_topic({"message.timestamp.type": "LogAppendTime", "cleanup.policy": "delete"}, "t")


SECRET = "s3cret-value"


@pytest.mark.parametrize(
    ("topic", "servers", "more", "error", "rule"),
    [
        ("nowhere", None, "", UsageError, "source.topic: is not on the broker"),
        ("t", "127.0.0.1:1", "", RunError, "source.servers: did not answer"),
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
    monkeypatch.setattr("pipelines.kafka_client.START_SECONDS", 1.0)
    monkeypatch.setenv("MECH", SECRET)
    job = kafka_job(tmp_path, servers or kafka.servers, topic, more)
    with pytest.raises(error, match=rule) as caught:
        input_of(job).identity() and input_of(job).read()
    assert SECRET not in str(caught.value)
    assert caught.value.__context__ is None or caught.value.__suppress_context__
    printed = capfd.readouterr()
    assert printed.out + printed.err == "", "the client is silent"


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


def test_readers_are_kept_and_closed(kafka: Broker, drive: Drive) -> None:
    topic = kafka.topic()
    kafka.produce(topic, [record(i) for i in range(10)])
    client = drive(topic).dofn.kafka
    readers = kafka_reader.Readers()
    with readers.lend(client, 0) as first:
        first.seek(0)
        while not first.take(10, 0.1).messages:
            pass
    with readers.lend(client, 0) as second, readers.lend(client, 0) as third:
        assert second is first, "goes on"
        assert third is not first, "one caller at a time"
    first.used -= 100
    third.used -= 100
    with pytest.raises(ValueError), readers.lend(client, 1):
        raise ValueError
    assert first._consumer is None, "unused ones are closed"
    assert not any(readers._free.values()), "a reader that failed is not used again"
