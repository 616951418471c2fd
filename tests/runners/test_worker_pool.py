"""Pools of workers and guards: nothing outlives its parent, and bundles end in order."""

import contextlib
import functools
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from apache_beam.portability.api import beam_fn_api_pb2, beam_fn_api_pb2_grpc

from dpstream.pipelines.runners import job_servers
from dpstream.pipelines.runners import worker_pool as pools
from dpstream.pipelines.runners.guard import FOLDER, with_parent
from dpstream.pipelines.runners.job_servers import descendants
from tests.faults.flink import job_at
from tests.runners import prism
from tests.runners.engines import ROOT, Pool, need_flink, worker_pool
from tests.runners.golden import write_stream
from tests.runners.prism import wait_for

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


#: A command that has a child, and says the numbers of both.
FAMILY = [
    "import os, subprocess, sys, time",
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])",
    "print(os.getpid(), child.pid, flush=True)",
    "time.sleep(600)",
]
#: A parent that starts it behind a guard; ``{thread}`` starts the guard in a thread that ends.
PARENT = """\
import subprocess, sys, threading, time
from dpstream.pipelines.runners.guard import with_parent
def go():
    global guard
    guard = subprocess.Popen(with_parent([sys.executable, "-c", {family!r}]))
thread = threading.Thread(target=go)
thread.start()
thread.join()
print(guard.pid, flush=True)
time.sleep(600)
"""


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(*pids: int) -> Callable[[], bool]:
    return lambda: not any(alive(pid) for pid in pids)


@pytest.fixture
def family(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A parent, and (the command, its child, the guard) in any order of their names; the command
    has a folder."""
    program = PARENT.format(family="\n".join(FAMILY))
    (tmp_path / "private").mkdir()
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT,
        env={**os.environ, FOLDER: str(tmp_path / "private")},
    )  # fmt: skip
    assert parent.stdout is not None
    with parent:
        lines = [parent.stdout.readline().split() for _ in range(2)]
        both, [guard] = sorted(lines, key=len, reverse=True)
        pids = [int(both[0]), int(both[1]), int(guard)]
        try:
            yield parent, pids
        finally:
            parent.kill()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def test_a_killed_parent_takes_all_with_it(
    family: tuple[subprocess.Popen[str], list[int]], tmp_path: Path
) -> None:
    parent, pids = family
    time.sleep(1.0)  # the thread that started it is long gone: that alone ends nothing
    assert all(alive(pid) for pid in pids) and list(tmp_path.iterdir())
    parent.kill()
    wait_for(gone(*pids), 20)
    assert not list(tmp_path.iterdir())


def test_a_killed_guard_takes_its_command_with_it(
    family: tuple[subprocess.Popen[str], list[int]],
) -> None:
    parent, (command, _, guard) = family
    os.kill(guard, signal.SIGKILL)
    wait_for(gone(command), 20)
    assert parent.poll() is None


def test_without_a_guard_it_goes_on() -> None:
    """What a guard is for: the same command started plainly outlives its parent."""
    program = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]])"
    command = [sys.executable, "-c", program, "\n".join(FAMILY)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        parent.wait(20)
        try:
            assert all(alive(pid) for pid in pids)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("code", [0, 7])
def test_the_exit_code_comes_through(code: int) -> None:
    command = [sys.executable, "-c", f"raise SystemExit({code})"]
    assert subprocess.run(with_parent(command), check=False).returncode == code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_come_through(number: signal.Signals) -> None:
    program = (
        "import signal, time\n"
        f"def told(n, _): print('told', flush=True); raise SystemExit(3)\n"
        f"signal.signal({int(number)}, told)\n"
        "print('there', flush=True)\n"
        "while True: time.sleep(0.1)\n"
    )
    command = with_parent([sys.executable, "-c", program])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as guard:
        assert guard.stdout is not None and guard.stdout.readline() == "there\n"
        guard.send_signal(number)
        assert guard.stdout.readline() == "told\n"
        assert guard.wait(20) == 3


def test_a_parent_that_is_gone_already_starts_nothing(tmp_path: Path) -> None:
    command = with_parent([sys.executable, "-c", f"open({str(tmp_path / 'ran')!r}, 'w')"])
    at = command.index(str(os.getpid()))
    command[at] = str(os.getppid())  # not the parent of what is started here
    assert subprocess.run(command, check=False).returncode == 1
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("runner", ["PrismRunner", "FlinkRunner"])
def test_a_killed_run_leaves_nothing_behind(runner: str, tmp_path: Path) -> None:
    """kill -9 of `dpstream run` in the middle of its stream: no engine, no pool, no worker."""
    stream = tmp_path / "stream"
    stream.mkdir()
    write_stream(stream, users=300)
    job = job_at(tmp_path / "job", stream)
    if runner == "PrismRunner":
        flags = [f"--prism_location={prism.binary()}"]
    else:
        need_flink()
        flags = ["--parallelism=2", "--experiments=use_loopback_process_worker"]
    command = [
        sys.executable, "-m", "tests.paced", "600", "run",
        "--project", str(tmp_path / "job"), f"--runner={runner}", "--quiet", *flags,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (tmp_path / "told").open("wb") as log:
        run = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        releases = Path(job.sink.path)

        # A guard and its engine; on Flink also those of a worker that is a process.
        least = 4 if runner == "FlinkRunner" else 2

        def in_the_middle() -> bool:
            return len(descendants(run.pid)) > least and any(releases.glob("window-*/trigger-*"))

        wait_for(in_the_middle, 300)
        started = descendants(run.pid)[1:]
    finally:
        run.kill()
        run.wait()
    wait_for(gone(*started), 30)
