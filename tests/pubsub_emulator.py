"""The official Pub/Sub emulator (Java), found, started and stopped by the tests.

Looked for: a running one (PUBSUB_EMULATOR_HOST), the program PUBSUB_EMULATOR_BINARY, the Cloud
SDK's component.  With CI=true a missing emulator or a missing Java fails the tests; elsewhere
they are skipped, loudly.
"""

import itertools
import json
import os
import shutil
import subprocess
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from socket import socket
from typing import Any

import pytest

from tests import guarded
from tests.emulator import free_port

HOST = "PUBSUB_EMULATOR_HOST"
PROJECT = "test-project"
_PROGRAM = "platform/pubsub-emulator/bin/cloud-pubsub-emulator"
_numbers = itertools.count(1)


def binary() -> str | None:
    """The emulator's program, if there is one."""
    named, gcloud = os.environ.get("PUBSUB_EMULATOR_BINARY"), shutil.which("gcloud")
    roots = [Path(gcloud).resolve().parents[1]] if gcloud else []
    for root in [*roots, Path("/usr/lib/google-cloud-sdk")]:
        if named is None and (root / _PROGRAM).exists():
            named = str(root / _PROGRAM)
    return named


@contextmanager
def running() -> Iterator["Emulator"]:
    """A running emulator; its host and port are in the environment, for clients made after."""
    from dpstream.pipelines.connectors.pubsub import source as pubsub_client
    from dpstream.pipelines.connectors.pubsub import source as source_pubsub

    before, process = os.environ.get(HOST), None
    if before is None:
        program = binary()
        if program is None or shutil.which("java") is None:
            _missing()
        host = f"127.0.0.1:{free_port()}"
        process = guarded.start(
            [str(program), "--host=127.0.0.1", f"--port={host.split(':')[1]}"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.environ[HOST] = host
        _await(host, process)
    pubsub_client.client.cache_clear()
    try:
        yield Emulator(process)
    finally:
        source_pubsub.PULLERS.close()
        pubsub_client.client.cache_clear()
        if process is not None:
            guarded.kill(process)
            os.environ.pop(HOST)


def _missing() -> None:
    text = "the Pub/Sub emulator is missing (gcloud component pubsub-emulator, and Java)"
    if os.environ.get("CI") == "true":
        pytest.fail(text)
    warnings.warn(pytest.PytestWarning(text), stacklevel=2)
    pytest.skip(text)


def _await(host: str, process: subprocess.Popen[bytes]) -> None:
    name, port = host.split(":")
    for _ in range(4_800):
        with closing(socket()) as probe:
            if probe.connect_ex((name, int(port))) == 0:
                return
        if process.poll() is not None:
            break
        time.sleep(0.05)
    raise RuntimeError("the emulator did not start")


class Emulator:
    """Topics and subscriptions of a running emulator; ``process`` if the test started it."""

    def __init__(self, process: subprocess.Popen[bytes] | None) -> None:
        from google.cloud import pubsub_v1

        self.process = process
        self.publisher = pubsub_v1.PublisherClient()
        self.subscriber = pubsub_v1.SubscriberClient()

    def subscription(self, **more: Any) -> tuple[str, str]:
        """A new topic and a subscription that fits, by their full names."""
        name = f"t{os.getpid()}-{next(_numbers)}"
        topic = self.publisher.topic_path(PROJECT, name)
        self.publisher.create_topic(name=topic)
        subscription = self.subscriber.subscription_path(PROJECT, name)
        settings = {
            "retain_acked_messages": True,
            "message_retention_duration": {"seconds": 600},
            "ack_deadline_seconds": 60,
        }
        request = {"name": subscription, "topic": topic, **settings, **more}
        self.subscriber.create_subscription(request=request)
        return topic, subscription

    def publish(self, topic: str, messages: Iterable[Any]) -> list[str]:
        """Publish JSON objects (or bytes); their ids."""
        texts = [m if isinstance(m, bytes) else json.dumps(m).encode() for m in messages]
        futures = [self.publisher.publish(topic, text, n="x") for text in texts]
        return [future.result(timeout=30) for future in futures]
