"""``dpstream report``: its examples; a run without releases gets a page too.

``dpstream demo``: its examples, and a job that is not one.
"""

import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from dpstream.accounting.errors import RunError
from dpstream.pipelines.jobs.job import Job
from tests.pipelines.cli.called import call, examples_of, refused
from tests.reports import put, row


def test_examples() -> None:
    assert len(examples_of("report")) == 4


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


def test_examples_of_demo() -> None:
    assert examples_of("demo") == [
        "dpstream demo",
        "dpstream demo --folder flights",
        "dpstream demo --data census --folder office",
    ]


def test_the_office_of_the_demo_is_one(tmp_path: Path) -> None:
    done = call("demo", "--data", "census", "--folder", tmp_path / "office")
    assert done.exit_code == 0 and "Next: `dpstream census plan --project" in done.stdout
    project = tmp_path / "office" / "dpstream.toml"
    assert call("census", "validate", "--project", project).stdout == "No fault.\n"
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
