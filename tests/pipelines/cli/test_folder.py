"""``dpstream folder``: markers are written, and rows of dead letters found."""

import json
from pathlib import Path

from dpstream.pipelines.connectors.folder.store import place
from tests.pipelines.cli.called import call, examples_of, refused


def test_each_command_has_examples() -> None:
    assert examples_of("folder", "close") and examples_of("folder", "find")


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
