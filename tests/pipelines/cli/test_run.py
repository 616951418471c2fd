"""``dpstream run``: its examples, early refusals, private counts on stderr."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dpstream.pipelines.cli.run import _print_operator
from dpstream.pipelines.jobs.job import Job
from tests.pipelines.cli.called import examples_of, refused


def test_examples() -> None:
    assert len(examples_of("run")) == 4


def test_refused_before_anything_is_read(make_job: Callable[..., Job], tmp_path: Path) -> None:
    assert "--speed" in refused("run", make_job().path, "--speed", "fast")
    assert "--runner" in refused("run", make_job().path, "--runner", "NoSuchRunner")
    assert not (tmp_path / "releases").exists()
    refused("run", tmp_path / "none.toml")


def test_counts_are_for_the_operator_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    _print_operator({"operator_dead_letters": 1234, "operator_records": 5, "public": 9}, Path("d"))
    out, err = capsys.readouterr()
    assert out == ""
    assert "dead letters 1,234, records 5" in err and "9" not in err and "in d" in err
    _print_operator({}, Path("d"))
    assert "nothing new" in capsys.readouterr().err
