"""The pool of workers: with its own interpreter, again after an early death, gone with its
parent."""

import functools
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from apache_beam.portability.api import beam_fn_api_pb2, beam_fn_api_pb2_grpc

from dpstream.pipelines.runners import job_servers
from dpstream.pipelines.runners import worker_pool as pools
from dpstream.pipelines.runners.guard import with_parent
from tests.runners.engines import ROOT, Pool, worker_pool
from tests.runners.prism import wait_for
from tests.runners.test_guard import gone

STOP = beam_fn_api_pb2.StopWorkerRequest(worker_id="w1")


class Engine(beam_fn_api_pb2_grpc.BeamFnControlServicer):
    """An engine that waits for its workers and gives them nothing to do, until it hangs up."""

    def __init__(self) -> None:
        self.came: queue.Queue[str] = queue.Queue()
        self.ended = threading.Event()

    def Control(self, request_iterator: Any, context: Any) -> Iterator[Any]:
        self.came.put(dict(context.invocation_metadata())["worker_id"])
        self.ended.wait()
        return iter(())


@contextmanager
def serving() -> Iterator[tuple[Engine, str]]:
    """An engine on loopback, and its address."""
    servicer = Engine()
    server = grpc.server(ThreadPoolExecutor(8))
    beam_fn_api_pb2_grpc.add_BeamFnControlServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield servicer, f"localhost:{port}"
    finally:
        servicer.ended.set()
        server.stop(0)


@pytest.fixture
def engine() -> Iterator[tuple[Engine, str]]:
    with serving() as engine_server:
        yield engine_server


@pytest.fixture
def other() -> Iterator[tuple[Engine, str]]:
    with serving() as engine_server:
        yield engine_server


def ask(pool: Pool, method: str, request: Any) -> Any:
    with grpc.insecure_channel(pool.address) as channel:
        return getattr(beam_fn_api_pb2_grpc.BeamFnExternalWorkerPoolStub(channel), method)(request)


def start(pool: Pool, address: str) -> int:
    """Start a worker; the number of its process, seconds before it can have connected."""
    before = set(pool.workers())
    request = beam_fn_api_pb2.StartWorkerRequest(worker_id="w1")
    request.control_endpoint.url = address
    assert ask(pool, "StartWorker", request).error == ""
    wait_for(lambda: bool(set(pool.workers()) - before))
    [worker] = set(pool.workers()) - before
    return worker


def test_a_worker_that_dies_before_it_connects_is_started_again(
    engine: tuple[Engine, str],
) -> None:
    """Flink would wait for it for ever."""
    servicer, address = engine
    with worker_pool() as pool:
        worker = start(pool, address)
        for _ in range(2):  # each in its imports
            os.kill(worker, signal.SIGKILL)

            def replaced(dead: int = worker) -> bool:
                return pool.workers() not in ([], [dead])

            wait_for(replaced)
            [worker] = pool.workers()
            assert servicer.came.empty()
        assert servicer.came.get(timeout=300) == "w1"
        assert servicer.came.empty()


def test_one_that_has_served_is_not(
    other: tuple[Engine, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engine has noticed, and asks for another if it needs one; and for the end of this one,
    which is not that of another engine's."""
    monkeypatch.setattr(pools, "_SETTLED", 0.1)
    address, served = pools.LoopbackPool.start(use_process=True)
    pool = Pool(address, os.getpid())
    try:
        for asks in (True, False):
            with serving() as (servicer, where):
                number = start(pool, where)
                worker = served._workers[-1]
                assert servicer.came.get(timeout=300) == "w1"
                wait_for(functools.partial(getattr, worker, "_settled"))
                os.kill(number, signal.SIGKILL)
                wait_for(functools.partial(getattr, worker, "ended"))
                assert worker._starts == 1 and servicer.came.empty()
                if asks:
                    lives = start(pool, other[1])
                    ask(pool, "StopWorker", STOP)
                    assert worker.stopped

                def left(count: int = 2 - asks) -> bool:
                    return len(served._workers) == count

                wait_for(left)
            wait_for(lambda: len(served._workers) == 1)  # or its engine is gone
            assert pool.workers() == [lives] and not served._workers[0].stopped
    finally:
        served.stop()


def test_a_worker_that_is_stopped_stays_stopped(engine: tuple[Engine, str]) -> None:
    with worker_pool() as pool:
        worker = start(pool, engine[1])
        ask(pool, "StopWorker", beam_fn_api_pb2.StopWorkerRequest(worker_id="w1"))
        wait_for(gone(worker))
        threading.Event().wait(4 * pools._LOOK)
        assert pool.workers() == []


def test_each_of_two_engines_has_a_worker_of_one_name(
    engine: tuple[Engine, str], other: tuple[Engine, str]
) -> None:
    """Every task manager of Flink numbers its workers from one: an early death is noticed of
    either, an end is that of the engine which asks, and all end with the pool."""
    with worker_pool() as pool:
        first, second = start(pool, engine[1]), start(pool, other[1])
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: len(set(pool.workers()) - {first, second}) == 1)
        [again] = set(pool.workers()) - {first, second}
        assert engine[0].came.get(timeout=300) == other[0].came.get(timeout=300) == "w1"
        other[0].ended.set()
        ask(pool, "StopWorker", STOP)
        wait_for(gone(second))
        assert pool.workers() == [again]
        ask(pool, "StopWorker", STOP)  # the only one of the name now
        wait_for(gone(again))
        left = start(pool, engine[1]), start(pool, engine[1])
    wait_for(gone(*left))


def test_workers_in_this_process_are_of_their_engines(
    engine: tuple[Engine, str], other: tuple[Engine, str]
) -> None:
    """The same with Flink's LOOPBACK."""
    address, served = pools.LoopbackPool.start()
    try:
        pool = Pool(address, os.getpid())
        for servicer, where in (engine, other):
            request = beam_fn_api_pb2.StartWorkerRequest(worker_id="w1")
            request.control_endpoint.url = where
            assert ask(pool, "StartWorker", request).error == ""
            assert servicer.came.get(timeout=300) == "w1"
        first, second = served._harnesses
        other[0].ended.set()
        ask(pool, "StopWorker", STOP)
        wait_for(second.left)
        assert second.stopped and not first.stopped and not first.left()
        ask(pool, "StopWorker", STOP)  # the only one of the name now
        assert first.stopped
    finally:
        engine[0].ended.set()
        served.stop()


def test_workers_have_the_interpreter_of_their_pool(
    engine: tuple[Engine, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment that nobody has activated: another `python` is on the path, or none."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with worker_pool() as pool:
        worker = start(pool, engine[1])
        program = Path(f"/proc/{worker}/cmdline").read_bytes().split(b"\0")[0].decode()
        assert program == sys.executable
        assert engine[0].came.get(timeout=300) == "w1"


@pytest.mark.parametrize("who", ["parent", "pool"])
def test_nothing_of_a_killed_pool_is_left(who: str, engine: tuple[Engine, str]) -> None:
    """A parent of the pool that is killed, say by a time-out, or the pool itself."""
    command = with_parent(
        [sys.executable, "-m", "dpstream.pipelines.runners.worker_pool", "--service_port=0"]
    )
    program = f"import os, subprocess, sys; c = {command!r}; c[4] = str(os.getpid()); " + (
        "subprocess.run(c)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    assert command[4] == str(os.getpid())
    with parent:
        assert parent.stdout is not None
        pool = Pool(parent.stdout.readline().split()[-1].rstrip("."), parent.pid)
        worker = start(pool, engine[1])
        own = [pid for pid in job_servers.descendants(parent.pid) if _is_pool(pid)]
        assert len(own) == 1
        if who == "parent":
            parent.kill()
        else:
            os.kill(own[0], signal.SIGKILL)
        wait_for(gone(worker, *own), 30)


def _is_pool(pid: int) -> bool:
    line = Path(f"/proc/{pid}/cmdline").read_bytes()
    return b"worker_pool" in line and b"guard.py" not in line and b"-c" not in line.split(b"\0")


def test_a_port_that_another_pool_has_is_refused() -> None:
    address, served = pools.LoopbackPool.start()
    try:
        with pytest.raises(RuntimeError, match="bind"):
            pools.LoopbackPool.start(port=int(address.partition(":")[2]))
    finally:
        served.stop()
