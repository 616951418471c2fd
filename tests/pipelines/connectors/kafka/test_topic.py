"""The topic of the sink of Kafka on a real broker: what is refused, and reading it back."""

import itertools
import pickle
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest

from dpstream.accounting.errors import PolicyError, RunError, UsageError, instance
from dpstream.pipelines.connectors.kafka.client import answer, refuse
from dpstream.pipelines.connectors.kafka.sink import KafkaSink, read_kafka_releases, refuse_unfit
from dpstream.pipelines.connectors.kafka.topic import KafkaTopic, TopicDescription
from dpstream.pipelines.connectors.registry import sink_of
from dpstream.pipelines.connectors.sink import is_row
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.stream.begin import begin
from tests.kafka_broker import Broker, running
from tests.pipelines.kafka_sinks import (
    broker,
    contents,
    fresh,
    gone,
    made,
    table,
    topic_of,
)
from tests.published import RUNS, Published

__all__ = ["broker", "fresh", "made"]


def test_a_topic_must_be_there_and_compacted(broker: Broker, fresh: Published) -> None:
    with pytest.raises(RunError, match=r"sink\.topic: is not there.*kafka-topics --create"):
        begin(fresh.job(table(broker, "none")))
    with pytest.raises(PolicyError, match="is not compacted"):
        begin(fresh.job(table(broker, topic_of(broker, policy="delete"))))
    both = table(broker, topic_of(broker, policy="compact,delete"))
    sink = fresh.run(both)
    with pytest.raises(PolicyError, match="lets releases go"):
        sink_of(sink).prepare(restoring=True)


def sent(broker: Broker, job: Job, key: str, value: bytes | None) -> None:
    """Somebody else's message."""
    producer = broker.producer()
    producer.produce(job.sink.topic, value, key, 1)
    assert producer.flush(30) == 0


def test_rows_that_a_topic_let_go_of_are_left_out(
    broker: Broker, fresh: Published, made: tuple[Published, pa.Table]
) -> None:
    job = fresh.run(table(broker, topic_of(broker, policy="compact,delete")))
    assert read_kafka_releases(job).equals(made[1])
    ids = [key for key in contents(job) if is_row(key)]
    first = [key for key in ids if int.from_bytes(bytes.fromhex(key)[:8], "little") % 2 == 0]
    gone(broker, job, 1, len(first) // 2)  # rows go before the other partition's, and the seals
    left = {bytes.fromhex(key) for key in contents(job) if is_row(key)}
    assert len(left) == len(ids) - len(first) // 2
    step = ["window_start", "trigger"]
    rows = made[1].to_pylist()
    short = {tuple(r[c] for c in step) for r in rows if r["release_id"] not in left}
    mask = [tuple(r[c] for c in step) not in short for r in rows]
    assert 0 < sum(mask) < len(rows)
    assert read_kafka_releases(job).equals(made[1].filter(pa.array(mask)))
    # Of a topic that is compacted only, rows do not go.
    broker.set(job.sink.topic or "", "cleanup.policy", "compact")
    with pytest.raises(PolicyError, match="holds not what the seal of window"):
        read_kafka_releases(job)


def test_a_row_too_many_is_refused_also_where_rows_go(broker: Broker, fresh: Published) -> None:
    job = fresh.run(table(broker, topic_of(broker, policy="compact,delete")))
    row = next(values[0] for key, values in contents(job).items() if is_row(key))
    sent(broker, job, "ab" * 16, row)
    with pytest.raises(PolicyError, match="holds not what the seal of window"):
        read_kafka_releases(job)


@pytest.mark.parametrize("value", [b"hunter2", b'{"page": "hunter2"}', b"", None, b"1\n2"])
def test_foreign_messages_are_refused_without_their_content(
    broker: Broker, fresh: Published, value: bytes | None
) -> None:
    job = fresh.run(table(broker, topic_of(broker)))
    sent(broker, job, "hunter2-" + "x" * 24, value)  # no row's name
    before = read_kafka_releases(job)
    assert before.num_rows > 10
    sent(broker, job, "ab" * 16, value)
    with pytest.raises(PolicyError, match="holds a message that is no release") as caught:
        read_kafka_releases(job)
    assert "hunter2" not in str(caught.value) and caught.value.__cause__ is None


def test_a_row_is_one_line(broker: Broker, fresh: Published) -> None:
    """Or two rows in one message and none in another would move the rows between them."""
    job = fresh.run(table(broker, topic_of(broker)))
    row = next(values[0] for key, values in contents(job).items() if is_row(key))
    sent(broker, job, "ab" * 16, row + b"\n" + row)
    sent(broker, job, "cd" * 16, b"")
    with pytest.raises(PolicyError, match="holds a message that is no release"):
        read_kafka_releases(job)


def test_without_the_client(broker: Broker, fresh: Published) -> None:
    job = fresh.job(table(broker, topic_of(broker)))
    uses: list[Callable[[Any], Any]] = [
        lambda sink: sink.prepare(),
        lambda sink: sink.used(),
        lambda sink: list(sink.published()),
        lambda sink: sink._topic.send([("key", b"value", 0)]),
    ]
    for use in uses:
        with (
            mock.patch.dict(sys.modules, {"confluent_kafka": None}),
            pytest.raises(UsageError, match=r"sink\.kind: .*`kafka`.*\[kafka"),
        ):
            use(sink_of(job))
    with (
        mock.patch.dict(sys.modules, {"confluent_kafka": None}),
        pytest.raises(UsageError, match=r"sink\.kind: .*`kafka`.*\[kafka"),
    ):
        read_kafka_releases(job)


def test_a_replicated_topic_must_not_acknowledge_alone() -> None:
    refuse_unfit(TopicDescription(3, {"compact"}, 1, 1))
    refuse_unfit(TopicDescription(3, {"compact"}, 3, 2))
    with pytest.raises(PolicyError, match=r"min\.insync\.replicas=2"):
        refuse_unfit(TopicDescription(3, {"compact"}, 3, 1))


def test_what_a_topic_is(broker: Broker) -> None:
    topic = broker.topic(2, cleanup_policy="compact,delete")
    broker.set(topic, "min.insync.replicas", "2")
    description = KafkaTopic(broker.servers, topic, {}).describe()
    assert description == TopicDescription(2, {"compact", "delete"}, 1, 2)


def test_a_deleted_topic_is_not_made_again_by_writing(tmp_path: Path) -> None:
    with running(tmp_path / "own", "auto.create.topics.enable=true") as own:
        topic = KafkaTopic(own.servers, "gone", {"message.timeout.ms": "3000"})
        with pytest.raises(RunError):
            topic.send([("key", b"value", 0)])
        topic.close()
        assert "gone" not in own.admin().list_topics(timeout=10).topics


def test_options_and_pickles(broker: Broker, fresh: Published, monkeypatch: Any) -> None:
    for name in ("acks", "enable.idempotence", "debug", "log_level"):
        with pytest.raises(UsageError, match=f"sink.options.{name}: is set by dpstream"):
            sink_of(fresh.job(table(broker, "t", **{name: "0"})))
    for name in ("sasl.password", "ssl.key.pem", "sasl.oauthbearer.client.secret"):
        with pytest.raises(UsageError, match=f"sink.options.{name}: is a secret") as caught:
            sink_of(fresh.job(table(broker, "t", **{name: "hunter2"})))
        assert "hunter2" not in str(caught.value)
    # What the client says of them quotes their values, and is of several kinds.
    for name in ("nonsense", "error_cb", "stats_cb", "throttle_cb", "default.topic.config"):
        wrong = fresh.job(table(broker, topic_of(broker), **{name: "hunter2"}))
        with pytest.raises(UsageError, match="are refused by Kafka's client") as caught:
            instance(sink_of(wrong), KafkaSink).used()
        assert "hunter2" not in str(caught.value)
    for name, value in itertools.product(
        ("message.timeout.ms", "delivery.timeout.ms"), ("0", "00", "0x0", "-1", "hunter2")
    ):
        wrong = fresh.job(table(broker, topic_of(broker), **{name: value}))
        with pytest.raises(UsageError, match=f"sink.options.{name}: is no deadline") as caught:
            sink_of(wrong).prepare()
        assert "hunter2" not in str(caught.value)
    job = fresh.job(table(broker, topic_of(broker), **{"client.id": "env:SINK_CLIENT"}))
    with pytest.raises(UsageError, match=r"sink.options.client.id: names an environment variable"):
        instance(sink_of(job), KafkaSink).used()
    monkeypatch.setenv("SINK_CLIENT", "secret-name")
    job = fresh.run(table(broker, topic_of(broker), **{"client.id": "env:SINK_CLIENT"}))
    sink = instance(sink_of(job), KafkaSink)
    assert len(list(sink.published())) == RUNS
    assert b"secret-name" not in pickle.dumps(sink)
    assert len(list(pickle.loads(pickle.dumps(sink)).published())) == RUNS  # noqa: S301


def test_a_sink_that_has_written_can_be_shipped(broker: Broker, fresh: Published) -> None:
    fresh.run(table(broker, topic_of(broker)))
    batches, job = fresh.batches(), fresh.job(table(broker, topic_of(broker)))
    sink = sink_of(job)
    assert len(sink.write(batches[:4])) == 4
    again = pickle.loads(pickle.dumps(sink))  # noqa: S301
    assert len(again.write(batches)) == RUNS == len(sink.write(batches))
    assert all(len(values) == 1 for values in contents(job).values())


def test_a_client_that_hangs_is_a_coded_error() -> None:
    from confluent_kafka import KafkaException

    with pytest.raises(KafkaException) as caught:
        answer(Future(), 0.01)
    with pytest.raises(RunError, match="cannot be read: _TIMED_OUT"):
        refuse(caught.value.args[0], "cannot be read")
