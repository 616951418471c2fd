"""What tests of more than one folder share."""

from collections.abc import Iterator

import pytest

from tests.kafka_broker import Broker, running


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A running Kafka broker; a test that stops it starts it again."""
    with running(tmp_path_factory.mktemp("kafka")) as broker:
        yield broker
