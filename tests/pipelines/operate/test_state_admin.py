"""``dpstream state``: init, info, releases, expire, backup, restore, reshard, as a person does."""

import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest
from click.testing import CliRunner, Result

from dpstream.accounting.errors import required
from dpstream.pipelines.cli.main import cli
from dpstream.pipelines.jobs.job import load_job
from dpstream.pipelines.operate.due import due_at
from dpstream.pipelines.report.report import build
from dpstream.pipelines.report.view import render
from dpstream.pipelines.stream.run import run_job
from dpstream.state import open as stores
from dpstream.state.arrow import from_bytes, to_bytes
from dpstream.state.sqlite.database import sqlite3
from dpstream.state.sqlite.file import connect, snapshot_row, step_blobs
from dpstream.state.sqlite.store import SqliteStore
from tests import accounts
from tests.fixed_runs import fix_run_id
from tests.pipelines.cli.called import printed
from tests.projects import typed

PROJECT = """
version = 1
[data_set.d]
unit = { name = "user", type = "int" }
insecure_test_secret = "1111111111111111111111111111111111111111111111111111111111111111"
[table.visits]
path = "in.csv"
unit_column = "user"
time_column = "time"
[job.pages]
table = "visits"
key = ["page"]
aggregate.n = { kind = "count" }
start = "2024-01-01T00:00:00Z"
end = "2024-01-03T00:00:00Z"
window = "1d"
release_every = "6h"
budget = { epsilon = 20.0, delta = 1e-2, covers = "lifetime" }
contributions = 9
store = "state/s.db"
shards = 3
sink = { kind = "parquet", path = "out" }
"""


def with_account(limit: tuple[float, float], path: str = "ledger.db", text: str = PROJECT) -> str:
    """The project file with an account of its data set."""
    given = f"limit = {{ epsilon = {limit[0]!r}, delta = {limit[1]!r} }}"
    unit = 'unit = { name = "user", type = "int" }\n'
    return text.replace(unit, f'{unit}account = {{ path = "{path}", {given} }}\n')


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """A finished run of two windows of four triggers."""
    rows = ["user,page,time"]
    for user in range(60):
        for hour in (1, 7, 20, 30, 40):
            day, clock = divmod(hour, 24)
            rows.append(f"{user},p{user % 3},2024-01-0{1 + day}T{clock:02d}:00:00Z")
    (tmp_path / "in.csv").write_text("\n".join(rows) + "\n")
    path = tmp_path / "dpstream.toml"
    path.write_text(PROJECT)
    run_job(load_job(path))
    return path


def call(*args: object) -> Result:
    return CliRunner().invoke(cli, ["state", *typed(*args)])


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.glob("*/*.parquet")}


def test_exported_releases_are_the_sinks_bytes(finished: Path, tmp_path: Path) -> None:
    assert len(files(tmp_path / "out")) == 8
    result = call("releases", finished, "--out", tmp_path / "again", "--json")
    assert json.loads(result.stdout)["releases"] == 8
    assert files(tmp_path / "again") == files(tmp_path / "out")
    names = [(tmp_path / folder / "run.json").read_bytes() for folder in ("out", "again")]
    assert names[0] == names[1]
    # A sink that lost files gets them back, and what is there stays.
    lost = tmp_path / "out" / "window-000001"
    shutil.rmtree(lost)
    assert call("releases", finished, "--out", tmp_path / "out").exit_code == 0
    assert files(tmp_path / "again") == files(tmp_path / "out")


def test_only_what_all_shards_have_committed_is_exported(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = SqliteStore.progress

    def behind(store: SqliteStore, first: int = 0) -> list[tuple[int, int, int]]:
        rows = [(w, s, t) for w, s, t in honest(store, first) if (w, s) != (1, 2)]
        return [(w, s, 2 if (w, s) == (0, 1) else t) for w, s, t in rows]

    monkeypatch.setattr(SqliteStore, "progress", behind)
    refused("store", 3, "releases", finished, "--out", tmp_path / "part")  # the sink has more
    shutil.rmtree(tmp_path / "out")
    assert call("releases", finished, "--out", tmp_path / "part").exit_code == 0
    names = sorted(files(tmp_path / "part"))
    assert names == [f"window-000000/trigger-00000{t}.parquet" for t in (1, 2)]


def test_info_is_public_and_complete(finished: Path, tmp_path: Path) -> None:
    info = json.loads(call("info", finished, "--json").stdout)
    plan = load_job(finished).plan
    identity = stores.identity_of(f"sqlite:{tmp_path / 'state' / 's.db'}", plan)
    assert info["run_id"] == f"INSECURE-{identity.run_id}"
    assert info["committed"] == {"0": 4, "1": 4} and info["triggers"] == 4
    assert info["shards"] == 3 and info["plan_hash"] == plan.hash and "operator_only" not in info
    text = call("info", finished).stdout
    assert "2 of 2 are complete" in text and "p0" not in text


def test_views_and_exports_are_refused(finished: Path, tmp_path: Path) -> None:
    def refused(field: str, code: int, *args: object) -> None:
        result = call(*args)
        assert result.exit_code == code and f": {field}: " in result.stderr, result.output
        assert result.stderr.strip().count("\n") == 0

    foreign = tmp_path / "foreign" / "run.json"
    foreign.parent.mkdir()
    mine = (tmp_path / "out" / "run.json").read_bytes()
    foreign.write_bytes(mine.replace(b"INSECURE-", b""))
    refused("sink.path", 3, "releases", finished, "--out", foreign.parent)
    foreign.write_bytes(mine)
    refused("sink.kind", 3, "releases", finished, "--out", foreign.parent, "--kind", "csv")
    assert list(foreign.parent.iterdir()) == [foreign]
    export = ("releases", finished, "--out", tmp_path / "x")
    window = tmp_path / "out" / "window-000000"
    shutil.copy(window / "trigger-000003.parquet", window / "trigger-000001.parquet")
    refused("sink.path", 3, "releases", finished, "--out", tmp_path / "out")
    finished.write_text(PROJECT.replace("11111111", "22222222"))
    refused("secret", 3, *export)
    finished.write_text(PROJECT.replace("epsilon = 20.0", "epsilon = 21.0"))
    refused("store", 3, *export)
    refused("store", 3, "info", finished)
    finished.write_text(PROJECT.replace("s.db", "none.db"))
    refused("store", 2, "info", finished)
    assert not (tmp_path / "x").exists() and not (tmp_path / "state" / "none.db").exists()


DAYS = 4
_DAYS = PROJECT.replace("2024-01-03T", f"2024-01-0{1 + DAYS}T").replace("shards = 3", "shards = 2")
TEXT = with_account((22.0, 0.02), text=_DAYS)
ROOM = with_account((300.0, 0.4), text=_DAYS)


def write_input(folder: Path, more: str = "") -> None:
    rows = ["user,page,time"]
    for user in range(60):
        for hour in (1, 7, 20, 30, 40, 55, 71, 80, 95):
            day, clock = divmod(hour, 24)
            rows.append(f"{user},p{user % 3},2024-01-0{1 + day}T{clock:02d}:00:00Z")
    (folder / "in.csv").write_text("\n".join(rows) + "\n" + more)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job of four windows of four triggers that has not run."""
    write_input(tmp_path)
    path = tmp_path / "dpstream.toml"
    accounts.write(path, TEXT)
    return path


def done(*args: object) -> Any:
    result = call(*args, "--json")
    assert result.exit_code == 0, result.output
    return printed(result.stdout)


def refused(field: str, code: int, *args: object) -> str:
    result = call(*args)
    assert result.exit_code == code, result.output
    assert f": {field}: " in result.stderr and result.stderr.strip().count("\n") == 0
    return result.stderr


def run(job: Path) -> Any:
    return run_job(load_job(job))


class Stopped(Exception):
    """Ends a run in its midst, as a kill would."""


def stop_after(job: Path, commits: int) -> None:
    """Run until some groups of steps were committed."""
    real, left = SqliteStore._write_steps, [commits]

    def write(store: SqliteStore, steps: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Stopped
        real(store, steps)

    from dpstream.accounting.errors import RunError

    small = mock.patch("dpstream.dp_transforms.flow.COMMIT_STEPS", 3)
    with small, mock.patch.object(SqliteStore, "_write_steps", write), pytest.raises(RunError):
        run(job)
    stores.close_all()


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], dict[str, bytes]]:
    """Releases of an undisturbed run with the run id that another job's store has."""

    def make(job: Path) -> dict[str, bytes]:
        folder = tmp_path_factory.mktemp("calm")
        store = f"sqlite:{job.parent / 'state' / 's.db'}"
        run_id = stores.identity_of(store, load_job(job).plan).run_id
        shutil.copy(job.parent / "in.csv", folder)
        (folder / "dpstream.toml").write_text(_DAYS)
        fix_run_id(folder, run_id)
        run(folder / "dpstream.toml")
        stores.close_all()
        return files(folder / "out")

    return make


def test_init_makes_a_run_that_is_charged_when_it_runs(job: Path, tmp_path: Path) -> None:
    made = done("init", job)
    assert made["new"] and not done("init", job)["new"]
    ledger = accounts.opened(tmp_path / "ledger.db", "d")
    assert ledger.entries() == []
    assert run(job).run_id == made["run_id"]
    assert [e.run_id for e in ledger.entries()] == [made["run_id"]]
    ledger.close()


def test_a_run_lets_go_of_settled_records_by_itself(job: Path) -> None:
    run(job)
    info = done("info", job, "--operator")
    positions = [p for p in info["operator_only"]["parts"] if p["name"] == "positions"]
    assert info["settled_cut"] == 4 * DAYS and 0 < positions[0]["bytes"] < 2_000
    assert "operator_only" not in done("info", job)
    outcome = call("info", job, "--operator")
    assert "positions" in outcome.stderr and "positions" not in outcome.stdout
    before = files(job.parent / "out")
    assert run(job).resumed and files(job.parent / "out") == before


def test_releases_go_only_when_the_sink_has_them(job: Path, tmp_path: Path) -> None:
    run(job)
    out, text = tmp_path / "out", "2024-01-03T00:00:00Z"
    expected = files(out)
    lost = out / "window-000001" / "trigger-000003.parquet"
    data = lost.read_bytes()
    lost.unlink()
    error = refused("sink.path", 3, "expire", job, "--releases-before", text)
    assert "window 1, trigger 3" in error
    lost.write_bytes(b"another")
    refused("sink.path", 3, "expire", job, "--releases-before", text)
    assert done("info", job)["dropped"] == 0
    lost.write_bytes(data)
    assert done("expire", job, "--releases-before", text)["windows_dropped"] == 2
    assert done("expire", job, "--releases-before", text)["windows_dropped"] == 0
    assert done("info", job)["dropped"] == 2
    # A run asks for the others only; what was published stays.
    assert run(job).steps == 2 * 2 * 4
    assert files(out) == expected
    assert done("releases", job, "--out", tmp_path / "again")["releases"] == 8
    assert files(tmp_path / "again") == {k: v for k, v in expected.items() if k >= "window-000002"}


def test_releases_of_open_windows_stay(job: Path) -> None:
    stop_after(job, 3)
    assert done("expire", job, "--releases-before", "2030-01-01T00:00:00Z")["windows_dropped"] == 0
    run(job)
    assert len(files(job.parent / "out")) == 4 * DAYS


@pytest.mark.parametrize("commits", [0, 2, 4, 7])
def test_a_lost_store_is_restored_and_changes_nothing(
    job: Path, tmp_path: Path, commits: int, calm: Any
) -> None:
    stop_after(job, commits)
    file = tmp_path / "b" / "monday.backup"
    run_id = done("backup", job, "--out", file)["run_id"]
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
    assert [p.name for p in file.parent.iterdir()] == [file.name]
    run(job)
    stores.close_all()
    before, lost = files(tmp_path / "out"), tmp_path / "state" / "s.db"
    assert before == calm(job)
    # Some of the sink is not there yet, as when the machine went down before it was written.
    late = tmp_path / "out" / "window-000003" / "trigger-000004.parquet"
    late.unlink()
    refused("store", 2, "restore", "pages", job, file)  # a store exists
    lost.unlink()
    # A write-ahead log that is left must not be read into another file.
    lost.with_name("s.db-wal").write_bytes(b"x" * 5000)
    assert done("restore", "pages", job, file) == {"run_id": run_id, "epoch": 0, "kept": None}
    assert done("info", job)["restoring"]
    result = run(job)
    assert result.run_id == run_id and files(tmp_path / "out") == before
    assert not done("info", job)["restoring"]
    ledger = accounts.opened(tmp_path / "ledger.db", "d")
    assert len(ledger.entries()) == 1
    ledger.close()


def test_other_input_is_refused_after_a_restore(job: Path, tmp_path: Path) -> None:
    stop_after(job, 3)
    done("backup", job, "--out", tmp_path / "b")
    write_input(tmp_path, "7,p1,2024-01-02T03:00:00Z\n")
    old = done("restore", "pages", job, tmp_path / "b", "--replace")["kept"]
    assert Path(old).exists()
    from dpstream.accounting.errors import PolicyError

    with pytest.raises(PolicyError) as caught:
        run(job)
    assert caught.value.field == "source"


def forge(path: Path) -> None:
    """Add one to a count of a key in a store."""
    db = sqlite3.connect(path)
    window, shard, *blobs = db.execute("SELECT * FROM snapshots ORDER BY window").fetchone()
    parts = required(step_blobs((window, shard, 0), blobs, "snapshots"), "a snapshot")
    keys, states, pairs = map(bytes, parts)
    batch = from_bytes(states)
    at = batch.schema.names.index("v0")
    more = pa.array([v + 1 for v in batch.column("v0").to_pylist()], pa.int64())
    forged = to_bytes(batch.set_column(at, "v0", more))
    row = snapshot_row(window, shard, 0, (keys, forged, pairs))  # with digests that fit
    where = "WHERE window = ? AND shard = ?"
    db.execute(f"UPDATE snapshots SET states = ? {where}", (row[3], window, shard))
    db.commit()
    db.close()


def test_a_forged_state_stops_at_the_first_difference(job: Path, tmp_path: Path) -> None:
    stop_after(job, 1)
    done("backup", job, "--out", tmp_path / "b")
    run(job)
    stores.close_all()
    late = tmp_path / "out" / "window-000003"
    shutil.rmtree(late)
    before = files(tmp_path / "out")
    done("restore", "pages", job, tmp_path / "b", "--replace")
    forge(tmp_path / "state" / "s.db")
    from dpstream.accounting.errors import PolicyError

    with pytest.raises(PolicyError, match="does not lead to what is published"):
        run(job)
    # Nothing new was published beside the difference, and it is still being restored.
    assert files(tmp_path / "out") == before and not late.exists()
    assert done("info", job)["restoring"]
    done("restore", "pages", job, tmp_path / "b", "--replace")
    run(job)
    assert len(files(tmp_path / "out")) == 4 * DAYS


def test_a_backup_of_another_run_does_not_reach_the_sink(job: Path, tmp_path: Path) -> None:
    """The store of another run id, same plan and input: other noise."""
    run(job)
    stores.close_all()
    before, other = files(tmp_path / "out"), tmp_path / "other"
    other.mkdir()
    shutil.copy(tmp_path / "in.csv", other)
    accounts.write(other / "dpstream.toml", TEXT)
    done("init", other / "dpstream.toml")
    done("backup", other / "dpstream.toml", "--out", other / "b")
    done("restore", "pages", job, other / "b", "--replace")
    raised = TEXT.replace("epsilon = 22.0, delta = 0.02", "epsilon = 300.0, delta = 0.4")
    accounts.write(job, raised)
    from dpstream.accounting.errors import PolicyError

    with pytest.raises(PolicyError, match="another run"):
        run(job)
    assert files(tmp_path / "out") == before


def test_what_cannot_be_replayed_is_abandoned_and_charged(job: Path, tmp_path: Path) -> None:
    done("init", job)
    done("backup", job, "--out", tmp_path / "b")
    run(job)
    stores.close_all()
    # The sink has two days; the rest of the run is lost, and so is the input of these days.
    out = tmp_path / "out"
    for day in (2, 3):
        shutil.rmtree(out / f"window-00000{day}")
    before, now = files(out), "2024-01-03T00:00:00Z"
    rows = (tmp_path / "in.csv").read_text().splitlines()
    input_rows = [r for r in rows if r.startswith("user") or r.rsplit(",", 1)[1] >= now]
    (tmp_path / "in.csv").write_text("\n".join(input_rows) + "\n")
    abandon = ("restore", "pages", job, tmp_path / "b", "--replace", "--abandon")
    refused("now", 2, *abandon)
    # The second spend is beyond the limit: nothing is replaced, nothing charged.
    refused("account.limit", 3, *abandon, "--now", now)
    assert done("info", job)["epoch"] == 0
    accounts.write(job, ROOM)
    restore = done(*abandon, "--now", now)
    assert restore["epoch"] == 1 and restore["charged"] and restore["epochs"] == 2
    assert 20 < restore["epsilon"] < 40
    ledger = accounts.opened(tmp_path / "ledger.db", "d")
    charges = [e.name for e in ledger.entries()]
    assert charges == [restore["run_id"], f"{restore['run_id']}/1"]
    result = run(job)
    stores.close_all()
    assert result.run_id == restore["run_id"] and len(ledger.entries()) == 2
    ledger.close()
    after = files(out)
    assert {k: after[k] for k in before} == before
    new = set(after) - set(before)
    # The instant lies in the third day's first cell: that window is open and given up too.
    assert {Path(n).parent.name for n in new} == {"window-000003"} and len(new) == 4
    page = build(load_job(job))
    assert page.figures["guarantee"]["epsilon"] == pytest.approx(restore["epsilon"], rel=1e-3)
    assert page.abandoned == [2] and "Ended: 3 of 4 days complete." in render(page)
    assert done("info", job)["abandoned"] == 3 and not done("info", job)["restoring"]
    # What was given up is not overdue; what is lost of the windows after it is.
    end = 1_704_412_800_000_000  # 2024-01-05
    state = due_at(load_job(job), end)
    assert not state.overdue and state.abandoned == ("2024-01-03T00:00:00Z",)
    (out / "window-000003").rename(tmp_path / "apart")
    assert {one.window for one in due_at(load_job(job), end).overdue} == {"2024-01-04T00:00:00Z"}
    (tmp_path / "apart").rename(out / "window-000003")
    assert run(job).resumed and files(out) == after


def test_export_after_abandon_keeps_ids(job: Path, tmp_path: Path) -> None:
    run(job)
    stores.close_all()
    before = files(tmp_path / "out")
    done("backup", job, "--out", tmp_path / "b")
    accounts.write(job, ROOM)
    now = "2024-01-03T12:00:00Z"
    done("restore", "pages", job, tmp_path / "b", "--replace", "--abandon", "--now", now)
    # What was released in the first epoch is what it was, also from the restored store.
    done("releases", job, "--out", tmp_path / "again")
    assert files(tmp_path / "again") == before


def test_each_abandoned_restore_is_an_epoch_of_its_own(job: Path, tmp_path: Path) -> None:
    """Units count from the backup on, so the epoch begun from it before is spent as well."""
    done("init", job)
    done("backup", job, "--out", tmp_path / "b")
    accounts.write(job, ROOM)
    run(job)
    stores.close_all()
    ledger, out = accounts.opened(tmp_path / "ledger.db", "d"), tmp_path / "out"
    abandon = ("restore", "pages", job, tmp_path / "b", "--replace", "--abandon", "--now")
    for epoch, day in ((1, 1), (2, 2), (3, 3)):
        for window in range(day, DAYS):
            shutil.rmtree(out / f"window-00000{window}", ignore_errors=True)
        if epoch == 3:  # the ledger knows without the sink
            shutil.rmtree(out)
        now = f"2024-01-0{day}T06:00:00Z"
        restore = done(*abandon, now)
        # Repeated before anything was drawn: no further charge.
        assert done(*abandon, now)["epoch"] == restore["epoch"] == epoch
        assert restore["epochs"] == epoch + 1 == len(ledger.entries())
        run(job)
        stores.close_all()
        assert len(ledger.entries()) == epoch + 1
    ledger.close()


def test_without_a_ledger_the_sink_or_the_store_knows_the_epoch(job: Path, tmp_path: Path) -> None:
    accounts.write(job, _DAYS)
    done("init", job)
    done("backup", job, "--out", tmp_path / "b")
    now = "2024-01-01T06:00:00Z"
    abandon = ("restore", "pages", job, tmp_path / "b", "--abandon", "--now", now)
    assert done(*abandon, "--replace")["epoch"] == 1
    assert done(*abandon, "--replace")["epoch"] == 2
    run(job)
    stores.close_all()
    (tmp_path / "state" / "s.db").unlink()
    assert done(*abandon)["epoch"] == 3


def test_reshard_changes_no_release(job: Path, tmp_path: Path, calm: Any) -> None:
    stop_after(job, 3)
    old_store = done("reshard", job, "--shards", "5")["kept"]
    assert Path(old_store).exists()
    from dpstream.accounting.errors import PolicyError

    with pytest.raises(PolicyError) as other:
        run(job)
    assert other.value.field == "shards" and "shards = 5" in other.value.fix
    accounts.write(job, TEXT.replace("shards = 2", "shards = 5"))
    stop_after(job, 4)
    refused("shards", 2, "reshard", job, "--shards", 5)
    refused("shards", 2, "reshard", job, "--shards", 0)
    done("reshard", job, "--shards", 1)
    accounts.write(job, TEXT.replace("shards = 2", "shards = 1"))
    run(job)
    stores.close_all()
    assert files(tmp_path / "out") == calm(job)
    assert sorted(p.name for p in (tmp_path / "state").glob("s.db*")) == [
        "s.db", "s.db.old", "s.db.old1"
    ]  # fmt: skip


def test_no_store_is_replaced_under_a_run(job: Path, tmp_path: Path) -> None:
    stop_after(job, 3)
    done("backup", job, "--out", tmp_path / "b")
    store = SqliteStore(tmp_path / "state" / "s.db", pa.schema([pa.field("page", pa.string())]), 1)
    with mock.patch("dpstream.state.sqlite.file._PATIENCE", 0.1):
        for args in (
            ("reshard", job, "--shards", 3),
            ("restore", "pages", job, tmp_path / "b", "--replace"),
        ):
            assert "a run has it open" in refused("store", 4, *args)
    assert done("backup", job, "--out", tmp_path / "b2")["run_id"] == store.identity.run_id
    store.close()
    names = {p.name for p in (tmp_path / "state").iterdir()}
    assert names <= {"s.db", "s.db-wal", "s.db-shm", "dpstream-errors.log"}


def test_refusals(job: Path, tmp_path: Path) -> None:
    for command in ("expire", "info"):
        refused("store", 2, command, job)
    refused("store", 2, "reshard", job, "--shards", 3)
    refused("store", 2, "backup", job, "--out", tmp_path / "b")
    done("init", job)
    done("backup", job, "--out", tmp_path / "b")
    refused("backup", 2, "backup", job, "--out", tmp_path / "b")
    refused("backup", 3, "backup", job, "--out", tmp_path / "out" / "b")
    refused("backup", 2, "restore", "pages", job, tmp_path / "none", "--replace")
    refused(
        "now",
        2,
        "restore",
        "pages",
        job,
        tmp_path / "b",
        "--replace",
        "--now",
        "2024-01-01T00:00:00Z",
    )
    data = bytearray((tmp_path / "b").read_bytes())
    (tmp_path / "short").write_bytes(data[: len(data) // 2])
    (tmp_path / "text").write_bytes(b"no backup at all" * 1000)
    data[8192 + 100 :] = bytes(len(data) - 8192 - 100)
    (tmp_path / "holes").write_bytes(data)
    for name in ("short", "text", "holes"):
        refused("backup", 3, "restore", "pages", job, tmp_path / name, "--replace")
    accounts.write(job, TEXT.replace("11111111", "22222222"))
    refused("secret", 3, "restore", "pages", job, tmp_path / "b", "--replace")
    accounts.write(job, TEXT.replace("epsilon = 20.0", "epsilon = 21.0"))
    refused("backup", 3, "restore", "pages", job, tmp_path / "b", "--replace")
    for args in (("expire", job), ("backup", job, "--out", tmp_path / "c"),
                 ("reshard", job, "--shards", 3)):  # fmt: skip
        refused("store", 3, *args)
    assert not (tmp_path / "c").exists()
    assert [p.name for p in (tmp_path / "state").iterdir()] == ["s.db"]


def test_a_damaged_store_is_replaced(job: Path, tmp_path: Path) -> None:
    stop_after(job, 3)
    done("backup", job, "--out", tmp_path / "b")
    (tmp_path / "state" / "s.db").write_bytes(b"gone" * 5000)
    old_store = done("restore", "pages", job, tmp_path / "b", "--replace")["kept"]
    assert Path(old_store).read_bytes() == b"gone" * 5000
    run(job)
    assert len(files(tmp_path / "out")) == 4 * DAYS


def test_help_has_examples() -> None:
    for command in ("init", "info", "releases", "expire", "backup", "restore", "reshard"):
        outcome = call(command, "--help")
        assert outcome.exit_code == 0 and f"dpstream state {command} daily" in outcome.output


def test_a_backup_takes_the_place_of_a_begin_that_was_cut_off(
    job: Path, tmp_path: Path, calm: Any
) -> None:
    """A file with SQLite's header and nothing else is no store that --replace must be given for."""
    stop_after(job, 3)
    backup = done("backup", job, "--out", tmp_path / "b")
    stores.close_all()
    for side in (tmp_path / "state").glob("s.db*"):
        side.unlink()
    connect(tmp_path / "state" / "s.db").close()
    refused("store", 2, "info", job)
    assert done("restore", "pages", job, tmp_path / "b")["run_id"] == backup["run_id"]
    run(job)
    assert files(tmp_path / "out") == calm(job)
