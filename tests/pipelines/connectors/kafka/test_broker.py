"""A source's topic: whose stamps it has, what the client is told, errors at the start."""

import pytest
from confluent_kafka import KafkaError, KafkaException

from dpstream.accounting.errors import RunError, UsageError
from dpstream.pipelines.connectors.kafka.broker import Kafka, check_topic, refused_at_start
from dpstream.pipelines.project.job_parts import SourceConfig

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
