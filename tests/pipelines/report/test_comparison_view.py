"""The page of two runs: whole, escaped, and it names what differs."""

from collections.abc import Callable
from pathlib import Path

from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.report.comparison import compare
from dpstream.pipelines.report.comparison_view import differences, render
from dpstream.pipelines.report.report import build
from tests.pipelines.report.runs import HOSTILE, second, weeks
from tests.reports import Page, check_page, data_of, edit, put, row

MakeJob = Callable[..., Job]


def test_page(make_job: MakeJob, tmp_path: Path) -> None:
    plain = make_job()
    b = edit(weeks(second(plain, tmp_path / "b"), [], 7), ("epsilon = 6.0", "epsilon = 3.0"))
    b = weeks_again(b)
    a = weeks(plain, HOSTILE, 7, seed=2)
    text = render(compare(build(a), build(b)))
    page = Page(text)
    check_page(page, text)
    assert differences(build(a), build(b)) == [("privacy.epsilon", "6", "3")]
    assert "privacy.epsilon" in page.of("th") and "-q" not in page.of("title")
    assert str(tmp_path) not in text and "<img" not in text
    data = data_of(page)
    assert [c["title"] for c in data["columns"][:3]] == [
        "records in A", "records in B", "records: B less A",
    ]  # fmt: skip
    assert {key[0] for key in data["keys"]} >= {HOSTILE[0], HOSTILE[2]}
    # Three columns of six keys, three scatters, keys by window.
    assert len(page.every("svg")) == 3 * 6 + 3 + 1
    assert "together they promise less" in page.text


def weeks_again(job: Job) -> Job:
    """Releases of the changed plan, in a folder without older ones."""
    job = edit(job, ('path = "releases"', 'path = "others"'))
    for window in range(7):
        rows = [{**row(key, 50.0), "level": 5.0, "level_sd": 1.0} for key in sorted(HOSTILE)]
        put(job, 4, rows, window)
    return job


def test_nothing_to_compare_is_said(make_job: MakeJob, tmp_path: Path) -> None:
    a = make_job()
    b = second(a, tmp_path / "b", lambda text: text.replace("2024-01-0", "2024-02-0"))
    for job in (a, b):
        put(job, 1, [row("x", 1.0)])
    text = render(compare(build(a), build(b)))
    page = Page(text)
    check_page(page, text)
    assert "The runs share no window" in page.text and "of the same run" in page.text
    assert "time.start" in page.of("th")
