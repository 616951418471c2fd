"""A new run on a changed job: charged once, and nothing of the old run is lost or written over."""

import json
from pathlib import Path

import pytest

from dpstream.accounting.errors import PolicyError, RunError, UsageError
from dpstream.pipelines.stream.fresh import set_aside
from dpstream.pipelines.stream.run import run_job
from dpstream.state import open as stores
from dpstream.state.ledger.history import History
from dpstream.state.sqlite.file import connect
from tests import accounts
from tests.pipelines.cli.called import call
from tests.pipelines.jobs.test_charging import job, ran


def released(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_changed_number_is_one_command(tmp_path: Path) -> None:
    first = ran(job(tmp_path, 60.0))
    old = released(tmp_path / "releases")
    (tmp_path / "dead_letter" / "daily").mkdir(parents=True, exist_ok=True)
    changed = job(tmp_path, 60.0, contributions=5)
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


def test_the_old_run_goes_on_where_it_is(tmp_path: Path) -> None:
    before = job(tmp_path, 60.0)
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


def test_refused_before_anything_moves(tmp_path: Path) -> None:
    ran(job(tmp_path, 60.0))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(PolicyError, match="this would spend"):
        set_aside(job(tmp_path, 6.0))
    one = job(tmp_path, 60.0)

    def refuse(_: History) -> None:
        raise PolicyError("--optimise", "another charge came between", "ask again")

    with pytest.raises(PolicyError, match="between"):
        set_aside(one, refuse)
    (tmp_path / "visits.parquet").rename(tmp_path / "gone")
    with pytest.raises(UsageError):
        set_aside(one)
    (tmp_path / "gone").rename(tmp_path / "visits.parquet")
    db = connect(tmp_path / "daily.store.db")
    db.execute("BEGIN IMMEDIATE")
    with pytest.raises(RunError):
        set_aside(one)
    db.close()
    assert sorted(tmp_path.rglob("*")) == before


def test_after_half_of_the_moves_the_same_command_goes_on(tmp_path: Path) -> None:
    one = job(tmp_path, 60.0)
    ran(one)
    (tmp_path / "daily.store.db").unlink()  # or moved, and then the process was killed
    with pytest.raises(PolicyError, match="store is new"):
        ran(one)
    moved = set_aside(one)
    assert moved.store is None and moved.releases == tmp_path / "releases-before"
    ran(one)
    assert set_aside(one).store is not None
    assert set_aside(one) == (None, None, None)
