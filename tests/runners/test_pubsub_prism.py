"""Pub/Sub on Prism: every message once, acknowledged, and the watermark goes on."""

import threading
import time
from collections.abc import Iterator

import pytest

from dpstream.pipelines.connectors.pubsub import client as pubsub_client
from dpstream.pipelines.connectors.pubsub.source import PULLERS
from dpstream.pipelines.connectors.registry import input_of
from tests.drive import letters_of
from tests.pipelines.connectors.pubsub.test_source import MakePubSubJob, make_pubsub_job, row
from tests.pubsub_emulator import Emulator
from tests.pubsub_emulator import running as emulated
from tests.runners.prism import running, wait_for

__all__ = ["make_pubsub_job"]


@pytest.fixture(scope="module")
def emulator() -> Iterator[Emulator]:
    with emulated() as server:
        yield server


def test_messages_while_they_are_published(
    emulator: Emulator, make_pubsub_job: MakePubSubJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, subscription = emulator.subscription()
    acknowledged: set[str] = set()
    tell = pubsub_client.acknowledge

    def note(name: str, ack_ids: list[str]) -> None:
        acknowledged.update(ack_ids)
        tell(name, ack_ids)

    monkeypatch.setattr(pubsub_client, "acknowledge", note)
    ids: list[str] = []

    def publish() -> None:
        for i in range(20):
            ids.extend(emulator.publish(topic, [row(100 * i + n) for n in range(100)]))
        emulator.publish(topic, [b"poison"])

    thread = threading.Thread(target=publish)
    bell = time.time_ns() // 1000 + 4_000_000
    with running(input_of(make_pubsub_job(subscription)).read(), bell) as (seen, _):
        thread.start()
        thread.join()
        wait_for(lambda: seen.rows() >= 2000 and len(seen.batches("dead")) > 0)
        wait_for(lambda: seen.rung is not None)
        wait_for(lambda: len(acknowledged) == 2001)
        message_ids = [one for batch in seen.batches() for one in batch["_message_id"].to_pylist()]
        letters = letters_of(seen.batches("dead"))
    PULLERS.close()
    assert sorted(message_ids) == sorted(ids)
    assert [reason for _, _, reason in letters] == ["malformed"]
    assert seen.rung == 2000
