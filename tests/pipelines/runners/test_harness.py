"""A worker in a thread of this process: told to drain, it takes no more bundles."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from apache_beam.runners.worker.statesampler import StateSampler
from apache_beam.utils.counters import CounterFactory

from dpstream.pipelines.runners.harness import Harness, end_bundles_soon


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


def test_a_bundle_does_not_wait_for_its_sampler() -> None:
    """Beam's own looks grow to 200 ms, and a bundle's end waits for the next."""
    end_bundles_soon()
    sampler = StateSampler("stage", CounterFactory())
    sampler.start()
    time.sleep(0.1)
    begin = time.monotonic()
    sampler.stop()
    assert time.monotonic() - begin < 0.1 and sampler.sampling_period_ms <= 5


def test_one_that_never_began_has_left(harness: Harness) -> None:
    assert harness.left()


def test_a_worker_in_a_process_waits_for_its_engine() -> None:
    """The command that the pool starts: nothing listens there yet."""
    process = subprocess.Popen(
        [sys.executable, "-m", "dpstream.pipelines.runners.harness", "127.0.0.1:1", "1", "0", "-1"],
        stderr=subprocess.DEVNULL,
    )
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(6)
    finally:
        process.kill()
        process.wait()
