"""Parts that runners need on this machine: their places, builds and versions, and job servers."""

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

from dpstream.pipelines.runners import job_servers, parts, prism_build
from dpstream.pipelines.runners import prism_build as PRISM
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
