"""A run goes on with the numbers that were committed when it began, whatever a later program would
come to, or refuse."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from accounting.budget import allocate
from accounting.errors import UsageError
from accounting.shares import FIRST_RULES
from dp_transforms import run as runs
from pipelines import begin as beginning
from pipelines.begin import begin, spend_of
from pipelines.jobs.job import load_job
from state import open as stores
from state.ledger import read_ledger
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
        mock.patch.object(beginning, "allocate", old),
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
    assert len(read_ledger(tmp_path / "ledger.db")) == 1


def test_a_run_from_before_is_charged_for_one_period_only(tmp_path: Path) -> None:
    days, months = write(tmp_path, "a", **DAYS), write(tmp_path, "b")
    with older_program():
        begin(load_job(days))
    (entry,) = read_ledger(tmp_path / "ledger.db")
    assert entry.charge.alone and entry.charge.periods == 90
    refused = call("run", months, "--quiet")
    assert refused.exit_code == 3 and "begun by an older program" in refused.stderr
    # The run itself goes on, and its ledger can be looked at.
    assert call("run", days, "--quiet").exit_code == 0
    assert "per 1 day" in call("ledger", "show", days).stdout
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
