"""Runs of one data set that protect the same unit, or only seem to; from the command line."""

import json
import re
from pathlib import Path
from unittest import mock

import pytest
from click.testing import CliRunner, Result

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.gaussian import delta_of
from dpstream.accounting.plan.unit import UnitIdentity
from dpstream.pipelines.cli.main import cli
from dpstream.pipelines.jobs.charging import spend_of
from dpstream.pipelines.jobs.committed import unit_of
from dpstream.pipelines.jobs.job import load_job
from dpstream.state import open as stores
from tests import accounts
from tests.audit.replays import text_of

MONTHS = {
    'start = "2024-01-01T00:00:00Z"': 'start = "2024-01-01T00:00:00Z"',
    'end = "2024-01-03T00:00:00Z"': 'end = "2024-03-31T00:00:00Z"',
    'window = "1d"': 'window = "30d"',
    'release_every = "6h"': 'release_every = "15d"',
    "epsilon = 20.0": "epsilon = 1.0",
    "delta = 1e-2": "delta = 1e-7",
    'covers = "lifetime"': 'covers = "30d"',
    "epsilon = 30.0, delta = 0.05": "epsilon = 1.46, delta = 1e-6",
}
ROWS = "user,page,time,arrival\n" + "".join(
    f"{u},p{u % 3},2024-01-{day:02d}T01:00:00Z,2024-01-{day:02d}T02:00:00Z\n"
    for u in range(50)
    for day in (2, 20)
)


def write(folder: Path, name: str, **changes: str) -> Path:
    """A job on one input and one ledger with a store and a sink of its own."""
    text = text_of(name, f"out-{name}")
    for old, new in (MONTHS | changes).items():
        assert old in text, old
        text = text.replace(old, new)
    (folder / "in.csv").write_text(ROWS)
    path = folder / f"{name}.toml"
    accounts.write(path, text)
    return path


def call(*args: object) -> Result:
    try:
        with mock.patch("dpstream.pipelines.cli.main.silence"):
            return CliRunner().invoke(cli, [str(a) for a in args])
    finally:
        stores.close_all()


HALF = {
    'start = "2024-01-01T00:00:00Z"': 'start = "2024-01-16T00:00:00Z"',
    'end = "2024-03-31T00:00:00Z"': 'end = "2024-04-15T00:00:00Z"',
}


def test_half_a_month_apart_is_another_unit(tmp_path: Path) -> None:
    """Two such jobs were composed as sqrt(2) mu, .3348 of the limit (1.46, 1e-6): a unit of the
    one meets two of the other's."""
    assert call("run", "--project", write(tmp_path, "a"), "--quiet").exit_code == 0
    moved = write(tmp_path, "b", **HALF)
    refused = call("run", "--project", moved, "--quiet")
    assert refused.exit_code == 3 and "account.limit: " in refused.stderr
    assert not (tmp_path / "out-b").exists() and not (tmp_path / "b").exists()
    account = json.loads(call("account", "show", "--project", moved, "--json").stdout)
    assert account["charges"] == 1 and all("limit" in text for text in account["warnings"])
    # The same periods, whole ones later, are the same unit.
    later = write(tmp_path, "c", **{
        'start = "2024-01-01T00:00:00Z"': 'start = "2023-12-02T00:00:00Z"',
    })  # fmt: skip
    assert call("run", "--project", later, "--quiet").exit_code == 0
    text = call("account", "show", "--project", later).stdout
    assert "Unit        user (int), per 30 days of time, counted from " in text
    assert "different units" not in text and "counted" not in text.replace("counted from", "")


def test_without_the_phase_the_limit_would_be_exceeded(tmp_path: Path) -> None:
    """What the identity is for: with the old one the same second job is charged."""
    old = UnitIdentity("user", "int")
    with mock.patch("dpstream.pipelines.jobs.charging.unit_of", return_value=old):
        for path in (write(tmp_path, "a"), write(tmp_path, "b", **HALF)):
            assert call("run", "--project", path, "--quiet").exit_code == 0


def test_a_larger_limit_adds_up_what_the_units_have_in_common(tmp_path: Path) -> None:
    wide = {"epsilon = 30.0, delta = 0.05": "epsilon = 9.0, delta = 1e-5"}
    lifetime = {'covers = "lifetime"': 'covers = "lifetime"'}
    first = write(tmp_path, "a", **wide)
    second = write(tmp_path, "b", **HALF, **wide)
    wide_job = write(tmp_path, "w", **wide, **lifetime)
    for path in (first, second, wide_job):
        assert call("run", "--project", path, "--quiet").exit_code == 0
    account = json.loads(call("account", "show", "--project", second, "--json").stdout)
    assert account["common_unit"] == "user (int), all records"
    charged = [entry for entry in account["entries"] if entry["event"] == "charge"]
    assert [e["counted_as"] for e in charged] == [3, 3, 1]
    mu = sum(e["mu"] ** 2 * e["counted_as"] for e in charged) ** 0.5
    thresholds = sum(e["threshold_delta"] * e["counted_as"] for e in charged)
    spent = account["spent"]["epsilon"]
    assert delta_of(spent, mu) + thresholds <= 1e-5 < delta_of(spent * 0.999, mu) + thresholds
    text = call("account", "show", "--project", second).stdout
    assert len(re.findall(r", counted 3 times: user \(int\), per 30 days of time", text)) == 2
    assert re.search("^Warning +the runs protect different units", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({'time_column = "time"': 'time_column = "arrival"'}, "by the event time of its period"),
        ({'name = "user", type = "int"': 'name = "user"'}, "than the account"),
        ({'name = "user", type = "int"': 'name = "person", type = "int"'}, "than the account"),
    ],
)
def test_other_units_are_refused_before_there_is_a_store(
    tmp_path: Path, change: dict[str, str], words: str
) -> None:
    assert call("run", "--project", write(tmp_path, "a"), "--quiet").exit_code == 0
    refused = call("run", "--project", write(tmp_path, "b", **change), "--quiet")
    assert refused.exit_code == 3 and f"another privacy unit {words}" in refused.stderr
    assert not (tmp_path / "b").exists()


def test_a_data_set_names_the_unit(tmp_path: Path) -> None:
    """One person under the same ids in columns of two names."""
    name = {'name = "user"': 'name = "person"'}
    wide = {"epsilon = 30.0, delta = 0.05": "epsilon = 2.0, delta = 1e-6"}
    first = write(tmp_path, "a", **name, **wide)
    second = write(
        tmp_path, "b", **name, **wide, **{'unit_column = "user"': 'unit_column = "customer"'}
    )
    assert call("run", "--project", first, "--quiet").exit_code == 0
    (tmp_path / "in.csv").write_text(ROWS.replace("user", "customer", 1))
    assert call("run", "--project", second, "--quiet").exit_code == 0
    assert (
        "Unit        person (int), per 30 days"
        in call("account", "show", "--project", second).stdout
    )
    empty = write(tmp_path, "c", **{'name = "user"': 'name = ""'})
    assert "unit.name" in call("plan", "--project", empty).stderr


def test_what_a_run_spends(tmp_path: Path) -> None:
    """The parts of its guarantee, thresholds of all C pairs included; units that can add up."""
    job = load_job(write(tmp_path, "a"))
    budget = allocate(job.plan)
    spend = spend_of(job, budget, "ab" * 16, 2)
    assert job.plan.privacy.contributions == 9 and budget.b > 0
    assert spend.threshold_delta == 9 * budget.b
    assert delta_of(spend.epsilon, budget.mu) + spend.threshold_delta == pytest.approx(spend.delta)
    assert (spend.mu, spend.name, spend.kind) == (budget.mu, "ab" * 16 + "/2", "stream")
    assert (spend.periods, spend.together) == (3, 1)
    assert UnitIdentity.read(spend.identity).period == 30 * 86_400_000_000
    assert unit_of(job).text == spend.identity
