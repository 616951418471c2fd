"""``dpstream report``: its examples; a run without releases gets a page too."""

from collections.abc import Callable
from pathlib import Path

from dpstream.accounting.errors import RunError
from dpstream.pipelines.jobs.job import Job
from tests.pipelines.cli.called import call, examples_of, refused


def test_examples() -> None:
    assert len(examples_of("report")) == 3


def test_a_page_before_the_first_release(make_job: Callable[..., Job], tmp_path: Path) -> None:
    (tmp_path / "releases").mkdir()
    out = tmp_path / "page.html"
    said = call("report", make_job().path, "--out", out)
    assert said.exit_code == 0 and "0 of 4 releases" in said.output
    assert "do not publish" in said.output  # a fixed test key
    assert out.read_text().lstrip().lower().startswith("<!doctype html>")


def test_a_page_that_cannot_be_written(make_job: Callable[..., Job], tmp_path: Path) -> None:
    assert "sink.path" in refused("report", make_job().path)
    (tmp_path / "releases").mkdir()
    out = tmp_path / "none" / "page.html"
    assert "--out" in refused("report", make_job().path, "--out", out, code=RunError.exit_code)
