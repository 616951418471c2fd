"""``dpstream init``: a job that plans as it stands, a key, and the next command; no value said."""

import json
import shlex
import tomllib
from pathlib import Path

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
    value = ("--value", "lines", "--clamp", "-5", "100", "--key", "sha")
    outcome = call("init", data, *FLAGS, *value)
    assert outcome.exit_code == 0 and SECRET not in outcome.output
    following = shlex.split(outcome.output.splitlines()[-1].removeprefix("Next"))
    assert following == ["dpstream", "plan", "job.toml"]
    planned = call(*following[1:], "--json")
    assert planned.exit_code == 0, planned.output
    assert Path("noise.key").stat().st_mode & 0o777 == 0o600
    text = Path("job.toml").read_text()
    assert SECRET not in text and "clamp = [-5, 100]" in text


def period() -> object:
    return tomllib.loads(Path("job.toml").read_text())["privacy"].get("period")


def test_what_the_budget_covers(data: Path) -> None:
    """Nobody chose: each window, which is told; or as the flag says."""
    days = (*FLAGS, "--window", "day", "--json", "--replace")
    chosen = json.loads(call("init", data, *days).stdout)
    assert (chosen["covers"], period()) == ("1d", "1d") and "--covers" in chosen["notes"][0]
    assert len(chosen["choices"]) == 5  # a head, a window, four, everything, what is assumed
    for covers, length in (("window", "1d"), ("lifetime", None), ("28d", "28d")):
        done = json.loads(call("init", data, *days, "--covers", covers).stdout)
        assert (done["covers"], period()) == (length or "lifetime", length)
        assert call("plan", "job.toml").exit_code == 0
    assert "--covers" in refused("init", data, *days, "--covers", "36h")
    one = json.loads(
        call("init", data, *FLAGS, "--window", "100000d", "--replace", "--json").stdout
    )
    assert (one["covers"], one["choices"], period()) == ("lifetime", [], None)


def test_for_machines_and_twice(data: Path) -> None:
    first = json.loads(call("init", data, *FLAGS, "--json").stdout)
    assert first["job"] == "job.toml" and first["noise_key_made"] and not first["values_read"]
    again = ("init", data, *FLAGS)
    before = Path("job.toml").read_bytes()
    fix = json.loads(refused(*again, "--json", code=3))
    assert fix["field"] == "--out" and "--out job2.toml" in fix["fix"]
    assert Path("job.toml").read_bytes() == before
    second = json.loads(call(*again, "--json", "--out", "job2.toml", "--new-account").stdout)
    assert second["next"] == "dpstream plan job2.toml" and not second["noise_key_made"]
    assert call(*again, "--replace").exit_code == 0


def test_nobody_to_ask(data: Path) -> None:
    message = refused("init", data)
    assert "--unit: is required" in message and "one of: sha, author, path" in message
    assert not Path("job.toml").exists() and not Path("noise.key").exists()


def test_a_terminal_is_asked_and_machines_are_not(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "on_terminal", lambda: True)
    typed = ["author", "path", "when", "", "2023-01-01", "2024-01-01", "week", "1", "28d"]
    monkeypatch.setattr(parts.click, "prompt", lambda *a, **k: typed.pop(0) or k["default"])
    assert json.loads(refused("init", data, "--json"))["field"] == "--unit" and len(typed) == 9
    outcome = call("init", data)
    assert outcome.exit_code == 0 and "of 7d from 2022-12-26" in outcome.output and typed == []
    assert period() == "28d" and "epsilon of all windows" in outcome.output


def test_a_pattern_and_a_public_sample(data: Path) -> None:
    given = (*FLAGS[:6], "--epsilon", "1", "--public-sample", "--value", "lines")
    outcome = call("init", "*.parquet", *given)
    assert outcome.exit_code == 0, outcome.output
    assert "only the first was looked at" in outcome.output and "values were read" in outcome.output
    assert 'path = "*.parquet"' in Path("job.toml").read_text() and SECRET not in outcome.output
