"""Job servers: names, ports and settings of those that a run starts (started in tests/runners).

Sockets as the kernel tells of them (engines are listened to in tests/runners).
"""

import json
import os
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from dpstream.accounting.errors import RunError
from dpstream.pipelines.runners import job_servers
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
from tests.emulator import free_port


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


def test_a_cluster_that_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_servers, "_CANCEL_SECONDS", -1.0)
    with pytest.raises(RunError) as error:
        cancel_on_flink(f"127.0.0.1:{free_port()}", "a")
    assert error.value.field == "--flink_master"
