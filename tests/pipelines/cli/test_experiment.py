"""``dpstream experiment``: its commands, and settings that are refused at once."""

import json
from pathlib import Path

import pytest

from tests.pipelines.cli.called import call, examples_of, refused


def test_each_command_has_examples() -> None:
    for name in ("table1", "figure10", "table2", "workloads"):
        assert examples_of("experiment", name)


@pytest.mark.parametrize("name", ["table1", "table2", "figure10"])
def test_a_mode_that_cannot_be_read(name: str, tmp_path: Path) -> None:
    said = refused(
        "experiment", name, "--modes", "best", "--users", "10", "--folder", tmp_path / "runs"
    )
    assert "--modes" in said and "sticky" in said


def test_lists_take_several_values(tmp_path: Path) -> None:
    said = refused("experiment", "table1", "--triggers", "100", "7000001", "--users", "10",
                   "--modes", "sticky", "--baselines", "none", "--folder", tmp_path)  # fmt: skip
    assert "--triggers" in said and "divide a day" in said


def test_workloads(tmp_path: Path) -> None:
    done = call("experiment", "workloads", "--only", "example4", "figure4", "--large", "64",
                "--out", tmp_path / "w.json", "--json")  # fmt: skip
    assert done.exit_code == 0, done.output
    kept, shown = json.loads((tmp_path / "w.json").read_text()), json.loads(done.stdout)
    assert kept["example4"] == shown["example4"] and "figure5" not in shown
    assert shown["pictures"] == [f"w-{part}.{form}" for part in ("example4", "figure4")
                                 for form in ("png", "svg")]  # fmt: skip
    assert all((tmp_path / name).exists() for name in shown["pictures"])
    assert "--only example4 figure4" in kept["command"] and "--large 64" in kept["command"]
    printed = call("experiment", "workloads", "--only", "example4").stdout
    assert "eigen 1.017" in printed
    assert "--cells" in refused("experiment", "workloads", "--cells", "100")
    assert "--out" in refused("experiment", "workloads", "--out", tmp_path / "w.txt")
