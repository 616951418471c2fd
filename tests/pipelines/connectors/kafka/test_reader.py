"""What messages of a partition become: each by itself, in runs of consecutive offsets; the topic.

Of a topic: whose stamps it has, what the client is told, errors at the start.
"""

import numpy as np
import pyarrow as pa
import pytest
from confluent_kafka import KafkaError, KafkaException

from dpstream.accounting.errors import RunError, UsageError, instance
from dpstream.pipelines.connectors.kafka.reader import (
    APPEND_TIME,
    LOG_APPEND_TIME,
    Kafka,
    PartitionMessages,
    check_topic,
    parts,
    refused_at_start,
)
from dpstream.pipelines.formats.lines import MAX_LINE_BYTES, Objects
from dpstream.pipelines.formats.rows import Refused, Rows
from dpstream.pipelines.project.job_parts import SourceConfig

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


def test_a_topic_that_can_be_read() -> None:
    check_topic(GOOD, "t")
    for change in ({"message.timestamp.type": "CreateTime"}, {"cleanup.policy": "delete, compact"}):
        with pytest.raises(UsageError) as error:
            check_topic(GOOD | change, "t")
        assert error.value.field == "table.topic" and "--topic t" in error.value.fix


def test_secrets_are_looked_up_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PASSWORD", "SECRET")
    options = {"sasl.password": "env:PASSWORD", "client.id": "mine"}
    kafka = Kafka.of(SourceConfig("kafka", topic="t", servers="h:1", options=options))
    settings = kafka.settings()
    assert settings["sasl.password"] == "SECRET" and settings["client.id"] == "mine"
    assert settings["isolation.level"] == "read_committed"
    assert settings["bootstrap.servers"] == "h:1" and settings["enable.auto.commit"] is False
    assert repr(kafka) == "Kafka('t')" and "SECRET" not in str(kafka.options)


@pytest.mark.parametrize("name", ["isolation.level", "bootstrap.servers", "plugin.library.paths"])
def test_settings_that_decide_what_is_read(name: str) -> None:
    source = SourceConfig("kafka", topic="t", servers="h:1", options={name: "x"})
    with pytest.raises(UsageError) as error:
        Kafka.of(source)
    assert error.value.field.startswith("table.options")


def test_errors_at_the_start() -> None:
    missing = refused_at_start(KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)))
    assert isinstance(missing, UsageError) and missing.field == "table.topic"
    away = refused_at_start(KafkaException(KafkaError(KafkaError._TRANSPORT)))
    assert isinstance(away, RunError) and away.field == "table.servers"
