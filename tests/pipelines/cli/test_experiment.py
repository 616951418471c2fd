"""``dpstream experiment``: its commands, and settings that are refused at once."""

from pathlib import Path

import pytest

from tests.pipelines.cli.called import examples_of, refused


def test_each_command_has_examples() -> None:
    for name in ("table1", "figure10", "table2"):
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
