"""The served page: this machine, this address, this token and nothing else; no writing."""

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pacsv
import pytest

from dpstream.pipelines.formats.encodings import unguarded
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.report import server as module
from dpstream.pipelines.report.report import build
from dpstream.pipelines.report.server import Live, Server
from dpstream.pipelines.report.view import render
from tests.browser import DESKTOP, PHONE, Browser, Tab, browser
from tests.golden.refusals import Refused
from tests.listening import heard
from tests.pipelines.report.runs import HOSTILE, weeks
from tests.pipelines.test_demo import demo_page
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


# Every page in a real browser, on a desk and on a phone: it fits, works, and loads nothing.


SCREENS = (DESKTOP, PHONE)
KEYS = [*HOSTILE, *(f"plain {n:03}" for n in range(150))]


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as running:
        yield running


def fits(tab: Tab, allowed_urls: Set[str] = frozenset()) -> None:
    """Nothing is wider than the screen, complained or was loaded; no key has run."""
    assert tab.width <= tab.screen[0], "wider than the screen"
    assert tab.run("innerWidth") == tab.screen[0]
    assert tab.complaints() == [], "complaints"
    assert tab.requests() <= allowed_urls, "requests"
    assert "pwned" not in tab.run("document.title")


def rows(tab: Tab) -> list[list[str]]:
    every = "[...document.querySelectorAll('#keys-table tbody tr')]"
    return list(tab.run(f"{every}.map(row => [...row.cells].map(cell => cell.textContent))"))


def write(tab: Tab, text: str) -> None:
    tab.run(f"search.value = {text!r}; search.dispatchEvent(new Event('input', {{bubbles: true}}))")


def saved(chromium: Browser, tab: Tab, name: str) -> pa.Table:
    """The table that the page's button saves."""
    path = chromium.downloads / name
    path.unlink(missing_ok=True)
    tab.run("document.getElementById('csv').click()")
    chromium.wait("Page.downloadWillBegin")
    while chromium.wait("Page.downloadProgress")["state"] != "completed":
        pass
    return pacsv.read_csv(path, parse_options=pacsv.ParseOptions(newlines_in_values=True))


def opened(chromium: Browser, text: str, folder: Path, screen: tuple[int, int, bool]) -> Tab:
    path = folder / "page.html"
    path.write_text(text, encoding="utf-8")
    return chromium.open(path.as_uri(), screen)


def test_what_is_wrong_with_a_page_is_noticed(chromium: Browser, tmp_path: Path) -> None:
    wrong = {
        "<div style='width:2000px'>wide</div>": "wider",
        "<script>console.error('no')</script>": "complaints",
        "<script>nothing.at.all</script>": "complaints",
        "<img src='http://127.0.0.1:9/x.png'>": "complaints",
        "<img src='other.svg'>": "requests",
        "<title>pwned</title>": "pwned",
    }
    viewport = "<!doctype html><meta name='viewport' content='width=device-width'>"
    (tmp_path / "other.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    fits(opened(chromium, f"{viewport}<p>right</p>", tmp_path, PHONE))
    for part, complaint in wrong.items():
        with pytest.raises(AssertionError, match=complaint):
            fits(opened(chromium, viewport + part, tmp_path, PHONE))


def test_report(chromium: Browser, make_job: MakeJob, tmp_path: Path) -> None:
    text = render(build(weeks(make_job(), KEYS, 8)))
    for screen in SCREENS:
        tab = opened(chromium, text, tmp_path, screen)
        fits(tab)
        assert len(rows(tab)) == 12 and tab.run("more.textContent") == "Show 100 more"
        tab.run("more.click()")
        assert len(rows(tab)) == 112
        tab.run("more.click()")
        assert len(rows(tab)) == len(KEYS) and tab.run("more.hidden")
        write(tab, "PLAIN 00")
        assert {line[0] for line in rows(tab)} == {f"plain {n:03}" for n in range(10)}
        tab.run("document.querySelector('th[data-sort=k0] button').click()")
        assert [line[0] for line in rows(tab)] == [f"plain {n:03}" for n in range(10)]
        tab.run("document.querySelector('th[data-sort=c0] button').click()")
        sizes = [float(line[1].partition(" ")[0].replace(",", "")) for line in rows(tab)]
        assert sizes == sorted(sizes, reverse=True)
        # All windows of one key, and back.
        tab.run("document.querySelector('#keys-table tbody button').click()")
        names = {line[0] for line in rows(tab)}
        assert len(names) == 1 and len(rows(tab)) >= 6
        assert tab.run("document.querySelectorAll('#keys-table svg').length") == 1
        tab.run("document.getElementById('back').click()")
        assert len(rows(tab)) == 10
        write(tab, "")
        window = "document.getElementById('window')"
        tab.run(f"{window}.value = 'all'; {window}.dispatchEvent(new Event('change'))")
        table = saved(chromium, tab, "keys.csv")
        there = sum((w + k) % 5 > 0 for w in range(8) for k in range(len(KEYS)))
        assert table.num_rows == there
        starts = {str(moment.date()) for moment in table["window_start"].to_pylist()}
        assert starts == {f"2024-01-{day:02}" for day in range(1, 9)}
        fits(tab)


def test_hostile_keys_are_text_everywhere(
    chromium: Browser, make_job: MakeJob, tmp_path: Path
) -> None:
    text = render(build(weeks(make_job(), HOSTILE, 3)))
    plain = {key for key in HOSTILE if len(key) < 120 and key.isprintable()}
    for screen in SCREENS:
        tab = opened(chromium, text, tmp_path, screen)
        page_keys = {line[0] for line in rows(tab)}
        assert plain <= page_keys and not any("\u202e" in key for key in page_keys)
        # The first plot's last point says its value.
        tab.run("document.querySelector('[data-tips]').focus()")
        assert "±" in tab.run("document.querySelector('.tip').textContent")
        table = saved(chromium, tab, "keys.csv")
        written = set(table["key"].to_pylist())
        assert not [key for key in written if key.lstrip("'") == key and key[:1] in "=+-@"]
        assert plain <= set(unguarded(table)["key"].to_pylist())
        assert "'=1+1" in written and "''-quoted\"" in written
        fits(tab)
        assert tab.run("document.querySelectorAll('img, b, iframe').length") == 0


def test_pages_without_a_table(chromium: Browser, make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job()
    put(job, 1, [])
    nothing = render(build(job))
    for screen in SCREENS:
        tab = opened(chromium, nothing, tmp_path, screen)
        assert "Nothing was published" in tab.run("document.body.innerText")
        fits(tab)
        tab = opened(chromium, demo_page(), tmp_path, screen)
        assert "What is promised" in tab.run("document.body.innerText")
        fits(tab)


def test_a_served_page_shows_what_is_new(
    chromium: Browser, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAUSE", 0.1)
    job = make_job()
    put(job, 1, [row("key one", 50.0), row("other", 40.0)])
    with Server(job) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        fits(chromium.open(server.address, DESKTOP), {f"{server.address}state"})
        tab = chromium.open(server.address, PHONE)
        write(tab, "key")
        assert len(rows(tab)) == 1
        put(job, 2, [row("key one", 51.0), row("key two", 60.0), row("other", 40.0)])
        tab.until("document.querySelectorAll('#keys-table tbody tr').length === 2")
        assert tab.run("search.value") == "key"  # what was looked for stays
        fits(tab, {f"{server.address}state"})
        server.shutdown()
        thread.join()
    tab.until("document.getElementById('live').textContent.includes('has ended')")
