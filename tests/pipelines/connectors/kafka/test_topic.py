"""Kafka's client and topic: settings that a job may give, and reads and writes of a topic."""

import ctypes
import itertools
import pickle
import re
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import confluent_kafka
import numpy as np
import pyarrow as pa
import pytest
from confluent_kafka import KafkaError, KafkaException

from dpstream.accounting.errors import PolicyError, RunError, UsageError, instance
from dpstream.pipelines.connectors.kafka.client import (
    CERTIFICATES,
    KafkaTopic,
    TopicDescription,
    answer,
    check_options,
    looked_up,
    refuse,
)
from dpstream.pipelines.connectors.kafka.reader import (
    APPEND_TIME,
    LOG_APPEND_TIME,
    Kafka,
    PartitionMessages,
    check_topic,
    parts,
    refused_at_start,
)
from dpstream.pipelines.connectors.kafka.sink import KafkaSink, read_kafka_releases, refuse_unfit
from dpstream.pipelines.connectors.registry import input_of, sink_of
from dpstream.pipelines.connectors.sink import is_row
from dpstream.pipelines.formats.lines import MAX_LINE_BYTES
from dpstream.pipelines.formats.rows import Refused, Rows
from dpstream.pipelines.formats.texts import Objects
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.project.source import Source
from dpstream.pipelines.stream.begin import begin
from tests.golden import refusals
from tests.kafka_broker import Broker, running
from tests.pipelines.kafka_jobs import (
    broker,
    contents,
    fresh,
    gone,
    kafka_job,
    made,
    table,
    topic_of,
)
from tests.published import RUNS, Published

__all__ = ["broker", "fresh", "made"]


def test_a_topic_must_be_there_and_compacted(
    broker: Broker, fresh: Published, refused: refusals.Refused
) -> None:
    refused(lambda: begin(fresh.job(table(broker, "none"))))
    refused(lambda: begin(fresh.job(table(broker, topic_of(broker, policy="delete")))))
    both = table(broker, topic_of(broker, policy="compact,delete"))
    sink = fresh.run(both)
    refused(lambda: sink_of(sink).prepare(restoring=True))


def sent(broker: Broker, job: Job, key: str, value: bytes | None) -> None:
    """Somebody else's message."""
    producer = broker.producer()
    producer.produce(job.sink.topic, value, key, 1)
    assert producer.flush(30) == 0


def test_rows_that_a_topic_let_go_of_are_left_out(
    broker: Broker, fresh: Published, made: tuple[Published, pa.Table], refused: refusals.Refused
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
    refused(read_kafka_releases, job)


def test_a_row_too_many_is_refused_also_where_rows_go(
    broker: Broker, fresh: Published, refused: refusals.Refused
) -> None:
    job = fresh.run(table(broker, topic_of(broker, policy="compact,delete")))
    row = next(values[0] for key, values in contents(job).items() if is_row(key))
    sent(broker, job, "ab" * 16, row)
    refused(read_kafka_releases, job)


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


def test_a_row_is_one_line(broker: Broker, fresh: Published, refused: refusals.Refused) -> None:
    """Or two rows in one message and none in another would move the rows between them."""
    job = fresh.run(table(broker, topic_of(broker)))
    row = next(values[0] for key, values in contents(job).items() if is_row(key))
    sent(broker, job, "ab" * 16, row + b"\n" + row)
    sent(broker, job, "cd" * 16, b"")
    refused(read_kafka_releases, job)


def test_without_the_client(broker: Broker, fresh: Published, refused: refusals.Refused) -> None:
    job = fresh.job(table(broker, topic_of(broker)))
    uses: list[Callable[[Any], Any]] = [
        lambda sink: sink.prepare(),
        lambda sink: sink.used(),
        lambda sink: list(sink.published()),
        lambda sink: sink._topic.send([("key", b"value", 0)]),
    ]
    for use in uses:
        with mock.patch.dict(sys.modules, {"confluent_kafka": None}):
            refused(use, sink_of(job))
    with mock.patch.dict(sys.modules, {"confluent_kafka": None}):
        refused(read_kafka_releases, job)


def test_a_replicated_topic_must_not_acknowledge_alone(refused: refusals.Refused) -> None:
    refuse_unfit(TopicDescription(3, {"compact"}, 1, 1))
    refuse_unfit(TopicDescription(3, {"compact"}, 3, 2))
    refused(lambda: refuse_unfit(TopicDescription(3, {"compact"}, 3, 1)))


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


def test_options_and_pickles(
    broker: Broker, fresh: Published, monkeypatch: Any, refused: refusals.Refused
) -> None:
    for name in ("acks", "enable.idempotence", "debug", "log_level"):
        refused(sink_of, fresh.job(table(broker, "t", **{name: "0"})))
    for name in ("sasl.password", "ssl.key.pem", "sasl.oauthbearer.client.secret"):
        caught = refused(sink_of, fresh.job(table(broker, "t", **{name: "hunter2"})))
        assert "hunter2" not in str(caught)
    # What the client says of them quotes their values, and is of several kinds.
    for name in ("nonsense", "error_cb", "stats_cb", "throttle_cb", "default.topic.config"):
        wrong = fresh.job(table(broker, topic_of(broker), **{name: "hunter2"}))
        caught = refused(instance(sink_of(wrong), KafkaSink).used)
        assert "hunter2" not in str(caught)
    for name, value in itertools.product(
        ("message.timeout.ms", "delivery.timeout.ms"), ("0", "00", "0x0", "-1", "hunter2")
    ):
        wrong = fresh.job(table(broker, topic_of(broker), **{name: value}))
        caught = refused(sink_of(wrong).prepare)
        assert "hunter2" not in str(caught)
    job = fresh.job(table(broker, topic_of(broker), **{"client.id": "env:SINK_CLIENT"}))
    refused(lambda: instance(sink_of(job), KafkaSink).used())
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


BEYOND = [
    "plugin.library.paths", "sasl.kerberos.kinit.cmd", "sasl.kerberos.keytab",
    "sasl.kerberos.principal", "sasl.kerberos.service.name", "ssl.engine.location",
    "ssl.engine.id", "ssl.providers", "offset.store.path", "offset.store.method",
    "sasl.oauthbearer.assertion.file", "sasl.oauthbearer.assertion.private.key.file",
    "sasl.oauthbearer.assertion.jwt.template.file",
]  # fmt: skip
#: Words of a description that tell of files, commands and code.
_WORDS = re.compile(
    r"\b(path|file|director\w+|command|librar\w+|plugin|engine|provider\w*)\b", re.I
)


@pytest.mark.parametrize("name", BEYOND)
def test_refused_everywhere(name: str, tmp_path: Path, refused: refusals.Refused) -> None:
    options = {name: "/tmp/evil"}
    job = kafka_job(tmp_path, "127.0.0.1:1", "t", f"options = {{ '{name}' = '/tmp/evil' }}")
    caught = refused(input_of, job)
    assert "evil" not in str(caught)
    refused(KafkaSink, "127.0.0.1:1", "t", options, job.plan.timeline)
    refused(check_options, "source", {name: "env:PATH"}, ())


def described() -> dict[str, str]:
    """What librdkafka says of its settings: name -> description."""
    folder = Path(confluent_kafka.__file__).parents[1] / "confluent_kafka.libs"
    library, c = ctypes.CDLL(str(next(folder.glob("librdkafka*")))), ctypes.CDLL(None)
    c.fopen.restype = ctypes.c_void_p
    memory = ctypes.c_char_p()
    size = ctypes.c_size_t()
    c.open_memstream.restype = ctypes.c_void_p
    stream = ctypes.c_void_p(c.open_memstream(ctypes.byref(memory), ctypes.byref(size)))
    library.rd_kafka_conf_properties_show(stream)
    c.fclose(stream)
    text = ctypes.string_at(memory, size.value).decode()
    rows = [line.split("|") for line in text.splitlines() if line.count("|") >= 5]
    return {row[0].strip(): row[-1] for row in rows}


def test_every_setting_of_the_client_is_judged() -> None:
    """Strings whose description tells of files, commands or code are refused, certificates apart;
    the others pass.  A new version of the client shows here what it can reach."""
    names = {name for name, text in described().items() if "*Type: string" in text}
    assert {"client.id", "plugin.library.paths", "ssl.ca.location"} <= names
    passed = set()
    for name in names:
        try:
            check_options("source", {name: "env:PATH"}, ())
            passed.add(name)
        except UsageError:
            assert name in BEYOND, name
    suspects = {name for name in names if _WORDS.search(described()[name])}
    # Contents, not names of files; and words that mean something else.
    harmless = {
        *(name for name in names if name.endswith(".pem") or "passphrase" in name),
        "ssl.key.password", "ssl.ca.certificate.stores", "sasl.oauthbearer.scope",
        "sasl.oauthbearer.assertion.claim.aud", "sasl.oauthbearer.assertion.claim.iss",
        "sasl.oauthbearer.assertion.claim.sub", "sasl.oauthbearer.token.endpoint.url",
        "sasl.oauthbearer.client.secret", "sasl.oauthbearer.client.credentials.client.secret",
        "sasl.oauthbearer.client.id", "sasl.oauthbearer.client.credentials.client.id",
    }  # fmt: skip
    assert passed & suspects <= CERTIFICATES | harmless, passed & suspects - CERTIFICATES - harmless
    assert passed >= CERTIFICATES


def test_functions_cannot_be_written_as_text() -> None:
    functions = [name for name, text in described().items() if "see dedicated API" in text]
    assert len(functions) > 10
    for name in functions:
        with pytest.raises((confluent_kafka.KafkaException, TypeError, ValueError)):
            confluent_kafka.Producer({name: "x", "log_level": 0})


@pytest.mark.parametrize(
    "options",
    [
        {"sasl.mechanism": "GSSAPI"},
        {"sasl.mechanisms": "gssapi"},
        {"security.protocol": "SASL_SSL"},
        {"security.protocol": "sasl_plaintext"},
    ],
)
def test_kerberos_runs_a_command(
    options: dict[str, str], monkeypatch: pytest.MonkeyPatch, refused: refusals.Refused
) -> None:
    refused(check_options, "source", options, ())
    [(name, value)] = options.items()
    monkeypatch.setenv("HIDDEN", value)
    check_options("source", {name: "env:HIDDEN"}, ())
    refused(looked_up, "source", {name: "env:HIDDEN"})


def test_other_mechanisms_pass() -> None:
    for mechanism in ("PLAIN", "SCRAM-SHA-512", "OAUTHBEARER"):
        given = {"security.protocol": "SASL_SSL", "sasl.mechanism": mechanism}
        check_options("source", given | {"ssl.ca.location": "ca.pem"}, ())
        assert looked_up("source", given) == given


COLUMNS = ("a", APPEND_TIME)


def messages(*values: bytes | None, kind: int = LOG_APPEND_TIME) -> PartitionMessages:
    count = len(values)
    offsets, stamps = np.arange(count) * 1, 1_000 + np.arange(count)
    return PartitionMessages(offsets, np.full(count, kind), stamps, list(values))


def test_rows_have_the_brokers_stamp() -> None:
    [rows] = parts(messages(b'{"a": 1}', b'{"a": "x"}'), Objects(["a"]), COLUMNS)
    assert not isinstance(rows, Refused)
    assert rows.batch.schema.names == list(COLUMNS) and rows.batch["a"].to_pylist() == ["1", "x"]
    assert rows.batch[APPEND_TIME].cast(pa.int64()).to_pylist() == [1_000_000, 1_001_000]


@pytest.mark.parametrize(
    ("value", "reason"),
    [(None, "empty"), (b"", "empty"), (b"no", "malformed"),
     (b'{"a": "' + b"x" * MAX_LINE_BYTES + b'"}', "message_too_long")],
)  # fmt: skip
def test_a_message_that_is_none_decides_about_itself(value: bytes | None, reason: str) -> None:
    refused, *rows = parts(messages(b'{"a": 1}', value, b'{"a": 3}'), Objects(["a"]), COLUMNS)
    assert isinstance(refused, Refused)
    assert (refused.offsets.tolist(), refused.reasons) == ([1], [reason])
    assert [instance(part, Rows).offset for part in rows] == [0, 2]


def test_stamps_of_producers_are_refused() -> None:
    batch = messages(b'{"a": 1}', kind=1)
    [refused] = parts(batch, Objects(["a"]), COLUMNS)
    assert isinstance(refused, Refused) and refused.reasons == ["not_the_brokers_stamp"]
    assert batch.last_append == -1 and messages(b"", b"").last_append == 1_001


GOOD = {"message.timestamp.type": "LogAppendTime", "cleanup.policy": "delete"}


def test_a_topic_that_can_be_read(refused: refusals.Refused) -> None:
    check_topic(GOOD, "t")
    for change in ({"message.timestamp.type": "CreateTime"}, {"cleanup.policy": "delete, compact"}):
        refused(check_topic, GOOD | change, "t")


def test_secrets_are_looked_up_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PASSWORD", "SECRET")
    options = {"sasl.password": "env:PASSWORD", "client.id": "mine"}
    kafka = Kafka.of(Source("kafka", topic="t", servers="h:1", options=options))
    settings = kafka.settings()
    assert settings["sasl.password"] == "SECRET" and settings["client.id"] == "mine"
    assert settings["isolation.level"] == "read_committed"
    assert settings["bootstrap.servers"] == "h:1" and settings["enable.auto.commit"] is False
    assert repr(kafka) == "Kafka('t')" and "SECRET" not in str(kafka.options)


@pytest.mark.parametrize("name", ["isolation.level", "bootstrap.servers", "plugin.library.paths"])
def test_settings_that_decide_what_is_read(name: str, refused: refusals.Refused) -> None:
    source = Source("kafka", topic="t", servers="h:1", options={name: "x"})
    refused(Kafka.of, source)


def test_errors_at_the_start() -> None:
    missing = refused_at_start(KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)))
    assert isinstance(missing, UsageError) and missing.field == "table.topic"
    away = refused_at_start(KafkaException(KafkaError(KafkaError._TRANSPORT)))
    assert isinstance(away, RunError) and away.field == "table.servers"
