"""``python -m tests.bench.paper``: its commands, and settings that are refused at once."""

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from dpstream.pipelines.cli.parts import print_json
from tests.bench.paper.__main__ import ListCommand, paper


def call(*args: str | Path) -> Result:
    """A command's exit code and output."""
    return CliRunner().invoke(paper, [str(a) for a in args])


def refused(*args: str | Path) -> str:
    """What a refusal says."""
    result = call(*args)
    assert result.exit_code == 2 and "Traceback" not in result.output
    return result.output


def test_each_command_has_examples() -> None:
    for name in ("table1", "figure10", "table2", "workloads", "reddit"):
        assert f"python -m tests.bench.paper {name}" in call(name, "--help").output


@click.command(cls=ListCommand)
@click.option("--many", multiple=True, type=int)
@click.option("--one")
@click.option("--flag", is_flag=True)
def lists(many: tuple[int, ...], one: str | None, flag: bool) -> None:
    """Says what it was given."""
    print_json([many, one, flag])


@pytest.mark.parametrize(
    ("args", "given"),
    [([], [[], None, False]), (["--many", "1", "2", "--flag"], [[1, 2], None, True]),
     (["--many", "1", "--one", "x", "--many", "3"], [[1, 3], "x", False])],
)  # fmt: skip
def test_options_take_several_values(args: list[str], given: list[object]) -> None:
    assert json.loads(CliRunner().invoke(lists, args).output) == given


@pytest.mark.parametrize("args", [["--many"], ["--many", "--flag"], ["stray"], ["--many", "x"]])
def test_what_a_list_refuses(args: list[str]) -> None:
    assert CliRunner().invoke(lists, args).exit_code == 2


@pytest.mark.parametrize("name", ["table1", "table2", "figure10"])
def test_a_mode_that_cannot_be_read(name: str, tmp_path: Path) -> None:
    message = refused(name, "--modes", "best", "--users", "10", "--folder", tmp_path / "runs")
    assert "--modes" in message and "sticky" in message


def test_lists_take_several_values(tmp_path: Path) -> None:
    message = refused("table1", "--triggers", "100", "7000001", "--users", "10",
                   "--modes", "sticky", "--baselines", "none", "--folder", tmp_path)  # fmt: skip
    assert "--triggers" in message and "divide a day" in message


def test_workloads(tmp_path: Path) -> None:
    done = call("workloads", "--only", "example4", "figure4", "--large", "64",
                "--out", tmp_path / "w.json", "--json")  # fmt: skip
    assert done.exit_code == 0, done.output
    saved, stdout_report = json.loads((tmp_path / "w.json").read_text()), json.loads(done.stdout)
    assert saved["example4"] == stdout_report["example4"] and "figure5" not in stdout_report
    assert stdout_report["pictures"] == [f"w-{part}.{form}" for part in ("example4", "figure4")
                                 for form in ("png", "svg")]  # fmt: skip
    assert all((tmp_path / name).exists() for name in stdout_report["pictures"])
    assert "--only example4 figure4" in saved["command"] and "--large 64" in saved["command"]
    printed = call("workloads", "--only", "example4").stdout
    assert "eigen 1.017" in printed
    assert "--cells" in refused("workloads", "--cells", "100")
    assert "--out" in refused("workloads", "--out", tmp_path / "w.txt")
