"""Beginning a run: what is refused leaves nothing behind; state is for the owner only."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from dpstream.accounting.errors import PolicyError, UsageError, required
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.jobs.secret import new_secret
from dpstream.pipelines.runners.table import make_runner
from dpstream.pipelines.stream.begin import begin
from dpstream.state import open as stores
from dpstream.state.sqlite.database import sqlite3
from tests import accounts

Make = Callable[..., Job]
ROWS = "user,key,time,value\n"


@pytest.fixture
def job(make_job: Make, tmp_path: Path) -> Job:
    made = make_job()
    names = ",".join(made.columns)
    (tmp_path / "in" / "a.csv").write_text(names + "\n" + ",".join(["1"] * len(made.columns)))
    return made


def store(job: Job) -> Path:
    return required(job.state.path, "the job has a store")


def with_limit(job: Job, tmp_path: Path, epsilon: float) -> Job:
    limit, unit = (epsilon, job.plan.privacy.delta), job.plan.unit
    ledger = accounts.create(tmp_path / "ledger.db", "d", limit, unit.column, unit.type)
    key = tmp_path / "noise.secret"
    if not key.exists():
        new_secret(key)
    privacy = msgspec.structs.replace(
        job.privacy, secret=SecretSource(f"file:{key}"), insecure_test_run_id=None
    )
    return msgspec.structs.replace(job, ledger=ledger, privacy=privacy)


def test_private_files_beside_releases_are_refused(job: Job, tmp_path: Path) -> None:
    sink = msgspec.structs.replace(job.sink, path=str(tmp_path))
    with pytest.raises(PolicyError, match="folder of the releases"):
        begin(msgspec.structs.replace(job, sink=sink))


def test_another_programs_database_is_refused(job: Job) -> None:
    with sqlite3.connect(store(job)) as db:
        db.execute("CREATE TABLE accounts (x)")
    with pytest.raises(PolicyError, match="another program"):
        begin(job)
    with sqlite3.connect(store(job)) as db:
        assert db.execute("SELECT name FROM sqlite_master").fetchall() == [("accounts",)]


def test_a_store_that_was_deleted_is_a_new_run(job: Job, tmp_path: Path) -> None:
    first, _ = begin(job)
    first.open()
    for file in store(job).parent.glob(store(job).name + "*"):
        file.unlink()
    with pytest.raises(PolicyError, match="lost, moved or belongs elsewhere"):
        begin(job)
    (Path(job.sink.path) / "run.json").unlink()
    job = msgspec.structs.replace(
        job, privacy=msgspec.structs.replace(job.privacy, insecure_test_run_id=None)
    )
    second, resumed = begin(job)
    assert not resumed and second.run_id != first.run_id
    assert second.open().identity.run_id == second.run_id
    stores.close_all()


def test_a_refused_charge_leaves_no_store(job: Job, tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="this would spend"):
        begin(with_limit(job, tmp_path, job.plan.privacy.epsilon / 2))
    assert not store(job).exists()
    run, resumed = begin(with_limit(job, tmp_path, job.plan.privacy.epsilon))
    assert not resumed and stat.S_IMODE(os.stat(store(job)).st_mode) == 0o600
    run.open().close()
    stores.close_all()


def test_flags_that_hand_out_records_are_refused() -> None:
    for flags in (
        ["--experiments=enable_data_sampling"],
        ["--direct_num_workers=2"],
        ["--direct_running_mode=multi_processing"],
        ["--direct_running_mode=multi_threading"],
        ["--enable_hot_key_logging"],
        ["--nonsense=3"],
        ["--jsno"],
    ):
        with pytest.raises(UsageError):
            make_runner("DirectRunner", flags)
    with pytest.raises(UsageError, match="one of"):
        make_runner("SparkRunner", [])
