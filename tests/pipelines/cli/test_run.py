"""``dpstream run``: early refusals, private counts on stderr.

``dpstream report``: a run without releases gets a page too.

``dpstream demo``: a job that is not one.
"""

import json
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from dpstream.accounting.errors import RunError
from dpstream.pipelines.cli import private_counts
from dpstream.pipelines.cli.run import print_cut, print_operator, released_text
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.stream.run import Result
from dpstream.pipelines.stream.summary import Released
from dpstream.state import open as stores
from tests.growing import arrive, place
from tests.pipelines.cli.called import call, refused
from tests.reports import edit, put, row


def test_refused_before_anything_is_read(make_job: Callable[..., Job], tmp_path: Path) -> None:
    assert "--runner" in refused("run", "--project", make_job().path, "--runner", "NoSuchRunner")
    assert not (tmp_path / "releases").exists()
    refused("run", "--project", tmp_path / "none.toml")


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with --operator."""
    monkeypatch.setattr(private_counts, "visible", lambda: True)


def result_of(counts: dict[str, int], resumed: bool = False) -> Result:
    return Result("r", "h", 4, "out", resumed, counts)


def test_counts_are_for_the_operator_on_stderr(
    make_job: Callable[..., Job], capsys: pytest.CaptureFixture[str], operator: None
) -> None:
    counts = {"operator_dead_letters": 1234, "operator_records": 5, "public": 9}
    print_operator(make_job(), result_of(counts))
    out, err = capsys.readouterr()
    assert out == ""
    assert "dead letters 1,234, records 5." in err and "public" not in err and "dead_letter" in err
    print_operator(make_job(), result_of({}))
    assert "read no record" in capsys.readouterr().err


def test_what_contributions_cut_is_said_if_it_is_much(
    make_job: Callable[..., Job], capsys: pytest.CaptureFixture[str], operator: None
) -> None:
    job = make_job()
    print_cut(job, {"operator_pairs_admitted": 81, "operator_pairs_rejected": 19})
    print_cut(job, {})
    assert capsys.readouterr() == ("", "")
    cut = {"operator_pairs_admitted": 30, "operator_pairs_rejected": 70}
    print_cut(job, cut)
    out, err = capsys.readouterr()
    assert out == "" and "left 70% of the records out. `dpstream choose`" in err
    print_cut(edit(job, ('end = "2024-01-02T', 'end = "2024-01-05T')), cut)
    assert "out, most of it in later windows" in (err := capsys.readouterr().err)
    assert "budget.covers" in err


SD = "relative noise (sd) of final values:"


@pytest.mark.parametrize(
    ("released", "words"),
    [
        (
            Released(7, 2, 28, 1_191, 137, 0.384, 0.12),
            "1,191 rows of 137 keys in 7 windows (2 of them empty);"
            f" {SD} median 12%, largest 38.4%.",
        ),
        (
            Released(1, 0, 1, 1, 1, 12.0, 12.0),
            f"1 row of 1 key in 1 window; {SD} median over 1,000%, largest over 1,000%.",
        ),
        (Released(2, 2, 2, 0, 0, None), "0 rows of 0 keys in 2 windows (2 of them empty)."),
    ],
)
def test_what_was_released_in_words(released: Released, words: str) -> None:
    assert released_text(released) == f"Released {words}"


def test_nothing_released_is_said_without_private_reasons(tmp_path: Path) -> None:
    """One line for each public reason; why it was, for the operator; the same for every input."""
    folder = place(tmp_path, kind="csv")
    reasons = {
        "3 of 9 records are unusable": ("x,p,now,\n" * 3 + "1,p,2024-01-01 00:00:00Z,1\n" * 6,
                                        "6 records are usable, but no key"),
        "all are unusable": ("1,p,2024-01-99,\n" * 3, "all 3 records are unusable"),
        "no record": ("", "holds no record"),
    }  # fmt: skip
    public = set()
    for rows, private in reasons.values():
        (folder / "s.db").unlink(missing_ok=True)
        shutil.rmtree(folder / "out", ignore_errors=True)
        (folder / "in" / "day-0.csv").write_text("user,page,at,amount\n" + rows)
        outcome = call("run", "--project", folder, "--operator", "--fail-if-empty")
        stores.close_all()
        assert outcome.exit_code == 4 and private in outcome.stderr, outcome.output
        lines = outcome.stderr.splitlines()
        public.add("\n".join(line for line in lines if not line.startswith("Operator only")))
    assert len(public) == 1 and "released nothing" in public.pop()


def test_a_pass_in_json_and_in_words(tmp_path: Path) -> None:
    """The private figures stand below ``operator_only`` alone."""
    folder = place(tmp_path, kind="csv")
    arrive(folder, 1)
    with open(folder / "in" / "day-0.csv", "a") as file:
        file.write("nobody,p1,2024-01-01 00:00:00Z,1\n")
    outcome = call("run", "--project", folder, "--through", "2024-01-02", "--json", "--operator")
    stores.close_all()
    facts = json.loads(outcome.stdout)
    assert facts["through"] == "2024-01-02T00:00:00Z" and facts["summary"]["released"]["rows"] > 10
    records = facts["operator_only"]["records"]
    assert (records["read"], records["dead"]) == (1_501, 1) and records["cause"] is None
    assert records["dead_share"] == pytest.approx(1 / 1_501)
    arrive(folder, 2)
    quiet = call("run", "--project", folder, "--through", "2024-01-03", "--quiet", "--operator")
    stores.close_all()
    assert "released through 2024-01-03T00:00:00Z; files may join" in quiet.output
    assert "position and reason, 0.0333% of the records" in quiet.output
    engine = refused("run", "--project", folder, "--through", "end", "--runner", "PrismRunner")
    assert "reads no files that grow" in engine or "--prism_location" in engine


def test_a_page_before_the_first_release(make_job: Callable[..., Job], tmp_path: Path) -> None:
    (tmp_path / "releases").mkdir()
    out = tmp_path / "page.html"
    outcome = call("report", "--project", make_job().path, "--out", out)
    assert outcome.exit_code == 0 and "0 of 4 releases" in outcome.output
    assert "do not publish" in outcome.output  # a fixed test secret
    assert out.read_text().lstrip().lower().startswith("<!doctype html>")


def test_a_page_that_cannot_be_written(make_job: Callable[..., Job], tmp_path: Path) -> None:
    assert "sink.path" in refused("report", "--project", make_job().path)
    (tmp_path / "releases").mkdir()
    out = tmp_path / "none" / "page.html"
    assert "--out" in refused(
        "report", "--project", make_job().path, "--out", out, code=RunError.exit_code
    )


def test_each_job_has_a_page_of_its_own(
    make_job: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = make_job()
    (tmp_path / "releases").mkdir()
    assert call("report", "--project", job.path).exit_code == 0
    assert (tmp_path / f"{job.name}.report.html").exists()
    error = refused("report", "--project", job.path, "--out", "x.txt")
    assert ".html" in error and "type --out x.html" in error and not Path("x.txt").exists()


def test_flags_that_do_not_go_together(make_job: Callable[..., Job]) -> None:
    job = make_job().path
    assert "--port" in refused("report", "--project", job, "--port", "1")
    for flags in (["--out", "x.html"], ["--truth", job], ["--json"]):
        assert str(flags[0]) in refused("report", "--project", job, "--serve", *flags)


def test_a_served_page(make_job: Callable[..., Job]) -> None:
    job = make_job()
    put(job, 1, [row("a", 50.0)])
    command = [sys.executable, "-m", "dpstream", "report", "--project", str(job.path), "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url_match = re.fullmatch(
            r"Report at (http://127\.0\.0\.1:\d+/\S+/)\n", process.stdout.readline()
        )
        assert url_match is not None
        with urllib.request.urlopen(url_match[1], timeout=60) as answer:
            assert b"What was released" in answer.read()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def test_the_office_of_the_demo_is_one(tmp_path: Path) -> None:
    done = call("demo", "--data", "census", "--folder", tmp_path / "office")
    assert done.exit_code == 0 and "Next: `dpstream census plan --project" in done.stdout
    project = tmp_path / "office" / "dpstream.toml"
    assert call("census", "plan", "--faults", "--project", project).stdout == "No fault.\n"
    planned = call("census", "plan", "--project", project)
    assert planned.exit_code == 0 and "Can make" in planned.stdout
    text = project.read_text()
    assert call("demo", "--data", "census", "--folder", project.parent).exit_code == 0
    assert project.read_text() == text
    project.unlink()
    assert "exists" in refused("demo", "--data", "census", "--folder", project.parent)


def test_what_lies_in_the_folder_is_used_and_checked(tmp_path: Path) -> None:
    for name in ("flights.parquet", "flights.secret", "dpstream.toml"):
        (tmp_path / name).write_text("SECRET")
    assert "SECRET" not in refused("demo", "--folder", tmp_path)
    assert (tmp_path / "dpstream.toml").read_text() == "SECRET"
