"""Job servers as they start: a job goes to the run's own alone, whoever has its port."""

import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import grpc
import pytest
from typing_extensions import override

from dpstream.accounting.errors import RunError
from dpstream.pipelines.runners import job_servers
from dpstream.pipelines.runners.job_servers import GuardedJobServer
from tests.emulator import free_port

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


def test_a_port_that_stays_taken_is_said(taken: int) -> None:
    server = Server([taken])
    with pytest.raises(RunError, match="whose port is taken") as caught:
        server.start()
    assert caught.value.field == "--server" and len(server.requests) == job_servers._TRIES
    assert server._process is None


def test_a_server_that_ends_is_not_tried_again() -> None:
    server = Server([free_port()], "raise SystemExit(1)")
    with pytest.raises(RunError, match="does not start"):
        server.start()
    assert len(server.requests) == 1


def test_nor_one_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Meanwhile it is said what is waited for."""
    monkeypatch.setattr(job_servers, "_START_SECONDS", 1.0)
    monkeypatch.setattr(job_servers, "_QUIET_SECONDS", 0.2)
    server, begun = Server([free_port()], seconds=600), time.monotonic()
    with pytest.raises(RunError, match="does not start"):
        server.start()
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
