"""Runs of one data set that protect the same unit, or only seem to; from the command line."""

import json
import re
import shlex
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from click.testing import CliRunner, Result

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.gaussian import delta_of
from dpstream.accounting.plan.unit import UnitIdentity, identity_of
from dpstream.pipelines.cli.main import cli
from dpstream.pipelines.jobs.charging import spend_of
from dpstream.pipelines.jobs.committed import unit_of
from dpstream.pipelines.jobs.job import load_job
from dpstream.state import open as stores
from dpstream.state.ledger.events import Created
from dpstream.state.ledger.open import read_ledger
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
    "epsilon = 40.0, delta = 0.05": "epsilon = 1.46, delta = 1e-6",
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
#: The account's limit per month: what the first job would make by `dpstream init`.
MONTHLY = {
    "epsilon = 1.46, delta = 1e-6 }": 'epsilon = 1.46, delta = 1e-6 }, covers = "30d", '
    'time = "time", start = "2024-01-01T00:00:00Z"',
}


def account_view(path: Path) -> dict[str, Any]:
    account: dict[str, Any] = json.loads(
        call("account", "show", "--project", path, "--json").stdout
    )
    return account


def test_half_a_month_apart_is_another_unit(tmp_path: Path) -> None:
    """A month of the account meets two months of such a job, each in part."""
    assert call("run", "--project", write(tmp_path, "a", **MONTHLY), "--quiet").exit_code == 0
    moved = write(tmp_path, "b", **MONTHLY, **HALF)
    planned = call("plan", "--project", moved, "--json")
    refused = call("run", "--project", moved, "--quiet")
    assert planned.exit_code == refused.exit_code == 3 and "budget.covers: " in refused.stderr
    assert not (tmp_path / "out-b").exists() and not (tmp_path / "b").exists()
    # The fix is typed: an account whose unit has the job's months.
    fix = json.loads(planned.stdout)["acceptance"]["refusal"]["fix"]
    typed = re.search(r"`dpstream (account create [^`]*)`", fix)
    assert typed is not None
    words = shlex.split(typed[1].replace("E --delta D", "4 --delta 1e-6"))
    words[2] = str(tmp_path / "months.db")
    assert call(*words).exit_code == 0
    made = read_ledger(tmp_path / "months.db")[0].event
    assert isinstance(made, Created) and made.unit == identity_of(load_job(moved).plan, "user")


def test_months_that_follow_cost_nothing_more_per_month(tmp_path: Path) -> None:
    """Next quarter's job beside the finished one of this quarter, in one account."""
    first = write(tmp_path, "a", **MONTHLY)
    assert call("run", "--project", first, "--quiet").exit_code == 0
    later = write(tmp_path, "c", **MONTHLY, **{
        'start = "2024-01-01T00:00:00Z"': 'start = "2024-03-31T00:00:00Z"',
        'end = "2024-03-31T00:00:00Z"': 'end = "2024-06-29T00:00:00Z"',
    })  # fmt: skip
    text = call("plan", "--project", later).stdout
    assert "1 charge in other periods used 0%" in " ".join(text.split())
    account = json.loads(call("plan", "--project", later, "--json").stdout)["acceptance"]["account"]
    assert account["used"] == 0 < account["with_this"] < 1 and account["charges"] == 1
    before = account_view(first)
    assert call("run", "--project", later, "--quiet").exit_code == 0
    after = account_view(later)
    assert after["charges"] == 2 and after["used"] == pytest.approx(before["used"])
    # A person of both is told: six months instead of three, for charges fixed beforehand.
    assert after["person"][0] > before["person"][0] > before["spent"]["epsilon"]
    assert after["person"] == pytest.approx(account["person"])
    assert "per unit and 30 days" in call("account", "show", "--project", later).stdout
    # One that meets the first quarter pays there.
    again = write(tmp_path, "d", **MONTHLY)
    account = json.loads(call("plan", "--project", again, "--json").stdout)["acceptance"]["account"]
    assert account["used"] == pytest.approx(before["used"])


def test_a_job_of_a_persons_whole_time_is_said_to_count_twice(tmp_path: Path) -> None:
    """Plan, refusal and account, of an account per month."""
    lifetime = {'covers = "30d" }': 'covers = "lifetime" }'}
    job = write(tmp_path, "a", **MONTHLY, **lifetime)
    refused = call("run", "--project", job, "--quiet")
    assert refused.exit_code == 3 and "counts 2 times" in refused.stderr
    assert "counts 2 times" in call("account", "show", "--project", job).stdout
    accounts.set_limit(tmp_path / "book" / "ledger.db", (9.0, 1e-5))
    assert "which counts 2 times" in " ".join(call("plan", "--project", job).stdout.split())


def test_a_persons_limit_adds_up_all_periods(tmp_path: Path) -> None:
    wide = {"epsilon = 1.46, delta = 1e-6": "epsilon = 9.0, delta = 1e-5"}
    first, second = write(tmp_path, "a", **wide), write(tmp_path, "b", **HALF, **wide)
    for path in (first, second):
        assert call("run", "--project", path, "--quiet").exit_code == 0
    account = account_view(second)
    assert account["unit"]["text"] == "user (int), all records" and account["person"] is None
    charged = [entry for entry in account["entries"] if entry["event"] == "charge"]
    assert [e["counted_as"] for e in charged] == [3, 3]
    mu = sum(e["mu"] ** 2 * e["counted_as"] for e in charged) ** 0.5
    thresholds = sum(e["threshold_delta"] * e["counted_as"] for e in charged)
    spent = account["spent"]["epsilon"]
    assert delta_of(spent, mu) + thresholds <= 1e-5 < delta_of(spent * 0.999, mu) + thresholds
    text = call("account", "show", "--project", second).stdout
    assert len(re.findall(r", counted 3 times: user \(int\), per 30 days of time", text)) == 2


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({'time_column = "time"': 'time_column = "arrival"'}, "budget.covers"),
        ({'name = "user", type = "int"': 'name = "user"'}, "unit.name"),
        ({'name = "user", type = "int"': 'name = "person", type = "int"'}, "unit.name"),
    ],
)
def test_other_units_are_refused_before_there_is_a_store(
    tmp_path: Path, change: dict[str, str], field: str
) -> None:
    assert call("run", "--project", write(tmp_path, "a", **MONTHLY), "--quiet").exit_code == 0
    refused = call("run", "--project", write(tmp_path, "b", **MONTHLY, **change), "--quiet")
    assert refused.exit_code == 3 and f"{field}: " in refused.stderr
    assert not (tmp_path / "b").exists()


def test_a_data_set_names_the_unit(tmp_path: Path) -> None:
    """One person under the same ids in columns of two names."""
    name = {'name = "user"': 'name = "person"'}
    wide = {"epsilon = 1.46, delta = 1e-6": "epsilon = 4.0, delta = 1e-5"}
    first = write(tmp_path, "a", **name, **wide)
    second = write(
        tmp_path, "b", **name, **wide, **{'unit_column = "user"': 'unit_column = "customer"'}
    )
    assert call("run", "--project", first, "--quiet").exit_code == 0
    (tmp_path / "in.csv").write_text(ROWS.replace("user", "customer", 1))
    assert call("run", "--project", second, "--quiet").exit_code == 0
    assert account_view(second)["unit"]["name"] == "person" and account_view(second)["charges"] == 2
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
    assert spend.span == (job.plan.timeline.start, job.plan.timeline.end)
    assert UnitIdentity.read(spend.identity).period == 30 * 86_400_000_000
    assert unit_of(job).text == spend.identity
