"""``dpstream state``: what a store holds, and its releases once more."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dpstream.pipelines.cli.main import cli
from dpstream.pipelines.jobs.job import load_job
from dpstream.pipelines.stream.run import run_job
from dpstream.state import open as stores
from dpstream.state.sqlite.store import SqliteStore
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
def job(tmp_path: Path) -> Path:
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
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*.parquet")}


def test_exported_releases_are_the_sinks_bytes(job: Path, tmp_path: Path) -> None:
    assert len(files(tmp_path / "out")) == 8
    result = call("releases", job, "--out", tmp_path / "again", "--json")
    assert json.loads(result.stdout)["releases"] == 8
    assert files(tmp_path / "again") == files(tmp_path / "out")
    names = [(tmp_path / folder / "run.json").read_bytes() for folder in ("out", "again")]
    assert names[0] == names[1]
    # A sink that lost files gets them back, and what is there stays.
    lost = tmp_path / "out" / "window-000001"
    shutil.rmtree(lost)
    assert call("releases", job, "--out", tmp_path / "out").exit_code == 0
    assert files(tmp_path / "again") == files(tmp_path / "out")


def test_only_what_all_shards_have_committed_is_exported(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = SqliteStore.progress

    def behind(store: SqliteStore, first: int = 0) -> list[tuple[int, int, int]]:
        rows = [(w, s, t) for w, s, t in honest(store, first) if (w, s) != (1, 2)]
        return [(w, s, 2 if (w, s) == (0, 1) else t) for w, s, t in rows]

    monkeypatch.setattr(SqliteStore, "progress", behind)
    assert call("releases", job, "--out", tmp_path / "part").exit_code == 0
    names = sorted(files(tmp_path / "part"))
    assert names == [f"window-000000/trigger-00000{t}.parquet" for t in (1, 2)]


def test_info_is_public_and_complete(job: Path, tmp_path: Path) -> None:
    info = json.loads(call("info", job, "--json").stdout)
    plan = load_job(job).plan
    identity = stores.identity_of(f"sqlite:{tmp_path / 'state' / 's.db'}", plan)
    assert info["run_id"] == f"INSECURE-{identity.run_id}"
    assert info["committed"] == {"0": 4, "1": 4} and info["triggers"] == 4
    assert info["shards"] == 3 and info["plan_hash"] == plan.hash and "operator_only" not in info
    text = call("info", job).stdout
    assert "2 of 2 are complete" in text and "p0" not in text


def test_refusals(job: Path, tmp_path: Path) -> None:
    def refused(field: str, code: int, *args: object) -> None:
        result = call(*args)
        assert result.exit_code == code and f": {field}: " in result.stderr, result.output
        assert result.stderr.strip().count("\n") == 0

    foreign = tmp_path / "foreign" / "run.json"
    foreign.parent.mkdir()
    mine = (tmp_path / "out" / "run.json").read_bytes()
    foreign.write_bytes(mine.replace(b"INSECURE-", b""))
    refused("sink.path", 3, "releases", job, "--out", foreign.parent)
    foreign.write_bytes(mine)
    refused("sink.kind", 3, "releases", job, "--out", foreign.parent, "--kind", "csv")
    assert list(foreign.parent.iterdir()) == [foreign]
    export = ("releases", job, "--out", tmp_path / "x")
    window = tmp_path / "out" / "window-000000"
    shutil.copy(window / "trigger-000003.parquet", window / "trigger-000001.parquet")
    refused("sink.path", 3, "releases", job, "--out", tmp_path / "out")
    job.write_text(PROJECT.replace("11111111", "22222222"))
    refused("secret", 3, *export)
    job.write_text(PROJECT.replace("epsilon = 20.0", "epsilon = 21.0"))
    refused("store", 3, *export)
    refused("store", 3, "info", job)
    job.write_text(PROJECT.replace("s.db", "none.db"))
    refused("store", 2, "info", job)
    assert not (tmp_path / "x").exists() and not (tmp_path / "state" / "none.db").exists()
