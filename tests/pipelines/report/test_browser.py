"""Every page in a real browser, on a desk and on a phone: it fits, works, and loads nothing."""

import threading
from collections.abc import Callable, Iterator, Set
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pacsv
import pytest

from dpstream.pipelines.formats.encodings import unguarded
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.report import server as module
from dpstream.pipelines.report.report import build
from dpstream.pipelines.report.server import Server
from dpstream.pipelines.report.view import render
from tests.browser import DESKTOP, PHONE, Browser, Tab, browser
from tests.pipelines.report.runs import HOSTILE, weeks
from tests.pipelines.test_demo import demo_page
from tests.reports import put, row

MakeJob = Callable[..., Job]
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
        assert len(rows(tab)) == 100 and not tab.run("more.hidden")
        tab.run("more.click()")
        assert len(rows(tab)) == len(KEYS)
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
