"""Job servers listen on this machine only, and end with their launcher."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from apache_beam.portability.api import beam_fn_api_pb2, beam_fn_api_pb2_grpc
from typing_extensions import override

from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.runners import job_servers, parts
from dpstream.pipelines.runners.job_servers import (
    GuardedJobServer,
    Listener,
    beyond_loopback,
    descendants,
    listeners,
)
from dpstream.pipelines.runners.table import RUNNERS
from dpstream.pipelines.runners.worker_pool import LoopbackPool
from dpstream.pipelines.stream.run import run_job
from tests.emulator import free_port
from tests.golden.refusals import Refused
from tests.kafka_broker import Broker
from tests.listening import heard
from tests.runners import prism
from tests.runners.engines import need_flink, results, started, worker_pool
from tests.runners.flink import cluster, session
from tests.runners.golden import golden_job, write_stream
from tests.runners.spike import Shape, expected

__all__ = ["cluster"]

SERVE = """\
import sys, time
from concurrent.futures import ThreadPoolExecutor
import grpc
server = grpc.server(ThreadPoolExecutor(1), options=[("grpc.so_reuseport", 0)])
time.sleep(float(sys.argv[2]))
server.add_insecure_port(f"127.0.0.1:{sys.argv[1]}")
server.start()
time.sleep(600)
"""


class Server(GuardedJobServer):
    """One that is given its ports, and sleeps before it takes one."""

    flag, fix = "--server", "mend it"

    def __init__(self, ports: list[int], program: str = SERVE, seconds: float = 0.0) -> None:
        super().__init__()
        self.ports, self.program, self.seconds = ports, program, seconds
        self.requests: list[int] = []

    @override
    def subprocess_cmd_and_endpoint(self) -> tuple[list[str], str]:
        port = self.ports[min(len(self.requests), len(self.ports) - 1)]
        self.requests.append(port)
        line = [sys.executable, "-c", self.program, str(port), str(self.seconds)]
        return line, f"localhost:{port}"


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that answers as a job server does, of another program."""
    server = grpc.server(ThreadPoolExecutor(1), options=[("grpc.so_reuseport", 0)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield port
    server.stop(0)


@pytest.mark.parametrize("program", [SERVE, "import time; time.sleep(600)"])
def test_a_job_is_not_sent_to_who_took_the_port(taken: int, program: str) -> None:
    """Whether the server has noticed or not, it is started on another port."""
    free = free_port()
    server = Server([taken, free], f"import sys\nif sys.argv[1] == '{free}':\n    program = "
                    f"{SERVE!r}\nelse:\n    program = {program!r}\nexec(program)")  # fmt: skip
    try:
        server.start()
        assert server.requests == [taken, free]
    finally:
        server.stop()


def test_a_port_that_stays_taken_is_said(taken: int, refused: Refused) -> None:
    server = Server([taken])
    caught = refused(server.start)
    assert caught.field == "--server" and len(server.requests) == job_servers._TRIES
    assert server._process is None


def test_a_server_that_ends_is_not_tried_again(refused: Refused) -> None:
    server = Server([free_port()], "raise SystemExit(1)")
    refused(server.start)
    assert len(server.requests) == 1


def test_nor_one_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], refused: Refused
) -> None:
    """Meanwhile it is said what is waited for."""
    monkeypatch.setattr(job_servers, "_START_SECONDS", 1.0)
    monkeypatch.setattr(job_servers, "_QUIET_SECONDS", 0.2)
    server, begun = Server([free_port()], seconds=600), time.monotonic()
    refused(server.start)
    assert len(server.requests) == 1 and time.monotonic() - begun >= 1.0
    error_lines = capfd.readouterr().err.splitlines()
    assert len(error_lines) > 2 and all("--server: names a job server that has not answered" in line
                                  for line in error_lines)  # fmt: skip


def test_one_that_answers_at_once_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    server = Server([free_port()])
    try:
        server.start()
        assert "warning" not in capfd.readouterr().err
    finally:
        server.stop()


def test_a_call_that_an_interrupt_cut_off_does_not_keep_the_server() -> None:
    """gRPC's channel then waits for ever for a call that nobody reads (seen at Ctrl-C)."""
    server = Server([free_port()])
    server.start()
    process, channel = server._process, server._channel
    assert process is not None
    never = threading.Event()
    server._channel = SimpleNamespace(close=never.wait)
    try:
        server.stop()
        assert process.poll() is not None
    finally:
        never.set()
        channel.close()


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A small job over a recorded stream."""
    (tmp_path / "stream").mkdir()
    write_stream(tmp_path / "stream", users=300)
    return golden_job("plain", tmp_path / "stream", tmp_path / "job")


#: Ports that each engine opens at least: Prism's, the pool's; Flink's job server has more.
LEAST = {"DirectRunner": 0, "PrismRunner": 2, "FlinkRunner": 8}


@pytest.mark.parametrize("runner", LEAST)
def test_a_run(runner: str, job: Job) -> None:
    flags = []
    if runner == "PrismRunner":
        flags = [f"--prism_location={prism.binary()}"]
    elif runner == "FlinkRunner":
        need_flink()
        flags = ["--parallelism=2"]
    before = set(descendants(os.getpid()))
    with heard() as watcher:
        run_job(job, runner, flags)
    watcher.check(LEAST[runner])
    assert set(descendants(os.getpid())) <= before, "an engine goes on"


def test_every_runner_of_this_machine_is_listened_to() -> None:
    assert set(LEAST) | {"FnApiRunner", "DataflowRunner"} == set(RUNNERS)


def test_a_cluster_and_its_pool(tmp_path: Path, cluster: "session.Cluster") -> None:
    shape = Shape(endless=True)
    with heard() as watcher, worker_pool() as pool:
        flags = [
            f"--flink_master={cluster.master}", "--environment_type=EXTERNAL",
            f"--environment_config={pool.address}", "--parallelism=2",
        ]  # fmt: skip
        with started("FlinkRunner", flags, shape, tmp_path) as result:
            assert results(shape, tmp_path, result, 300) == expected(shape)
    watcher.check(8)
    assert int(pool.address.partition(":")[2]) in {listener.port for listener in watcher.all}


def test_a_broker(kafka: Broker) -> None:
    with heard(0.01) as watcher:
        while watcher.looks < 3:
            kafka.topic()
    watcher.check(2)


def elsewhere() -> str:
    """An address of this machine that only a listener on all interfaces hears: that of a network,
    or, on a machine without one, another of loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))  # nothing is sent
            address: str = probe.getsockname()[0]
        except OSError:
            address = "127.0.0.1"
    return address if address != "127.0.0.1" else "127.0.0.2"


def ask(address: str, control: str) -> str:
    """Ask a pool for a worker of an engine; the pool's words, or gRPC's."""
    request = beam_fn_api_pb2.StartWorkerRequest(worker_id="w")
    request.control_endpoint.url = control
    with grpc.insecure_channel(address) as channel:
        stub = beam_fn_api_pb2_grpc.BeamFnExternalWorkerPoolStub(channel)
        try:
            return stub.StartWorker(request, timeout=5).error or "started"
        except grpc.RpcError as error:
            return error.code().name


def test_no_worker_is_started_for_other_machines() -> None:
    """The attack: code of a stranger in the process that holds the secret."""
    address, pool = LoopbackPool.start()
    try:
        port = address.partition(":")[2]
        for own in {elsewhere(), "127.0.0.2"}:
            assert ask(f"{own}:{port}", f"{own}:1") == "UNAVAILABLE"
        for control in ("192.0.2.1:1", "127.0.0.2:1", "localhost.example:1", "localhost", "[::]:1"):
            assert ask(address, control) == "the engine is on another machine"
    finally:
        pool.stop()


OPEN = """\
import argparse, socket, sys, time
sys.path[:0] = {path!r}
from concurrent.futures import ThreadPoolExecutor
import grpc
parser = argparse.ArgumentParser()
parser.add_argument("--job_port")
port = parser.parse_known_args()[0].job_port

class Told(grpc.GenericRpcHandler):
    def service(self, call):
        open({told!r}, "a").write(call.method)

server = grpc.server(ThreadPoolExecutor(1), handlers=[Told()])
server.add_insecure_port(f"{host}:{{port}}")
server.start()
time.sleep(600)
"""


@pytest.fixture
def stranger(tmp_path: Path) -> Path:
    """A program that looks like a Prism, listens on all interfaces, and notes what it is asked."""
    return _program(tmp_path, "0.0.0.0")


def _program(folder: Path, host: str) -> Path:
    program = folder / "other-prism"
    text = OPEN.format(path=sys.path, told=str(folder / "told"), host=host)
    program.write_text(f"#!{sys.executable}\n{text}")
    program.chmod(0o755)
    return program


def test_an_open_prism_is_refused_before_it_gets_a_job(
    job: Job, stranger: Path, tmp_path: Path, refused: Refused
) -> None:
    before = set(descendants(os.getpid()))
    refused(run_job, job, "PrismRunner", [f"--prism_location={stranger}"])
    assert not (tmp_path / "told").exists(), "it was told of the job"
    assert set(descendants(os.getpid())) <= before, "it goes on"


def test_a_closed_one_gets_the_job(job: Job, tmp_path: Path, refused: Refused) -> None:
    """The same program on loopback is told: the refusal above is for its address alone."""
    program = _program(tmp_path, "127.0.0.1")
    refused(run_job, job, "PrismRunner", [f"--prism_location={program}"])
    assert "JobService" in (tmp_path / "told").read_text()


def test_beams_own_prism_is_not_even_started(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    program = tmp_path / "prism"
    program.write_bytes(b"mod\tgithub.com/apache/beam/sdks/v2\tv2.77.0\th1:x\n")
    monkeypatch.setattr(subprocess, "Popen", None)
    refused(run_job, job, "PrismRunner", [f"--prism_location={program}"])
    assert parts.prism_is_open(program) and not parts.prism_is_open(Path(prism.binary()))


@pytest.mark.parametrize(
    ("family", "address", "loopback"),
    [
        (socket.AF_INET, "127.0.0.1", True),
        (socket.AF_INET, "127.8.0.1", True),
        (socket.AF_INET, "0.0.0.0", False),
        (socket.AF_INET6, "::1", True),
        (socket.AF_INET6, "::", False),
        (socket.AF_INET6, "::ffff:127.0.0.1", True),
        (socket.AF_INET6, "::ffff:0.0.0.0", False),
    ],
)
def test_what_is_loopback(family: int, address: str, loopback: bool) -> None:
    with socket.socket(family) as listening:
        listening.bind((address, 0))
        listening.listen()
        port = listening.getsockname()[1]
        port_listeners = [x for x in listeners([os.getpid()]) if x.port == port]
    assert [x.loopback for x in port_listeners] == [loopback]


def test_a_childs_listener_is_found() -> None:
    """The check fails where it must: a process of a process that listens everywhere."""
    program = (
        "import socket, sys; s = socket.create_server(('', 0)); print(s.getsockname()[1], "
        "flush=True); sys.stdin.read()"
    )
    shell = [sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])"]
    child = subprocess.Popen(
        [*shell, sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with child:
        assert child.stdout is not None
        port = int(child.stdout.readline())
        child_listeners = beyond_loopback(child.pid)
        assert [(x.address, x.port) for x in child_listeners] == [("0.0.0.0", port)]
        assert child_listeners[0].pid != child.pid and isinstance(child_listeners[0], Listener)
