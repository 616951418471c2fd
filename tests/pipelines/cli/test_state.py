"""``dpstream state``: each command has examples, and sizes are for the operator."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dpstream.pipelines.cli import parts
from dpstream.pipelines.cli.state import _print_sizes, state
from dpstream.pipelines.jobs.job import Job
from tests.pipelines.cli.called import examples_of, refused


@pytest.mark.parametrize("name", sorted(state.commands))
def test_each_command_has_examples(name: str) -> None:
    assert examples_of("state", name)


@pytest.mark.parametrize("name", ["info", "releases"])
def test_without_a_store(name: str, make_job: Callable[..., Job], tmp_path: Path) -> None:
    assert "store" in refused("state", name, "--project", make_job().path)
    assert not list(tmp_path.glob("*.db"))


def test_a_kind_is_for_files(make_job: Callable[..., Job]) -> None:
    assert "--kind" in refused("state", "releases", "--project", make_job().path, "--kind", "csv")


def test_sizes_are_on_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "visible", lambda: True)
    part = {"name": "units", "window": 3, "bytes": 2**20, "rows": 1234}
    _print_sizes({"bytes": 2**21, "parts": [part]})
    out, err = capsys.readouterr()
    assert out == ""
    assert "2.0 MiB" in err and "1.0 MiB in 1,234 rows, window 3" in err
