"""``dpstream plan``: its answers, changes that work as they are written."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomlkit

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.tuning.reference import reference_figures
from dpstream.pipelines.jobs.job import Job, load_job
from tests.pipelines.cli.called import call, examples_of, refused


def test_examples() -> None:
    assert len(examples_of("plan")) == 5


def test_a_plan_reads_no_data(make_job: Callable[..., Job]) -> None:
    job = make_job()  # its folder of files is empty
    report = json.loads(call("plan", "--project", job.path, "--json").output)
    assert report["plan_hash"] == job.plan.hash and report["run_id"] is None


def test_answers_first_and_tables_with_details(make_job: Callable[..., Job]) -> None:
    path = make_job().path
    short, details = (
        call("plan", "--project", path).output,
        call("plan", "--project", path, "--details").output,
    )
    assert details.startswith(short.rstrip("\n")) and len(short.splitlines()) < 35
    for table in ("Stream            share of mu^2", "Trigger   sd", "Neighbours  ", "Assumed  "):
        assert table in details and table not in short
    for rendered in (short, details):
        assert sum(line.startswith("*") for line in rendered.splitlines()) == 1
        assert "refused" not in rendered
    of_some = call("plan", "--project", path, "--units", "2000", "--keys", "30").output
    assert "of 2,000 units that is" in of_some and "of 30 keys about" in of_some


def test_json_is_complete(make_job: Callable[..., Job]) -> None:
    report = json.loads(
        call("plan", "--project", make_job().path, "--json", "--units", "2000").output
    )
    assert {"guarantee", "streams", "tau", "periods", "outlook"} <= set(report)
    assert report["outlook"]["appears"]["units"] == 2000
    assert report["outlook"]["appears"]["expected_keys"] > 0


@pytest.mark.parametrize("option", ["--units", "--records", "--keys", "--changed-keys"])
def test_the_largest_assumed_number(make_job: Callable[..., Job], option: str) -> None:
    """No array of so many keys is made, and no figure is beyond floats."""
    path = make_job().path
    given = ["--units", "10", "--records", "10", option, str(10**15), "--json"]
    assert not {"NaN", "Infinity"} & set(
        re.findall("[A-Za-z]+", call("plan", "--project", path, *given).output)
    )
    assert refused("plan", "--project", path, option, str(10**15 + 1))


def changed(path: Path, settings: dict[str, Any], to: Path) -> Job:
    """The project file with these settings, as somebody would write them who reads the plan."""
    document: Any = tomlkit.parse(path.read_text())
    for field, value in settings.items():
        table, (*parents, name) = document["job"]["daily"], field.split(".")
        for parent in parents:
            table = table.setdefault(parent, tomlkit.table())
        if value is None:
            table.pop(name, None)
        else:
            table[name] = value
    to.write_text(tomlkit.dumps(document))
    return load_job(to)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"contributions": 12},
        {"contributions": 12, "mechanism.weights": {"offset": 2, "power": 0.4}},
        {"contributions": 12, "per_key_bound": 1, "mechanism.combine": True},
    ],
    ids=str,
)
def test_what_helps_most_does_what_is_said(
    make_job: Callable[..., Job], tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Written into the project file, nothing else touched."""
    job = changed(make_job().path, settings, tmp_path / "own.toml")
    own = reference_figures(job.plan, allocate(job.plan))
    best = json.loads(call("plan", "--project", job.path, "--json").output)["outlook"]["helps_most"]
    if best is None:
        return
    other = changed(job.path, best["settings"], tmp_path / "other.toml").plan
    figures = reference_figures(other, allocate(other))
    assert figures.noise_against(own) == pytest.approx(best["noise"])
    assert figures.keys_against(own) == pytest.approx(best["keys"])
