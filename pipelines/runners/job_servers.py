"""Job servers that a run starts: they end with it, and listen on this machine only.

Beam's own leave a process behind when their launcher is killed, and nobody asks whom they let in:
a job server has no password, runs the code it is sent and tells exact counts.

Beam's job server takes a cancelled job for ended, but only stops watching it: on a Flink cluster it
runs on.  So what a launcher started there is ended here, by the cluster's REST interface and by its
name, which nobody else has.

Who listens where, and who is connected, is read off the TCP sockets of processes, as Linux tells of
them.  Elsewhere there is no ``/proc``, and nothing is known.
"""

import ipaddress
import json
import logging
import os
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import Request, urlopen

import grpc
from apache_beam.portability.api import beam_job_api_pb2_grpc
from apache_beam.runners.portability.flink_runner import FlinkJarJobServer
from apache_beam.runners.portability.job_server import SubprocessJobServer
from apache_beam.runners.portability.prism_runner import PrismJobServer
from typing_extensions import override

from dpstream.accounting.errors import PolicyError, RunError, required
from dpstream.pipelines.runners.errors import say
from dpstream.pipelines.runners.guard import FOLDER, stop, with_parent

_PROC = Path("/proc")
_TABLES = ("tcp", "tcp6")
_ESTABLISHED, _LISTEN = "01", "0A"
_SOCKET = re.compile(r"socket:\[(\d+)\]")


class Listener(NamedTuple):
    """A port that a process accepts connections on."""

    pid: int
    address: str
    port: int

    @property
    def loopback(self) -> bool:
        """Return whether only this machine can reach it."""
        address = ipaddress.ip_address(self.address)
        mapped = getattr(address, "ipv4_mapped", None)
        return bool((mapped or address).is_loopback)


def supported() -> bool:
    """Return whether this system can list sockets."""
    return (_PROC / "self").exists()


def descendants(pid: int) -> list[int]:
    """Return a process and all that it and its children started, as far as they live."""
    if not supported():
        return [pid]
    children: dict[int, list[int]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it has ended meanwhile
                # After the name, which may hold anything, come the state and the parent.
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                children.setdefault(int(parent), []).append(int(entry.name))
    pids, left = [], [pid]
    while left:
        pids.append(left.pop())
        left += children.get(pids[-1], [])
    return pids


def listeners(pids: Iterable[int]) -> list[Listener]:
    """Return all ports that these processes listen on; none for one that has ended."""
    return [
        Listener(pid, *local)
        for pid in pids
        for _, local, _, state in _sockets(pid)
        if state == _LISTEN
    ]


def beyond_loopback(pid: int) -> list[Listener]:
    """Return the ports of a process and its descendants that other machines could reach."""
    return [listener for listener in listeners(descendants(pid)) if not listener.loopback]


def listens(pid: int, port: int) -> bool:
    """Return whether a process, or one that it started, listens on a port."""
    return any(listener.port == port for listener in listeners(descendants(pid)))


def connected(pid: int, port: int) -> bool:
    """Return whether a process, or one that it started, has a connection to a port."""
    return any(
        state == _ESTABLISHED and remote[1] == port
        for one in descendants(pid)
        for _, _, remote, state in _sockets(one)
    )


Address = tuple[str, int]


def _sockets(pid: int) -> Iterator[tuple[str, Address, Address, str]]:
    """(number, local, remote, state) of a process's TCP sockets."""
    root = _PROC / str(pid)
    with suppress(OSError):  # it has ended, or is another user's
        mine = set()
        for link in (root / "fd").iterdir():
            with suppress(OSError):
                mine |= set(_SOCKET.findall(str(link.readlink())))
        for table in _TABLES:
            for line in (root / "net" / table).read_text().splitlines()[1:]:
                words = line.split()
                if words[9] in mine:
                    yield words[9], address_of(words[1]), address_of(words[2]), words[3]


def address_of(text: str) -> Address:
    """Return ("127.0.0.1", 8080) of ``0100007F:1F90``: words of four bytes, each backwards."""
    host, _, port = text.partition(":")
    raw = bytes.fromhex(host)
    data = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
    return str(ipaddress.ip_address(data)), int(port, 16)


#: The address that only this machine reaches.
LOOPBACK = "127.0.0.1"
#: What is wrong with a server that others reach.
OPEN = "lets other machines in: it listens beyond 127.0.0.1, without a password"
#: A port that was free can be taken before the server has it.
_TRIES = 3
_START_SECONDS, _STOP_SECONDS, _CLOSE_SECONDS = 300.0, 20.0, 2.0
#: Seconds after which, and between which, it is said that it does not answer yet.
_QUIET_SECONDS = 30.0
_CHANNEL = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_timeout_ms", 600_000),
    ("grpc.keepalive_permit_without_calls", True),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.max_ping_strikes", 0),
    # The first try comes before the server listens; gRPC would wait for a second and more.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 100),
]
#: Where Flink looks for its settings; which of them name what it listens on.
_FLINK_SETTINGS = "FLINK_CONF_DIR"
_FLINK_HOSTS = (
    "jobmanager.bind-host",
    "taskmanager.bind-host",
    "taskmanager.host",
    "rest.bind-address",
)

_ENDED = ("FINISHED", "CANCELED", "FAILED", "SUSPENDED")
#: Seconds that a cluster may take to cancel a job; between two looks; for one answer.
_CANCEL_SECONDS, _LOOK_SECONDS, _ANSWER_SECONDS = 120.0, 0.2, 20.0
#: Seconds after which a job that was never seen is not on its way to the cluster either.
_UNSEEN_SECONDS = 15.0


class GuardedJobServer(SubprocessJobServer):  # type: ignore[misc]
    """A job server of one run, mixed into one of Beam's that knows its command.

    Attributes:
        flag: the flag of a run that names the program, for messages.
        fix: what to do about one that listens beyond this machine.
    """

    flag = ""
    fix = ""
    _local_temp_root: str | None
    _process: "subprocess.Popen[bytes] | None" = None
    _channel: Any = None

    @override
    def start(self) -> Any:
        """Start it; a client of it, once it answers and other machines cannot reach it.

        Raises:
            RunError: it does not start, or finds no port.
            PolicyError: it listens beyond this machine; it has ended then, and got no job.
        """
        taken = False
        for _ in range(_TRIES):
            self._local_temp_root = tempfile.mkdtemp(prefix="beam-temp")
            command, endpoint = self.subprocess_cmd_and_endpoint()
            port = int(endpoint.rpartition(":")[2])
            self._process = subprocess.Popen(
                with_parent(command),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, FOLDER: self._local_temp_root, **self.environment()},
            )
            threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
            self._channel = grpc.insecure_channel(f"{LOOPBACK}:{port}", options=_CHANNEL)
            if self._answers(self._process):
                # Whoever took the port would be sent the job: it is answered by this one, or not
                # at all.
                if listens(self._process.pid, port) or not supported():
                    self.check()
                    return beam_job_api_pb2_grpc.JobServiceStub(self._channel)
                taken = True
            else:
                taken = self._process.poll() is not None and is_taken(port)
            self.stop()
            if not taken:
                break
        if taken:
            raise RunError(
                self.flag,
                "names a job server whose port is taken by another program",
                "leave out --job_port, or name one that is free",
            )
        raise RunError(self.flag, "names a program that does not start", self.fix)

    def environment(self) -> dict[str, str]:
        """Return the variables that the server gets beside those of this process."""
        return {}

    def check(self) -> None:
        """Refuse, and end, a server that other machines can reach.

        Raises:
            PolicyError: it does listen beyond loopback.
        """
        if self._process is not None and beyond_loopback(self._process.pid):
            self.stop()
            raise PolicyError(self.flag, OPEN, self.fix)

    @override
    def stop(self) -> None:
        """End it, and wait until it has ended; again is fine."""
        channel, self._channel = self._channel, None
        process, self._process = self._process, None
        if channel is not None:
            # An interrupt in the middle of a call leaves gRPC waiting for it for ever.
            closing = threading.Thread(target=channel.close, daemon=True)
            closing.start()
            closing.join(_CLOSE_SECONDS)
        if process is not None:
            stop(process, _STOP_SECONDS)
        folder, self._local_temp_root = self._local_temp_root, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def _answers(self, process: "subprocess.Popen[bytes]") -> bool:
        ready, begun, notices = grpc.channel_ready_future(self._channel), time.monotonic(), 0
        while process.poll() is None and (waited := time.monotonic() - begun) < _START_SECONDS:
            with suppress(grpc.FutureTimeoutError):
                ready.result(timeout=0.2)
                return True
            if waited >= _QUIET_SECONDS * (notices + 1):
                notices += 1
                say(
                    RunError(
                        self.flag,
                        f"names a job server that has not answered for {waited:.0f} seconds",
                        f"wait: after {_START_SECONDS:.0f} seconds it is given up",
                    )
                )
        ready.cancel()
        return False

    def _read(self, process: "subprocess.Popen[bytes]") -> None:
        """What it says becomes log lines, as with Beam."""
        logger = logging.getLogger(type(self).__name__)
        if self._log_filter is not None:
            logger.addFilter(self._log_filter)
            logger.setLevel(logging.INFO)
        with required(process.stdout, "process.stdout is there") as lines:
            for line in lines:
                log_stdout(logger, line.decode(errors="backslashreplace").rstrip())


def is_taken(port: int) -> bool:
    """Return whether somebody listens on a port of this machine."""
    with socket.socket() as probe:
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return True
    return False


def log_stdout(logger: logging.Logger, line: str) -> None:
    """Log a line; Beam's filter of Prism's lines goes by this function's name."""
    logger.info(line)


class LoopbackPrism(GuardedJobServer, PrismJobServer):  # type: ignore[misc]
    """Prism, for one run."""

    flag = "--prism_location"
    fix = (
        "run `dpstream doctor --fix`, which builds one that listens on this machine only, and leave"
        " the flag out"
    )


class LoopbackFlink(GuardedJobServer, FlinkJarJobServer):  # type: ignore[misc]
    """Flink's job server, and the Flink inside it if the job names no cluster."""

    flag = "--flink_job_server_jar"
    fix = "run `make flink`, name its job server, and leave out a FLINK_CONF_DIR of your own"

    @override
    def environment(self) -> dict[str, str]:
        """Return the settings of the Flink inside it, unless a cluster is named.

        It listens on this machine alone.  Its checkpoints hold the records that wait for a trigger
        time; they are in the server's folder, because in memory one above 5 MiB fails the run.
        """
        if _FLINK_SETTINGS in os.environ:
            return {}
        folder = Path(self.local_temp_dir(prefix="flink"))
        settings = dict.fromkeys(_FLINK_HOSTS, LOOPBACK)
        settings |= {"io.tmp.dirs": str(folder), "state.checkpoints.dir": folder.as_uri()}
        (folder / "flink-conf.yaml").write_text(
            "".join(f"{name}: {value}\n" for name, value in settings.items())
        )
        return {_FLINK_SETTINGS: str(folder)}

    @override
    def java_arguments(
        self, job_port: int, artifact_port: int, expansion_port: int, artifacts_dir: str
    ) -> list[Any]:
        """Return Beam's, on loopback, without the server for other languages' transforms."""
        given = super().java_arguments(job_port, artifact_port, expansion_port or -1, artifacts_dir)
        return [*given, "--job-host", LOOPBACK]


def unique_job_name(name: str | None) -> str:
    """Return a job's name, or ``dpstream``, with a random end."""
    return f"{name or 'dpstream'}-{secrets.token_hex(4)}"


def cancel_on_flink(master: str, name: str) -> None:
    """Cancel the jobs of a name and wait until they have ended; none is fine.

    Args:
        master: ``HOST:PORT`` or URL of the job manager.

    Raises:
        RunError: the cluster does not answer, or does not cancel them in time.
    """
    root = (master if "://" in master else f"http://{master}").rstrip("/")
    begin = time.monotonic()
    while True:
        seen, left = _cancelled(root, name)
        waited = time.monotonic() - begin
        if not left and (seen or waited > _UNSEEN_SECONDS):
            return
        if waited > _CANCEL_SECONDS:
            raise RunError(
                "--flink_master",
                "did not cancel the job, which may live on there",
                "cancel it on the cluster (`flink cancel`, or its web page)",
            )
        time.sleep(_LOOK_SECONDS)


def _cancelled(root: str, name: str) -> tuple[bool, bool]:
    """Ask for it once; whether such jobs are known there, and whether any has not ended."""
    try:
        jobs = [
            job for job in _answer(Request(f"{root}/jobs/overview"))["jobs"] if job["name"] == name
        ]
        left = [job for job in jobs if job["state"] not in _ENDED]
        for job in left:
            if job["state"] != "CANCELLING":
                _answer(Request(f"{root}/jobs/{job['jid']}", method="PATCH"))
    except (OSError, ValueError):  # not reached, or it has ended meanwhile
        return False, True
    return bool(jobs), bool(left)


def _answer(request: Request) -> Any:
    with urlopen(request, timeout=_ANSWER_SECONDS) as answer:
        return json.loads(answer.read() or b"{}")
