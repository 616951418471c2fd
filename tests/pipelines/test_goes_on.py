"""A run goes on with the numbers that were committed when it began, whatever a later program would
come to, or refuse."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from dpstream.accounting import shares
from dpstream.accounting.budget import allocate
from dpstream.accounting.errors import UsageError
from dpstream.accounting.plan.rules import FIRST_RULES
from dpstream.dp_transforms import run as runs
from dpstream.pipelines.begin import begin
from dpstream.pipelines.jobs import charging
from dpstream.pipelines.jobs.charging import spend_of
from dpstream.pipelines.jobs.job import load_job
from dpstream.pipelines.operate.state_view import store_run
from dpstream.state import open as stores
from tests import accounts
from tests.pipelines.test_units import call, write

#: Windows of 30 days that each meet 30 periods, with selected keys.
DAYS = {
    "epsilon = 20.0": 'period = "1d"\nepsilon = 1.0',
    'trigger_every = "6h"': 'trigger_every = "1d"',
}


@contextmanager
def older_program() -> Iterator[None]:
    """Runs begin as they did before numbers were committed."""
    old = partial(allocate, rules=FIRST_RULES)
    with (
        mock.patch.object(runs, "calibrate", lambda plan: ""),
        mock.patch.object(charging, "allocate", old),
    ):
        yield
    stores.close_all()


def test_a_run_from_before_goes_on_though_the_plan_is_refused_today(tmp_path: Path) -> None:
    job = write(tmp_path, "a", **DAYS)
    new = call("run", write(tmp_path, "b", **DAYS), "--quiet")
    assert new.exit_code == 3 and "privacy.period: one window can meet 30 periods" in new.stderr
    assert not (tmp_path / "b").exists()
    with older_program():
        begun, _ = begin(load_job(job))
    resumed = call("run", job, "--quiet")
    assert resumed.exit_code == 0, resumed.stderr
    assert f"Run {begun.run_id} (resumed)" in resumed.stdout
    assert "one person can publish a key that nobody else has" in resumed.stderr
    assert len(accounts.charges(tmp_path / "ledger.db")) == 1


def test_a_run_from_before_is_charged_for_one_period_only(tmp_path: Path) -> None:
    days, months = write(tmp_path, "a", **DAYS), write(tmp_path, "b")
    with older_program():
        begin(load_job(days))
    (charge,) = accounts.charges(tmp_path / "ledger.db")
    assert charge.alone and charge.periods == 90
    refused = call("run", months, "--quiet")
    assert refused.exit_code == 3 and "begun by an older program" in refused.stderr
    # The run itself goes on, and its ledger can be looked at.
    assert call("run", days, "--quiet").exit_code == 0
    assert "per 1 day" in call("account", "show", days).stdout
    # Today's thresholds allow for several periods.
    shared = {
        **DAYS,
        "epsilon = 20.0": 'period = "1d"\nperiods_share_windows = true\nepsilon = 1.0',
    }
    job = load_job(write(tmp_path, "c", **shared))
    assert not spend_of(job, allocate(job.plan), "ab" * 16).alone


def test_the_numbers_of_a_run_are_computed_once(tmp_path: Path) -> None:
    job = write(tmp_path, "a")
    refusal = UsageError("later", "a later program refuses this plan", "none")
    with mock.patch.object(runs, "calibrate", side_effect=refusal) as calibrate:
        with pytest.raises(UsageError, match="a later program"):
            begin(load_job(job))
        # What is refused leaves nothing behind.
        assert calibrate.call_count == 1 and not (tmp_path / "a").exists()
    begun = begin(load_job(job))[0].open().identity
    stores.close_all()
    with mock.patch.object(runs, "calibrate", side_effect=refusal) as calibrate:
        found, resumed = begin(load_job(job))
        assert resumed and found.open().identity == begun and begun.calibration
        assert calibrate.call_count == 0
    stores.close_all()


def shown(command: str, job: Path, *more: str) -> dict[str, Any]:
    result = call(command, job, "--json", *more)
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_figures_are_those_that_were_committed(tmp_path: Path) -> None:
    """A later program's defaults are neither planned with nor reported."""
    out = f"--out={tmp_path / 'page.html'}"
    job = write(tmp_path, "a", **{"contributions = 9": 'contributions = 9\nweights = "auto"'})
    new = shown("plan", job)
    assert new["run_id"] is None and "Figures " not in call("plan", job).stdout
    run_id = json.loads(call("run", job, "--json").stdout)["run_id"]
    with mock.patch.object(shares, "knee", lambda costs: 0.5):
        late = allocate(load_job(job).plan)
        planned, page = shown("plan", job), shown("report", job, out)["plan"]
        other = shown("plan", write(tmp_path, "b"))
        text = call("plan", job).stdout
    assert late.selection is not None and late.selection.share == 0.5
    # What would be better is said of a new run; the answers are of this one.
    changed = {"run_id": run_id, "alternatives": planned["alternatives"]}
    assert planned["acceptance"]["run_id"] == run_id and planned["acceptance"]["charged"] is None
    assert planned == new | changed | {of: planned[of] for of in ("outlook", "acceptance")}
    for answer in ("appears", "exact", "shares"):
        assert planned["outlook"][answer] == new["outlook"][answer]
        assert other["outlook"][answer] != new["outlook"][answer]
    assert page == {name: new[name] for name in page}
    assert other["split"]["shares_of_mu_squared"]["selection"] == 0.5
    assert f"Figures     of run {run_id}, committed when it began" in text
    # Releases without their store, and another plan's store.
    (tmp_path / "a" / "s.db").rename(tmp_path / "s.db")
    with mock.patch.object(shares, "knee", lambda costs: 0.5):
        moved = shown("report", job, out)["plan"]["split"]["shares_of_mu_squared"]
    assert moved["selection"] == 0.5
    (tmp_path / "s.db").rename(tmp_path / "a" / "s.db")
    another = call("plan", write(tmp_path, "a", **{"epsilon = 20.0": "epsilon = 2.0"}), "--json")
    assert another.exit_code == 3 and json.loads(another.stdout)["run_id"] is None


def test_a_run_from_before_is_shown_by_the_rules_of_its_time(tmp_path: Path) -> None:
    job, out = write(tmp_path, "a", **DAYS), f"--out={tmp_path / 'page.html'}"
    assert "can meet 30 periods" in call("plan", job).stderr
    with older_program():
        begun, _ = begin(load_job(job))
        plan = begun.plan
    assert store_run(load_job(job)).plan == plan and plan.rules == FIRST_RULES
    assert call("run", job, "--quiet").exit_code == 0
    old = allocate(plan, FIRST_RULES)
    for figures in (shown("plan", job), shown("report", job, out)["plan"]):
        assert figures["split"]["mu"] == old.mu and figures["plan_hash"] == plan.hash
        assert "one person can publish a key" in figures["warnings"][0]
    assert "one person can publish a key" in call("plan", job).stdout
