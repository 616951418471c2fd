"""Beginning a run: what is refused leaves nothing behind; state is for the owner only."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from accounting.errors import PolicyError, UsageError
from pipelines.job import Job
from pipelines.job_tables import LedgerConfig, Limit
from pipelines.runners import make_runner
from pipelines.stream import begin, run_job
from state import open as stores

Make = Callable[..., Job]
ROWS = "user,key,time,value\n"


@pytest.fixture
def job(make_job: Make, tmp_path: Path) -> Job:
    made = make_job()
    names = ",".join(made.columns)
    (tmp_path / "in" / "a.csv").write_text(names + "\n" + ",".join(["1"] * len(made.columns)))
    return made


def with_limit(job: Job, tmp_path: Path, epsilon: float) -> Job:
    limit = Limit(epsilon=epsilon, delta=job.plan.privacy.delta)
    ledger = LedgerConfig(path=str(tmp_path / "ledger.db"), data_set="d", limit=limit)
    return msgspec.structs.replace(job, ledger=ledger)


def test_a_refused_charge_leaves_no_store(job: Job, tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="spend more"):
        begin(with_limit(job, tmp_path, job.plan.privacy.epsilon / 2))
    assert not job.state.path.exists()
    run, resumed = begin(with_limit(job, tmp_path, job.plan.privacy.epsilon))
    assert not resumed and stat.S_IMODE(os.stat(job.state.path).st_mode) == 0o600
    run.open().close()
    stores.close_all()


def test_a_file_that_changes_during_the_run_is_noticed(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipelines import stream

    real = stream.stamps
    seen: list[object] = []

    def stamps(checked: Job) -> object:
        found = real(checked)
        if seen:
            found = [(name, size + 1, when) for name, size, when in found]
        seen.append(found)
        return found

    monkeypatch.setattr(stream, "stamps", stamps)
    with pytest.raises(PolicyError, match="changed while it was read"):
        run_job(job)


def test_flags_that_hand_out_records_are_refused() -> None:
    for flags in (
        ["--experiments=enable_data_sampling"],
        ["--direct_num_workers=2"],
        ["--enable_hot_key_logging"],
    ):
        with pytest.raises(UsageError):
            make_runner("DirectRunner", flags)
    with pytest.raises(UsageError, match="one of"):
        make_runner("SparkRunner", [])
