"""A worker in a thread of this process: told to drain, it takes no more bundles."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from dpstream.pipelines.runners.harness import Harness


@pytest.fixture
def harness() -> Iterator[Harness]:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    made = Harness(f"127.0.0.1:{port}", worker_id="1-1")
    yield made
    made._control_channel.close()
    server.stop(0).wait()


def test_a_worker_that_drains_takes_no_bundle(harness: Harness) -> None:
    assert harness.name == "1-1" and not harness.stopped
    harness.drain(time.monotonic() + 10)
    harness._request_process_bundle(None)  # else it would be looked into
    assert harness._bundles == 0


def test_draining_waits_for_bundles_until_its_deadline(harness: Harness) -> None:
    harness._bundles = 1
    begin = time.monotonic()
    harness.drain(begin + 0.05)
    assert time.monotonic() - begin >= 0.05

    def ended() -> None:
        with harness._idle:
            harness._bundles = 0
            harness._idle.notify_all()

    threading.Timer(0.02, ended).start()
    harness.drain(time.monotonic() + 30)
    assert time.monotonic() - begin < 20


def test_one_that_never_began_has_left(harness: Harness) -> None:
    assert harness.left()
