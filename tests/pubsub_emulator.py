"""The official Pub/Sub emulator, found, started and stopped by the tests.

Looked for in this order: a running one (PUBSUB_EMULATOR_HOST), its jar (PUBSUB_EMULATOR_JAR), the
Cloud SDK's component.  With CI=true a missing emulator fails the tests; elsewhere they are skipped,
loudly.  It keeps everything in memory.
"""

import itertools
import os
import shutil
import socket
import subprocess
import time
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests.emulator import free_port

HOST = "PUBSUB_EMULATOR_HOST"
PROJECT = "test-project"
_ROOTS = ("/usr/lib/google-cloud-sdk", "/usr/share/google-cloud-sdk")
_numbers = itertools.count(1)


def jar() -> str | None:
    """The emulator's program, if there is one."""
    named = os.environ.get("PUBSUB_EMULATOR_JAR")
    if named:
        return named
    gcloud = shutil.which("gcloud")
    roots = [*([Path(gcloud).resolve().parents[1]] if gcloud else []), *map(Path, _ROOTS)]
    found = [p for r in roots for p in r.glob("platform/pubsub-emulator/lib/*-all.jar")]
    return str(found[0]) if found else None


@contextmanager
def running() -> Iterator[str]:
    """A running emulator's host and port, in the environment as well."""
    before = os.environ.get(HOST)
    if before:
        yield before
        return
    program, java = jar(), shutil.which("java")
    if program is None or java is None:
        missing()
    host = f"127.0.0.1:{free_port()}"
    process = subprocess.Popen(
        [str(java), "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-jar",
         str(program), "--host=127.0.0.1", f"--port={host.rpartition(':')[2]}"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.environ[HOST] = host
    try:
        _await(host, process)
        yield host
    finally:
        process.kill()
        process.wait()
        os.environ.pop(HOST)


def missing() -> None:
    """No emulator: a failure where it must be there, a loud skip elsewhere."""
    text = "the Pub/Sub emulator is missing (gcloud component pubsub-emulator, and a Java)"
    if os.environ.get("CI") == "true":
        pytest.fail(text)
    warnings.warn(pytest.PytestWarning(text), stacklevel=2)
    pytest.skip(text)


def _await(host: str, process: subprocess.Popen[bytes]) -> None:
    name, port = host.split(":")
    for _ in range(600):
        with closing(socket.socket()) as probe:
            if probe.connect_ex((name, int(port))) == 0:
                return
        if process.poll() is not None:
            break
        time.sleep(0.05)
    raise RuntimeError("the emulator did not start")


def fresh_topic(ordered: bool = True) -> tuple[str, str]:
    """(topic, subscription) that exist from now on."""
    from google.cloud.pubsub_v1 import PublisherClient, SubscriberClient

    name = f"t{os.getpid()}-{next(_numbers)}"
    topic = f"projects/{PROJECT}/topics/{name}"
    subscription = f"projects/{PROJECT}/subscriptions/{name}"
    PublisherClient().create_topic(name=topic)
    with SubscriberClient() as client:
        client.create_subscription(
            request={
                "name": subscription,
                "topic": topic,
                "enable_message_ordering": ordered,
                "ack_deadline_seconds": 60,
            }
        )
    return topic, subscription
