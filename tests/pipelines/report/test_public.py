"""The page for the public: it answers a lay reader, prints on paper, and excludes nobody.

The questions were written before the page.
"""

import base64
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.report.report import build
from dpstream.pipelines.report.view import render
from tests import accounts
from tests.browser import DESKTOP, PHONE, Browser, browser, missing
from tests.pipelines.report.test_server import fits, opened, rows
from tests.reports import Page, edit, put

MakeJob = Callable[..., Job]
PUBLICATION = """
[job.daily.publication]
title = "Rides of the city's bicycles, by station and week"
description = "How many rides of rented bicycles began at each station."
publisher = "Office for statistics"
contact = "statistics@example.org"
region = "Exampleton"
licence = "CC-BY-4.0"
citation = "Office for statistics: Rides of the city's bicycles."
next = "every Monday"
labels = { key = "Station", records = "Rides", total = "Minutes", user = "rider" }
withhold = "sd > 30%"
"""
WEEKS = 12
#: Questions of a reader who has the page alone, and what the page must say to answer them.
QUESTIONS = {
    "What is this, and which time and place is it about?": (
        "How many rides of rented bicycles began at each station.",
        "2024-01-01 UTC to 2024-03-25 UTC", "Exampleton",
    ),
    "How many rides started at Central in week 12, and how sure is that?": (
        "Central", "1,212 ± 23.5", "2024-03-18 UTC", "95 of 100 cases",
    ),
    "Which of Central and Harbour had more?": (
        "1,212 ± 23.5", "912 ± 23.5", "differ by 30 ± 25: the first is larger",
    ),
    "Is my data in this?": (
        "hardly show whether the records of one rider in one week are among the data",
        "At most 4 records of one rider count in a week",
    ),
    "I rode every week. Does that make me easier to find?": (
        "in all 12 weeks", "of 100 who are",
        "epsilon 6 for one rider in one week, ",
    ),
    "North is not in the table: did nobody ride there?": ("A missing row does not mean zero.",),
    "Why does Mill have no number?": (
        "too uncertain", "24 of 72 figures are withheld", "shown are too high on average",
    ),
    "May I use it in my article, and how do I cite it?": (
        "licence CC-BY-4.0", "Office for statistics: Rides of the city's bicycles. Differentially",
        "Give each figure with its ±",
    ),
    "Whom do I ask, and when do new figures come?": ("statistics@example.org", "every Monday"),
    "Is there a limit, and what do further weeks cost me?": (
        "may cost at most epsilon 9 at delta 1e-6 for one rider", "100% is left",
        "Each week costs epsilon 6 and delta 1e-9",
    ),
}  # fmt: skip


@pytest.fixture
def rides(make_job: MakeJob) -> Job:
    """Twelve weeks of three stations; one of them is too small to be shown."""
    text = make_job().path.read_text()
    account = 'account = { path = "a.db", limit = { epsilon = 9.0, delta = 1e-6 } }'
    text = text.replace("\n\n[table.", f"\n{account}\n\n[table.") + PUBLICATION
    path = make_job().path
    accounts.write(path, text)
    job = edit(
        load_job(path), ('key = ["key"]', 'key = ["station"]'), ('{ key = ', '{ station = '),
        ('window = "1d"', 'window = "7d"'), ('covers = "lifetime"', 'covers = "7 days"'),
        ('"6h"', '"7d"'),
        ("2024-01-02", f"{np.datetime64('2024-01-01') + 7 * WEEKS}"),
    )  # fmt: skip
    for week in range(WEEKS):
        sizes = {"Central": 1201.0 + week, "Harbour": 901.0 + week, "Mill": 20.0 - week}
        put(job, 1, [
            {"station": name, "records": size, "records_sd": 12.0, "total": 9 * size,
             "total_sd": 90.0} for name, size in sizes.items()
        ], week)  # fmt: skip
    return job


def text_of(text: str) -> str:
    """What a reader sees without opening the part for experts."""
    open_part = re.sub("<details.*?</details>", "", text, flags=re.DOTALL)
    return " ".join(Page(open_part).text.split())


def test_the_page_answers_its_readers(rides: Job) -> None:
    text = render(build(rides))
    page = text_of(text)
    for question, facts in QUESTIONS.items():
        for fact in facts:
            assert fact in page, f"{question} {fact}"
    assert "plan" not in page.partition("How to cite")[0]  # what identifies it comes last


def test_an_account_that_cannot_be_read_has_no_line(rides: Job) -> None:
    (rides.path.parent / "a.db").write_bytes(b"another file")
    report = build(rides)
    assert report.account is None and 'id="account"' not in render(report)


def test_files_beside_the_page_are_named_only_if_they_are_there(rides: Job) -> None:
    report = build(rides)
    assert "final.csv" not in render(report)
    page = Page(render(report, downloads=("final.csv", "final.parquet")))
    linked = [a["href"] for a in page.every("a") if (a["href"] or "").startswith("final")]
    assert linked == ["final.csv", "final.parquet"]


def test_values_that_are_withheld_are_nowhere_on_the_page(rides: Job) -> None:
    """Neither in the table nor in what pictures tell; what is saved has them, marked."""
    text = render(build(rides))
    before = text.partition('<script type="application/json"')[0]
    after = text.partition('<section aria-labelledby="protection">')[0].partition("</script>")[2]
    for part in (before, after):
        assert not re.search(r"\b\d{1,2}(\.\d)? ± 23.5", part)
    assert "Final Rides of Mill" not in text and "Final Rides of Harbour" in text
    assert '"share":0.3' in text and "Growth of one window" not in text  # of one release


# In a real browser.


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as running:
        yield running


def axe() -> str:
    """The checker of accessibility."""
    path = Path(__file__).parents[3] / ".tools" / "axe" / "axe.min.js"
    if not path.exists():
        missing("axe-core is missing: `make axe`")
    return path.read_text(encoding="utf-8")


VIOLATIONS = """axe.run(document).then(result => result.violations.map(
  each => each.id + ": " + each.nodes.map(node => node.target).join(" ")))"""


def faults(chromium: Browser, page: str, folder: Path, screen: Any, scheme: str) -> list[str]:
    """What axe-core finds on a page, the part for experts opened."""
    tab = opened(chromium, page, folder, screen)
    chromium.ask(
        "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
    )
    tab.run("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    fits(tab)
    tab.run(f"{axe()}; 0")
    return list(tab.run(VIOLATIONS))


def test_nobody_is_excluded(chromium: Browser, rides: Job, tmp_path: Path) -> None:
    page = render(build(rides))
    for scheme in ("light", "dark"):
        for screen in (DESKTOP, PHONE):
            assert faults(chromium, page, tmp_path, screen, scheme) == []
    faint = page.replace("--soft: #56606b", "--soft: #a0a8b0")
    unnamed = page.replace("<label>Search <input", "<label><input")
    for sabotaged, rule in ((faint, "color-contrast"), (unnamed, "label")):
        complaints = faults(chromium, sabotaged, tmp_path, DESKTOP, "light")
        assert any(each.startswith(rule) for each in complaints), rule


def test_on_paper(chromium: Browser, rides: Job, tmp_path: Path) -> None:
    """Four pages at most, without controls, light also where the screen is dark."""
    tab = opened(chromium, render(build(rides)), tmp_path, DESKTOP)
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    chromium.ask("Emulation.setEmulatedMedia", media="print", features=dark)
    colour = "getComputedStyle(document.body).backgroundColor"
    assert tab.run(colour) == "rgb(255, 255, 255)"
    visible = "[...document.querySelectorAll('button, input, details')].filter(e => e.offsetParent)"
    assert tab.run(f"{visible}.filter(e => !e.closest('table')).length") == 0
    chromium.ask("Emulation.setEmulatedMedia", media="", features=dark)
    assert tab.run(colour) != "rgb(255, 255, 255)"
    pdf = base64.b64decode(chromium.ask("Page.printToPDF", preferCSSPageSize=True)["data"])
    assert 1 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 4


def test_withheld_values_in_the_browser(chromium: Browser, rides: Job, tmp_path: Path) -> None:
    tab = opened(chromium, render(build(rides)), tmp_path, DESKTOP)
    [mill] = [row for row in rows(tab) if row[0] == "Mill"]
    assert mill[1:3] == ["too uncertain", "too uncertain"]
    [central] = [row for row in rows(tab) if row[0] == "Central"]
    assert central[1].startswith("1,212 ± 23.5")
    window = "document.getElementById('window')"
    tab.run(f"{window}.value = '10'; {window}.dispatchEvent(new Event('change'))")
    assert [row[1] for row in rows(tab)] == ["1,211 ± 23.5", "911 ± 23.5", "too uncertain"]
