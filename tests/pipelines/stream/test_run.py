"""Beginning a run: what is refused leaves nothing behind; state is for the owner only.

A new run on a changed job: charged once, and nothing of the old run is lost or written over.
"""

import json
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from dpstream.accounting.errors import PolicyError, required
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.jobs.secret import new_secret
from dpstream.pipelines.runners.table import make_runner
from dpstream.pipelines.stream.begin import begin
from dpstream.pipelines.stream.run import run_job, set_aside
from dpstream.state import open as stores
from dpstream.state.ledger.history import History
from dpstream.state.sqlite.database import sqlite3
from dpstream.state.sqlite.file import connect
from tests import accounts
from tests.golden.refusals import Refused
from tests.pipelines.cli.called import call
from tests.pipelines.jobs.test_charging import job as limited_job
from tests.pipelines.jobs.test_charging import ran


def released(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_changed_number_is_one_command(tmp_path: Path) -> None:
    first = ran(limited_job(tmp_path, 60.0))
    old = released(tmp_path / "releases")
    (tmp_path / "dead_letter" / "daily").mkdir(parents=True, exist_ok=True)
    changed = limited_job(tmp_path, 60.0, contributions=5)
    done = call("run", "--project", changed.path, "--fresh", "--quiet", "--json")
    stores.close_all()
    assert done.exit_code == 0, done.output
    run_id = json.loads(done.stdout)["run_id"]
    assert run_id != first
    old_folder = tmp_path / f"releases-{first[:12]}"
    assert released(old_folder) == old and released(tmp_path / "releases").keys() == old.keys()
    assert str(old_folder) in done.stderr
    dead_letters = tmp_path / "dead_letter" / f"daily-{first[:12]}"
    assert dead_letters.is_dir() and str(dead_letters) in done.stderr
    assert [charge.run_id for charge in accounts.charges(tmp_path / "ledger.db")] == [first, run_id]
    # Without --fresh it goes on, at no charge; with it again it is a third run.
    assert ran(changed) == run_id
    assert call("run", "--project", changed.path, "--fresh", "--quiet").exit_code == 0
    assert len(accounts.charges(tmp_path / "ledger.db")) == 3


def test_a_run_warns_of_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What Beam logs of a pipeline stands in a notebook between the user's own lines."""
    caplog.set_level(logging.WARNING)  # a command of this process may have turned all off
    ran(limited_job(tmp_path, 60.0))
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_the_old_run_goes_on_where_it_is(tmp_path: Path) -> None:
    before = limited_job(tmp_path, 60.0)
    first, old = ran(before), released(tmp_path / "releases")
    run_job(before, fresh=True)
    stores.close_all()
    text = before.path.read_text().replace('path = "releases"', f'path = "releases-{first[:12]}"')
    old_file = tmp_path / "old.toml"
    old_file.write_text(text + f'store = "daily.store-{first[:12]}.db"\n')
    done = call("run", "--project", old_file, "--quiet", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["run_id"] == first
    assert released(tmp_path / f"releases-{first[:12]}") == old
    assert len(accounts.charges(tmp_path / "ledger.db")) == 2


def test_refused_before_anything_moves(tmp_path: Path, refused: Refused) -> None:
    ran(limited_job(tmp_path, 60.0))
    before = sorted(tmp_path.rglob("*"))
    refused(lambda: set_aside(limited_job(tmp_path, 6.0)))
    one = limited_job(tmp_path, 60.0)

    def refuse(_: History) -> None:
        raise PolicyError("--optimise", "another charge came between", "ask again")

    refused(set_aside, one, refuse)
    (tmp_path / "visits.parquet").rename(tmp_path / "gone")
    refused(set_aside, one)
    (tmp_path / "gone").rename(tmp_path / "visits.parquet")
    db = connect(tmp_path / "daily.store.db")
    db.execute("BEGIN IMMEDIATE")
    refused(set_aside, one)
    db.close()
    assert sorted(tmp_path.rglob("*")) == before


def test_after_half_of_the_moves_the_same_command_goes_on(tmp_path: Path, refused: Refused) -> None:
    one = limited_job(tmp_path, 60.0)
    ran(one)
    (tmp_path / "daily.store.db").unlink()  # or moved, and then the process was killed
    refused(ran, one)
    moved = set_aside(one)
    assert "store" not in moved and moved["releases"] == tmp_path / "releases-before"
    ran(one)
    assert "store" in set_aside(one)
    assert set_aside(one) == {}


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
    secret = SecretSource(f"file:{key}")
    return msgspec.structs.replace(job, ledger=ledger, secret=secret, test_run_id=None)


def test_private_files_beside_releases_are_refused(
    job: Job, tmp_path: Path, refused: Refused
) -> None:
    sink = msgspec.structs.replace(job.sink, path=str(tmp_path))
    refused(lambda: begin(msgspec.structs.replace(job, sink=sink)))


def test_another_programs_database_is_refused(job: Job, refused: Refused) -> None:
    with sqlite3.connect(store(job)) as db:
        db.execute("CREATE TABLE accounts (x)")
    refused(begin, job)
    with sqlite3.connect(store(job)) as db:
        assert db.execute("SELECT name FROM sqlite_master").fetchall() == [("accounts",)]


def test_a_store_that_was_deleted_is_a_new_run(job: Job, tmp_path: Path, refused: Refused) -> None:
    first, _ = begin(job)
    first.open()
    for file in store(job).parent.glob(store(job).name + "*"):
        file.unlink()
    refused(begin, job)
    (Path(job.sink.path) / "run.json").unlink()
    second, resumed = begin(msgspec.structs.replace(job, test_run_id=None))
    assert not resumed and second.run_id != first.run_id
    assert second.open().identity.run_id == second.run_id
    stores.close_all()


def test_a_refused_charge_leaves_no_store(job: Job, tmp_path: Path, refused: Refused) -> None:
    refused(lambda: begin(with_limit(job, tmp_path, job.plan.privacy.epsilon / 2)))
    assert not store(job).exists()
    run, resumed = begin(with_limit(job, tmp_path, job.plan.privacy.epsilon))
    assert not resumed and stat.S_IMODE(os.stat(store(job)).st_mode) == 0o600
    run.open().close()
    stores.close_all()


def test_flags_that_hand_out_records_are_refused(refused: Refused) -> None:
    for flags in (
        ["--experiments=enable_data_sampling"],
        ["--direct_num_workers=2"],
        ["--direct_running_mode=multi_processing"],
        ["--direct_running_mode=multi_threading"],
        ["--enable_hot_key_logging"],
        ["--nonsense=3"],
        ["--jsno"],
    ):
        refused(make_runner, "DirectRunner", flags)
    refused(make_runner, "SparkRunner", [])
