"""The official Spanner emulator, found, started and stopped by the tests.

Looked for in this order: a running one (SPANNER_EMULATOR_HOST), a binary
(SPANNER_EMULATOR_BINARY), the Cloud SDK's component.  With CI=true a missing emulator fails the
tests; elsewhere they are skipped, loudly.
"""

import itertools
import os
import shutil
import socket
import subprocess
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import grpc
import pytest
from google.api_core import exceptions
from google.cloud.spanner_v1 import Session

from dpstream.state.spanner.client import connect
from tests import guarded

HOST = "SPANNER_EMULATOR_HOST"
PROJECT, INSTANCE = "test-project", "test-instance"
_PROGRAM = "cloud_spanner_emulator/emulator_main"
_numbers = itertools.count(1)


def binary() -> str | None:
    """The emulator's program, if there is one."""
    named = os.environ.get("SPANNER_EMULATOR_BINARY")
    if named:
        return named
    gcloud = shutil.which("gcloud")
    if gcloud is None:
        return None
    folder = Path(gcloud).resolve().parent
    if not (folder / _PROGRAM).exists():  # slow, so asked last
        completed = subprocess.run(
            [gcloud, "info", "--format=value(installation.sdk_root)"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        folder = Path(completed.stdout.strip()) / "bin"
    program = folder / _PROGRAM
    return str(program) if program.exists() else None


def free_port() -> int:
    """A port that nobody listens on."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(*flags: str) -> Iterator[str]:
    """A running emulator's host and port, in the environment as well."""
    before = os.environ.get(HOST)
    if before and not flags:
        _instance()
        yield before
        return
    program = binary()
    if program is None:
        missing()
    host = f"127.0.0.1:{free_port()}"
    process = guarded.start(
        [program, f"--host_port={host}", *flags],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.environ[HOST] = host
    try:
        _await(host, process)
        _instance()
        yield host
    finally:
        guarded.kill(process)
        os.environ.pop(HOST)
        if before:
            os.environ[HOST] = before


def missing() -> None:
    """No emulator: a failure where it must be there, a loud skip elsewhere."""
    text = "the Spanner emulator is missing (gcloud component cloud-spanner-emulator)"
    if os.environ.get("CI") == "true":
        pytest.fail(text)
    warnings.warn(pytest.PytestWarning(text), stacklevel=2)
    pytest.skip(text)


def _await(host: str, process: subprocess.Popen[bytes]) -> None:
    name, port = host.split(":")
    for _ in range(2_400):
        with closing(socket.socket()) as probe:
            if probe.connect_ex((name, int(port))) == 0:
                return
        if process.poll() is not None:
            break
        time.sleep(0.05)
    raise RuntimeError("the emulator did not start")


def _instance() -> None:
    client = connect(url("any"))._instance._client
    config = f"projects/{PROJECT}/instanceConfigs/emulator-config"
    with suppress(exceptions.AlreadyExists):
        client.instance(INSTANCE, config, node_count=1).create().result(60)


def url(database: str) -> str:
    """The store URL of a database of the test instance."""
    return f"spanner://{PROJECT}/{INSTANCE}/{database}"


def fresh_url() -> str:
    """A database that does not exist yet; its name is unlike that of any other process."""
    return url(f"t{os.getpid()}-{next(_numbers)}")


def drop(store: str) -> None:
    """Remove a database: the emulator keeps everything in memory."""
    connect(store).drop()


#: In the text of every refusal; it stands for a key of a row.
CANARY = "CANARY7741"


class _Refusing(grpc.GenericRpcHandler):
    """A server that makes sessions (if ``sessions``) and refuses all else with a status."""

    def __init__(self, code: grpc.StatusCode, sessions: bool) -> None:
        self._code, self._sessions = code, sessions

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        method = details.method.rsplit("/", 1)[1]
        made = Session.pb(Session(name="projects/p/instances/i/databases/d/sessions/s"))

        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            if self._sessions and "Session" in method:
                return bytes(made.SerializeToString())
            context.abort(self._code, f"row {CANARY} of table Keys")
            raise AssertionError

        if method.startswith("Streaming"):
            return grpc.unary_stream_rpc_method_handler(answer)
        return grpc.unary_unary_rpc_method_handler(answer)


@contextmanager
def refusing(
    code: grpc.StatusCode, monkeypatch: pytest.MonkeyPatch, sessions: bool = True
) -> Iterator[None]:
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((_Refusing(code, sessions),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv(HOST, f"127.0.0.1:{port}")
    try:
        yield
    finally:
        server.stop(0).wait()
