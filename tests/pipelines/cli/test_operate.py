"""``dpstream folder``: markers are written, and rows of dead letters found.

``dpstream audit``: its examples, and figures that prove nothing.

``dpstream state``: each command has examples, and sizes are for the operator.

What commands share: lists of values, signals for a while, a bar of public things.
"""

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from dpstream.pipelines.cli import private_counts
from dpstream.pipelines.cli.operate import print_private
from dpstream.pipelines.cli.parts import (
    Bar,
    stop_signals,
)
from dpstream.pipelines.connectors.folder.store import place
from dpstream.pipelines.jobs.job import Job
from tests.pipelines.cli.called import call, refused


@pytest.mark.parametrize("name", ["info", "releases"])
def test_without_a_store(name: str, make_job: Callable[..., Job], tmp_path: Path) -> None:
    assert "store" in refused("state", name, "--project", make_job().path)
    assert not list(tmp_path.glob("*.db"))


def test_a_kind_is_for_files(make_job: Callable[..., Job]) -> None:
    assert "--kind" in refused("state", "releases", "--project", make_job().path, "--kind", "csv")


def test_sizes_are_on_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_counts, "visible", lambda: True)
    part = {"name": "units", "window": 3, "bytes": 2**20, "rows": 1234}
    print_private({"bytes": 2**21, "parts": [part], "input_changed": False})
    out, err = capsys.readouterr()
    assert out == ""
    assert "2.0 MiB" in err and "1.0 MiB in 1,234 rows, window 3" in err


def test_new_files_are_closed_once(tmp_path: Path) -> None:
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("x")
    first = json.loads(call("folder", "close", tmp_path, "--new", "--json").output)
    assert first["files"] == 2 and (tmp_path / first["marker"]).exists()
    assert "0 files closed" in call("folder", "close", tmp_path, "--new").output


def test_a_position_is_a_row_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x")
    at = place("a.csv")
    outcome = call("folder", "find", tmp_path, str(at.partition), str(at.base + 12), "--json")
    assert json.loads(outcome.output) == [{"file": "a.csv", "row": 12}]
    assert "no file" in call("folder", "find", tmp_path, "1", "2").output


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert "file" in refused("folder", "close", tmp_path, "none.csv")


def test_signals_stop_while_the_block_runs_and_then_do_what_they_did() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_signals(True) as stop:
        assert stop is not None and not stop.is_set()
        signal.raise_signal(signal.SIGTERM)
        assert stop.is_set()
    assert signal.getsignal(signal.SIGTERM) is before
    with stop_signals(False) as none:
        assert none is None and signal.getsignal(signal.SIGTERM) is before


def test_a_bar_shows_steps_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    with Bar(hidden=True) as bar:
        bar.update(3, 0)
        [task] = bar._progress.tasks
        assert (task.completed, task.total) == (3, None)
        bar.update(4, 9)
        assert (task.completed, task.total) == (4, 9)
    assert capsys.readouterr() == ("", "")
