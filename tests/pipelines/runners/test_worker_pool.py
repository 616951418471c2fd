"""Workers and guards: a pool of processes, a worker's harness, and what ends with its parent."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from apache_beam.runners.worker.statesampler import StateSampler
from apache_beam.utils.counters import CounterFactory

from dpstream.pipelines.runners.guard import stop, with_parent
from dpstream.pipelines.runners.harness import Harness, end_bundles_soon
from dpstream.pipelines.runners.worker_pool import (
    LoopbackFlinkRunner,
    LoopbackPool,
    LoopbackPrismRunner,
    parser,
)


def worker_request(url: str) -> SimpleNamespace:
    here = SimpleNamespace(url="127.0.0.1:9")
    return SimpleNamespace(
        worker_id="1-1",
        control_endpoint=SimpleNamespace(url=url),
        logging_endpoint=here,
        artifact_endpoint=here,
        provision_endpoint=here,
    )


@pytest.mark.parametrize("host", ["10.0.0.1", "example.org", "0.0.0.0", "127.0.0.1.example.org"])
def test_no_worker_for_another_machines_engine(host: str) -> None:
    pool = LoopbackPool(use_process=True)
    assert "another machine" in pool.StartWorker(worker_request(f"{host}:80"), None).error
    assert pool._workers == [] and pool._harnesses == []


def test_what_starts_a_worker_names_its_engine() -> None:
    request = worker_request("localhost:50")
    own = LoopbackPool(use_process=True, state_cache_size=7, data_buffer_time_limit_ms=9)
    assert own._command(request)[-4:] == ["localhost:50", "1-1", "7", "9"]
    boot = LoopbackPool(use_process=True, container_executable="/opt/boot")
    command = boot._command(request)
    assert command[0] == "/opt/boot" and "--control_endpoint=localhost:50" in command


def test_an_end_of_nobody_is_answered_at_once() -> None:
    pool = LoopbackPool(use_process=True)
    pool.StopWorker(SimpleNamespace(worker_id="1-1"), None)
    assert pool._requests == []


def test_the_port_must_be_named() -> None:
    assert parser().parse_args(["--service_port=0"]).service_port == 0
    with pytest.raises(SystemExit):
        parser().parse_args([])


class Part:
    """Notes what is asked of it, by name."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls, self.pool = name, calls, self

    def __getattr__(self, verb: str) -> Any:
        return lambda: self.calls.append(f"{self.name} {verb}")


def test_workers_finish_before_their_engine_ends() -> None:
    for kind in (LoopbackPrismRunner, LoopbackFlinkRunner):
        calls: list[str] = []
        runner = kind()
        server: Any = Part("server", calls)
        pools: Any = (Part("a", calls), Part("b", calls))
        runner._server, runner._pools = server, pools
        runner.check()
        runner.drain()
        assert calls == ["server check", "a drain", "b drain"]
        calls.clear()
        runner.close()
        assert calls == ["a finish", "b finish", "server stop", "a stop", "b stop"]
        runner.close()
        runner.check()
        assert len(calls) == 5


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


def test_the_command_follows_this_process() -> None:
    words = with_parent(["java", "-port", 8080])
    assert words[0] == sys.executable and words[-4:] == [str(os.getpid()), "java", "-port", "8080"]
    assert all(isinstance(word, str) for word in words)


def test_a_command_that_ignores_the_request_is_killed() -> None:
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True)\n"
    stubborn = subprocess.Popen(
        [sys.executable, "-S", "-c", f"{code}time.sleep(60)"], stdout=subprocess.PIPE
    )
    assert stubborn.stdout is not None
    with stubborn.stdout as stdout:
        stdout.readline()
        stop(stubborn, 0.1)
    assert stubborn.returncode == -9
