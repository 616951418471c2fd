"""``dpstream init``: a job that plans as it stands, a secret, the next command; no value shown."""

import json
import shlex
import tomllib
from pathlib import Path

import click
import pytest

from dpstream.pipelines.cli import parts
from tests.pipelines.cli.called import call, examples_of, refused
from tests.pipelines.drafting import FLAGS, SECRET, commits


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in the current folder."""
    monkeypatch.chdir(tmp_path)
    return commits(Path("commits.parquet"))


def test_it_has_examples() -> None:
    assert examples_of("init")


def test_a_job_that_plans_as_it_stands(data: Path) -> None:
    value = ("--value", "lines", "--bounds", "-5", "100", "--key", "sha")
    outcome = call("init", data, *FLAGS, *value)
    assert outcome.exit_code == 0 and SECRET not in outcome.output
    following = shlex.split(outcome.output.splitlines()[-1].removeprefix("Next"))
    assert following == ["dpstream", "plan", "commits"]
    planned = call(*following[1:], "--json")
    assert planned.exit_code == 0, planned.output
    assert Path("commits.secret").stat().st_mode & 0o777 == 0o600
    text = Path("dpstream.toml").read_text()
    assert SECRET not in text and "bounds = [-5, 100]" in text


def covered(job: str = "commits") -> object:
    return tomllib.loads(Path("dpstream.toml").read_text())["job"][job]["budget"]["covers"]


def test_what_the_budget_covers(data: Path) -> None:
    """Nobody chose: each window, which is noted; or as the flag says."""
    days = (*FLAGS, "--window", "day", "--json", "--data-set", "commits")
    chosen = json.loads(call("init", data, *days).stdout)
    assert (chosen["covers"], covered()) == ("1d", "window") and "--covers" in chosen["notes"][0]
    assert len(chosen["choices"]) == 5  # a head, a window, four, everything, what is assumed
    for i, (covers, length) in enumerate(
        {"window": "1d", "lifetime": "lifetime", "28d": "28d"}.items()
    ):
        done = json.loads(call("init", data, *days, "--covers", covers, "--job", f"j{i}").stdout)
        assert (done["covers"], covered(f"j{i}")) == (length, covers)
        assert call("plan", f"j{i}").exit_code == 0
    assert "--covers" in refused("init", data, *days, "--covers", "36h", "--job", "no")
    long = ("--window", "100000d", "--data-set", "commits", "--job", "long", "--json")
    one = json.loads(call("init", data, *FLAGS, *long).stdout)
    assert (one["covers"], one["choices"], covered("long")) == ("lifetime", [], "lifetime")


def test_for_machines_and_twice(data: Path) -> None:
    """A second job of the file is added, in the same data set or in a new one."""
    first = json.loads(call("init", data, *FLAGS, "--json").stdout)
    assert first["job"] == "commits" and first["secret_made"] and not first["values_read"]
    again = ("init", data, *FLAGS, "--json")
    before = Path("dpstream.toml").read_text()
    fix = json.loads(refused(*again, code=3))
    assert fix["field"] == "--job" and "--job commits2" in fix["fix"]
    assert json.loads(refused(*again, "--job", "b"))["field"] == "--data-set"
    assert Path("dpstream.toml").read_text() == before
    second = json.loads(call(*again, "--job", "b", "--data-set", "commits").stdout)
    assert second["next"] == "dpstream plan b" and second["account"] is None
    assert second["table"] == "commits" and not second["secret_made"]
    third = json.loads(call(*again, "--job", "c", "--data-set", "others").stdout)
    assert third["secret_made"] and third["account"]["id"] != first["account"]["id"]
    assert third["table"] == "commits2"
    text = Path("dpstream.toml").read_text()
    assert text.startswith(before) and all(call("plan", job).exit_code == 0 for job in "bc")
    assert json.loads(refused(*again, "--job", "d", "--data-set", "commits", "--secret", "x"))[
        "field"] == "--secret"  # fmt: skip


def test_nobody_to_ask(data: Path) -> None:
    message = refused("init", data)
    assert "--unit: is required" in message and "one of: sha, author, path" in message
    assert not Path("dpstream.toml").exists() and not Path("commits.secret").exists()


def test_a_terminal_is_asked_and_machines_are_not(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "on_terminal", lambda: True)
    typed = ["author", "path", "when", "", "2023-01-01", "2024-01-01", "week", "1", "28d"]
    monkeypatch.setattr(click, "prompt", lambda *a, **k: typed.pop(0) or k["default"])
    assert json.loads(refused("init", data, "--json"))["field"] == "--unit" and len(typed) == 9
    outcome = call("init", data)
    assert outcome.exit_code == 0 and "of 7d from 2022-12-26" in outcome.output and typed == []
    assert covered() == "28d" and "epsilon of all windows" in outcome.output


def test_a_pattern_and_a_public_sample(data: Path) -> None:
    given = (*FLAGS[:6], "--epsilon", "1", "--public-sample", "--value", "lines")
    outcome = call("init", "*.parquet", *given)
    assert outcome.exit_code == 0, outcome.output
    assert "only the first was looked at" in outcome.output and "values were read" in outcome.output
    assert (
        'path = "*.parquet"' in Path("dpstream.toml").read_text() and SECRET not in outcome.output
    )
