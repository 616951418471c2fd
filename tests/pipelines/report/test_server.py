"""The served page: this machine, this address, this token and nothing else; no writing."""

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.report import server as module
from dpstream.pipelines.report.server import Live, Server
from dpstream.pipelines.report.view import render
from tests.golden.refusals import Refused
from tests.listening import heard
from tests.reports import Page as Parsed
from tests.reports import check_page, edit, put, row

MakeJob = Callable[..., Job]


@contextmanager
def serving(job: Job) -> Iterator[Server]:
    with Server(job) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server: Server, path: str, method: str = "GET", **headers: str) -> tuple[int, Any, bytes]:
    """(status, headers, body) of a request with these headers, ``Host`` too if it is given."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    answer = connection.getresponse()
    response = (answer.status, answer.headers, answer.read())
    connection.close()
    return response


@pytest.fixture
def server(make_job: MakeJob) -> Iterator[Server]:
    job = make_job()
    put(job, 1, [row("a", 50.0)])
    with serving(job) as made:
        yield made


def test_the_page_and_its_state(server: Server) -> None:
    root = f"/{server.token}/"
    code, headers, body = ask(server, root)
    text = body.decode()
    assert code == 200 and "connect-src 'self'" in headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert headers["Cache-Control"] == "no-store" and headers["Referrer-Policy"] == "no-referrer"
    assert "Access-Control-Allow-Origin" not in headers and "Python" not in headers["Server"]
    [note] = [a for _, a in Parsed(text).elements if a.get("id") == "live"]
    state = json.loads(ask(server, f"{root}state")[2])
    assert state["version"] == note["data-version"] and state["seconds"] >= module.LOOK_SECONDS
    # But for asking its own server, it is the page that could be published.
    check_page(Parsed(text.replace("; connect-src", "; x").replace(" 'self'", "")), text)
    assert ask(server, root, "HEAD")[::2] == (200, b"")


def test_everybody_else_gets_the_same_answer(server: Server) -> None:
    root, port = f"/{server.token}/", server.server_port
    nothing = ask(server, "/")
    assert nothing[0] == 404
    others = [
        (f"/{server.token}", {}),
        (f"/{'x' * len(server.token)}/", {}),
        (f"{root}../", {}),
        (f"{root}state/", {}),
        (f"{root}?", {}),
        (f"{root}%2e%2e/dpstream.toml", {}),
        (f"{root}dpstream.toml", {}),
        # A name that an attacker binds to this machine once its page is loaded.
        (root, {"Host": f"evil.example:{port}"}),
        (root, {"Host": "127.0.0.1"}),
        (root, {"Host": f"localhost:{port}"}),
        (root, {"Origin": "https://evil.example"}),
        (root, {"Origin": "null"}),
        (root, {"Sec_Fetch_Site": "cross-site"}),
        (root, {"Sec_Fetch_Site": "same-site"}),
    ]
    for path, headers in others:
        code, _, body = ask(server, path, **headers)
        assert (code, body) == (404, nothing[2]), (path, headers)
    assert (
        ask(server, root, Origin=f"http://127.0.0.1:{port}", Sec_Fetch_Site="same-origin")[0] == 200
    )
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT"):
        assert ask(server, root, method)[0] == 501, method


def test_it_listens_on_this_machine_alone(make_job: MakeJob) -> None:
    with heard() as listeners, serving(make_job()) as server:
        time.sleep(0.3)
        assert server.server_address[0] == "127.0.0.1"
    listeners.check(least=1)


def test_tokens_are_drawn_anew(make_job: MakeJob, refused: Refused) -> None:
    job = make_job()
    with Server(job) as one, Server(job) as two:
        assert one.token != two.token and len(one.token) >= 32
        assert one.address == f"http://127.0.0.1:{one.server_port}/{one.token}/"
        refused(Server, job, one.server_port)


def test_a_page_is_made_again_when_there_is_something_new(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def counted(report: Any, live: str) -> str:
        made.append(live)
        return render(report, live)

    monkeypatch.setattr(module, "render", counted)
    monkeypatch.setattr(module, "PAUSE", 0.0)
    job = make_job()
    live = Live(job)
    assert b"No report yet" in live.page() and not made  # no folder of releases
    put(job, 1, [row("first key", 50.0)])
    assert b"first key" in live.page() and len(made) == 1
    assert live.page() is live.page() and len(made) == 1
    before = live.version()
    put(job, 2, [row("second key", 50.0)])
    assert live.version() != before
    assert b"second key" in live.page() and len(made) == 2
    # While a page that took long was just made, the state that it shows is told.
    live._until = time.monotonic() + 60
    put(job, 3, [row("third key", 50.0)])
    assert live.version() == made[-1] and b"third key" not in live.page()


def test_failures_are_told_on_the_page(make_job: MakeJob) -> None:
    job = make_job()
    put(job, 1, [row("a", 50.0)])
    live = Live(edit(job, ("epsilon = 6.0", "epsilon = 1.0")))
    text = live.page().decode()
    assert "No report yet" in text and "releases of another plan" in text
    assert "data-version" in text and "<script>" in text


def test_releases_that_are_no_files(make_job: MakeJob, refused: Refused) -> None:
    job = edit(
        make_job(), ('kind = "parquet", path = "releases"',
                     'kind = "kafka", servers = "127.0.0.1:1", topic = "t"'),
    )  # fmt: skip
    refused(Server, job)


def test_nothing_is_written(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job()
    put(job, 1, [row("a", 50.0)])
    before = sorted(path for path in tmp_path.rglob("*"))
    Live(job).page()
    assert sorted(path for path in tmp_path.rglob("*")) == before
