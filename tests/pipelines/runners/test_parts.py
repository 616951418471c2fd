"""Parts that runners need on this machine: their places, builds and versions, and job servers."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.worker.statesampler import StateSampler
from apache_beam.utils.counters import CounterFactory

from dpstream.pipelines.runners import job_servers, parts, prism_build
from dpstream.pipelines.runners import prism_build as PRISM
from dpstream.pipelines.runners.guard import stop, with_parent
from dpstream.pipelines.runners.harness import Harness, end_bundles_soon
from dpstream.pipelines.runners.job_servers import (
    Listener,
    LoopbackFlink,
    address_of,
    cancel_on_flink,
    connected,
    descendants,
    is_taken,
    listeners,
    listens,
    supported,
    unique_job_name,
)
from dpstream.pipelines.runners.worker_pool import (
    LoopbackFlinkRunner,
    LoopbackPool,
    LoopbackPrismRunner,
    parser,
)
from tests.emulator import free_port
from tests.golden.refusals import Refused


def program(path: Path, text: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\0binary\0" + text + b"\nmore")
    path.chmod(0o700)
    return path


@pytest.mark.parametrize(
    ("text", "version", "is_open"),
    [
        (b"mod\tgithub.com/apache/beam/sdks/v2\tv2.70.0\th1:x", "2.70.0", True),
        (b"build\t-tags=loopback,beam2.71.0", "2.71.0", False),
        (b"build\t-tags=loopback,beam2.71.0,edits0123", "2.71.0", False),
        (b"mod\tgithub.com/apache/beam/sdks/v2\t(devel)", None, False),
        (b"nothing of the kind", None, False),
    ],
)
def test_a_prism_says_its_version(
    text: bytes, version: str | None, is_open: bool, tmp_path: Path
) -> None:
    made = program(tmp_path / "prism", text)
    assert parts.prism_version(made) == version
    assert parts.prism_is_open(made) is is_open


@pytest.mark.parametrize(
    ("tags", "has"),
    [(prism_build.TAGS, True), (prism_build.TAGS[:-1], False), ("loopback,beam2.77.0", False)],
)
def test_a_prism_says_its_edits(tags: str, has: bool, tmp_path: Path) -> None:
    made = program(tmp_path / "prism", f"build\t-tags={tags}".encode())
    assert parts.prism_has_edits(made) is has


def test_a_named_program_excludes_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "tools", lambda: [tmp_path])
    monkeypatch.setenv("PATH", "")
    assert parts.prism() is None and parts.job_server() is None and parts.kafka() is None
    made = program(tmp_path / "bin" / "prism", b"")
    jar = program(tmp_path / "flink" / "job-server.jar", b"")
    program(tmp_path / "kafka" / ".ready", b"")
    assert parts.prism() == made and parts.job_server() == jar
    assert parts.kafka() == tmp_path / "kafka"
    assert parts.prism(str(tmp_path / "none")) is None
    assert parts.job_server(str(tmp_path / "none")) is None


@pytest.mark.parametrize(
    ("version_output", "major"), [("17.0.2", 17), ("1.8.0_392", 8), ("next", None)]
)
def test_java_says_its_major_version(
    version_output: str, major: int | None, tmp_path: Path
) -> None:
    java = tmp_path / "java"
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version_output}\"' >&2\n")
    java.chmod(0o700)
    assert parts.java_version(str(java)) == major
    assert parts.java_version(str(tmp_path / "none")) is None


def sources(folder: Path) -> Path:
    """Files that say what the edits of Prism replace."""
    for name, old, _ in PRISM.EDITS:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((path.read_text() if path.exists() else "package x\n") + f"a({old})\n")
    return folder


def test_prisms_edits(tmp_path: Path) -> None:
    PRISM.edited(sources(tmp_path))
    go_source = "".join(path.read_text() for path in tmp_path.rglob("*.go"))
    assert all(new in go_source for _, _, new in PRISM.EDITS)
    assert go_source.count("127.0.0.1") == len(PRISM.EDITS) - 1
    assert '":%d"' not in go_source and "localhost" not in go_source
    assert go_source.count("dataReady = nil") == 1


@pytest.mark.parametrize("times", [0, 2])
@pytest.mark.parametrize("edit", range(len(PRISM.EDITS)))
def test_another_source_is_not_built(edit: int, times: int, tmp_path: Path) -> None:
    name, old, _ = PRISM.EDITS[edit]
    path = sources(tmp_path) / name
    path.write_text(path.read_text().replace(old, " ".join([old] * times)))
    with pytest.raises(SystemExit, match=f"{times} times"):
        PRISM.edited(tmp_path)


def test_another_module_is_not_built(tmp_path: Path) -> None:
    assert PRISM.checked({"Sum": PRISM.SUM, "Dir": str(tmp_path)}) == tmp_path
    with pytest.raises(SystemExit, match="digest"):
        PRISM.checked({"Sum": "h1:other", "Dir": str(tmp_path)})


def test_addresses_are_words_backwards() -> None:
    assert address_of("0100007F:1F90") == ("127.0.0.1", 8080)
    assert address_of("00000000000000000000000001000000:0016") == ("::1", 22)


@pytest.mark.parametrize(
    ("address", "loopback"),
    [("127.9.9.9", True), ("::ffff:127.0.0.1", True), ("0.0.0.0", False), ("::", False)],
)
def test_loopback_is_what_no_other_machine_reaches(address: str, loopback: bool) -> None:
    assert Listener(1, address, 80).loopback is loopback


def test_own_sockets_are_found() -> None:
    assert supported() and os.getpid() in descendants(os.getppid())
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
        port = server.getsockname()[1]
        assert listens(os.getpid(), port) and not connected(os.getpid(), port)
        client.connect(("127.0.0.1", port))
        assert connected(os.getpid(), port)
        assert Listener(os.getpid(), "127.0.0.1", port) in listeners([os.getpid()])
    assert not listens(os.getpid(), port)


def test_a_process_that_has_ended_has_none() -> None:
    assert listeners([2**22 + 1]) == []


def test_names_are_told_apart() -> None:
    assert unique_job_name(None).startswith("dpstream-")
    assert unique_job_name("mine").startswith("mine-")
    assert unique_job_name("mine") != unique_job_name("mine")


def test_a_taken_port_is_seen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert is_taken(port)
    assert not is_taken(port)


def test_flink_listens_here_unless_there_are_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = LoopbackFlink(PipelineOptions(["--flink_job_server_jar=x.jar"]))
    monkeypatch.setenv("FLINK_CONF_DIR", "mine")
    assert server.environment() == {}
    monkeypatch.delenv("FLINK_CONF_DIR")
    server._local_temp_root = str(tmp_path / "own")
    (tmp_path / "own").mkdir()
    [folder] = server.environment().values()
    conf_text = (Path(folder) / "flink-conf.yaml").read_text()
    assert conf_text.count(": 127.0.0.1\n") == 4 and "rest.bind-address: 127.0.0.1" in conf_text
    arguments = list(map(str, server.java_arguments(1, 2, 0, "a")))
    assert arguments[-2:] == ["--job-host", "127.0.0.1"] and "-1" in arguments
    server.stop()
    assert not Path(folder).exists()


class Cluster(BaseHTTPRequestHandler):
    """The part of a job manager's interface that ends jobs."""

    states: dict[str, str]

    def do_GET(self) -> None:
        jobs = [{"jid": k, "name": k[0], "state": v} for k, v in self.states.items()]
        self._say({"jobs": jobs})

    def do_PATCH(self) -> None:
        self.states[self.path.rpartition("/")[2]] = "CANCELED"
        self._say({})

    def _say(self, words: dict[str, Any]) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(words).encode())

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def cluster() -> Iterator[str]:
    Cluster.states = {"a1": "RUNNING", "a2": "FINISHED", "b1": "RUNNING"}
    with HTTPServer(("127.0.0.1", 0), Cluster) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def test_jobs_of_the_name_are_cancelled_and_no_others(
    cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_servers, "_LOOK_SECONDS", 0.01)
    cancel_on_flink(cluster, "a")
    assert Cluster.states == {"a1": "CANCELED", "a2": "FINISHED", "b1": "RUNNING"}


def test_a_cluster_that_does_not_answer_is_an_error(
    monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    monkeypatch.setattr(job_servers, "_CANCEL_SECONDS", -1.0)
    refused(lambda: cancel_on_flink(f"127.0.0.1:{free_port()}", "a"))


# Workers and guards: a pool of processes, a worker's harness, and what ends with its parent.


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
