"""The same job on Spanner by its project file alone: same files, same commands."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import pytest
from click.testing import CliRunner

from dpstream.pipelines.cli.main import cli
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.stream import run as stream
from dpstream.pipelines.stream.begin import begin
from dpstream.state import open as stores
from dpstream.state.spanner import client as spanner_client
from dpstream.state.spanner.client import connect
from dpstream.state.spanner.schema import create_tables, note_name, read_metadata, swap_metadata
from tests import accounts, emulator
from tests.emulator import CANARY, refusing
from tests.faults.processes import files
from tests.fixed_runs import fix_run_id
from tests.pipelines.operate.test_state_admin import PROJECT, with_account
from tests.projects import typed


@pytest.fixture(scope="module", autouse=True)
def running() -> Iterator[None]:
    with emulator.running():
        yield


@pytest.fixture
def url() -> Iterator[str]:
    made = emulator.fresh_url()
    yield made
    stores.close_all()
    connect(made).drop()


def write_job(folder: Path, store: str) -> Path:
    folder.mkdir()
    rows = ["user,page,time"]
    for user in range(60):
        for hour in (1, 7, 20, 30, 40):
            day, clock = divmod(hour, 24)
            rows.append(f"{user},p{user % 3},2024-01-0{1 + day}T{clock:02d}:00:00Z")
    (folder / "in.csv").write_text("\n".join(rows) + "\n")
    text = PROJECT.replace("state/s.db", store)
    accounts.write(folder / "dpstream.toml", text)
    fix_run_id(folder)
    return folder / "dpstream.toml"


def call(*args: str | Path, code: int = 0) -> dict[str, object]:
    result = CliRunner().invoke(cli, [*typed(*args), "--json"])
    assert result.exit_code == code, result.output
    text = result.stdout if code == 0 else result.stderr
    return json.loads(text.strip().splitlines()[-1])  # type: ignore[no-any-return]


def test_a_job_runs_on_spanner_by_its_url(tmp_path: Path, url: str) -> None:
    here = write_job(tmp_path / "sqlite", "sqlite:s.db")
    there = write_job(tmp_path / "spanner", url)
    call("run", here)
    create_tables(connect(url))
    assert call("run", there)["resumed"] is False
    expected = files(tmp_path / "sqlite" / "out")
    assert len(expected) >= 8 and files(tmp_path / "spanner" / "out") == expected
    assert call("run", there)["resumed"] is True
    info = call("state", "info", there)
    assert info["committed"] == {"0": 4, "1": 4}
    call("state", "releases", there, "--out", tmp_path / "again")
    again = files(tmp_path / "again")
    assert {name: expected[name] for name in again} == again and len(again) >= 8


def test_a_charged_job_on_spanner(tmp_path: Path, url: str) -> None:
    """Token and ledger's end live in the database: charged once, an older one is refused.

    The limit has no room for a second charge.
    """
    there = write_job(tmp_path / "job", url)
    accounts.write(there, with_account((20.0, 0.01), "book/ledger.db", there.read_text()))
    create_tables(connect(url))
    for resumed in (False, True):
        assert call("run", there)["resumed"] is resumed
        assert call("account", "show", there)["charges"] == 1
    plan = call("plan", there)
    assert plan["acceptance"]["charged"] is None and plan["run_id"]  # type: ignore[index]
    text = there.read_text()
    there.write_text(re.sub("contributions = [0-9]+", "contributions = 8", text))
    changed = call("run", there, code=3)
    assert changed["field"] == "store" and "--fresh" not in str(changed["fix"])
    assert f".store={url}-2 " in str(changed["fix"])
    there.write_text(text)
    name = note_name(0, "token")
    token = swap_metadata(connect(url), name, read_metadata(connect(url), name), "0" * 32)
    assert token and "older or forked" in str(call("run", there, code=3)["rule"])


def test_a_database_without_tables_is_refused(tmp_path: Path, url: str) -> None:
    there = write_job(tmp_path / "job", url)
    error = call("run", there, code=2)
    assert error["field"] == "store" and "dpstream state init" in str(error["fix"])
    assert not (tmp_path / "job" / "out").exists()
    create_tables(connect(url))


LIMIT = (20.0, 1e-2)


def test_a_database_that_refuses_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No charge, no folder of releases; and the error shows nothing of the database's text."""
    there = write_job(tmp_path / "job", "spanner://p/i/d")
    accounts.write(there, with_account(LIMIT, text=there.read_text()))
    for code, words in (
        (grpc.StatusCode.PERMISSION_DENIED, "may not use"),
        (grpc.StatusCode.UNAUTHENTICATED, "credentials"),
        (grpc.StatusCode.NOT_FOUND, "no such"),
    ):
        with refusing(code, monkeypatch):
            error = call("run", there, code=2)
        spanner_client._connect.cache_clear()
        assert words in str(error["rule"]) and CANARY not in json.dumps(error)
        assert not (tmp_path / "job" / "out").exists()
        ledger = accounts.opened(tmp_path / "job" / "ledger.db", "d")
        assert ledger.entries() == []
        ledger.close()


@pytest.mark.parametrize("store", ["spanner:", "spanner://p/i", "spanner://P/i/d", "spanner:p/i/d"])
def test_urls_that_name_no_database(tmp_path: Path, store: str) -> None:
    error = call("plan", write_job(tmp_path / "job", store), code=2)
    assert error["field"] == "job.pages.store" and "P/i/d" not in json.dumps(error)


def test_the_plan_says_how_many_shards_avoid_parts(tmp_path: Path) -> None:
    there = write_job(tmp_path / "job", "spanner://p/i/d")
    state = call("plan", there, "--changed-keys", "1000000")["state"]
    assert isinstance(state, dict)
    assert state["keys_of_a_commit"] == (80_000 - 20 - 6 * 4) // 6
    need = state["shards_needed"]
    # Shares of a keyed hash: the fullest of the shards still fits, and no fewer shards would do.
    assert 1_000_000 / need < state["keys_of_a_commit"] <= 1_000_000 / (0.9 * need)
    plan_text = CliRunner().invoke(cli, typed("plan", there, "--changed-keys", "1000000")).stdout
    assert f"set shards = {need}" in plan_text
    assert "state" not in call("plan", write_job(tmp_path / "file", "sqlite:s.db"))


def test_the_life_of_a_store_by_commands(tmp_path: Path, url: str) -> None:
    """init, run, backup, reshard, restore and expire: nothing that was published changes."""
    job = write_job(tmp_path / "job", url)
    assert call("state", "init", job)["new"] is True
    assert call("state", "init", job)["new"] is False
    assert call("run", job)["resumed"] is True
    out = tmp_path / "job" / "out"
    expected = files(out)
    call("state", "backup", job, "--out", tmp_path / "b")
    assert call("state", "reshard", job, "--shards", "5")["kept"] is None
    accounts.write(job, job.read_text().replace("shards = 3", "shards = 5"))
    assert call("run", job)["resumed"] is True and files(out) == expected
    assert call("state", "restore", "pages", job, tmp_path / "b", code=2)["field"] == "store"
    call("state", "restore", "pages", job, tmp_path / "b", "--replace")
    accounts.write(job, job.read_text().replace("shards = 5", "shards = 3"))
    assert call("run", job)["resumed"] is True and files(out) == expected
    call("state", "expire", job, "--releases-before", "2024-01-02T00:00:00Z")
    assert call("run", job)["resumed"] is True and files(out) == expected
    sizes = call("state", "info", job, "--operator")
    assert sizes["committed"] == {"0": 4, "1": 4}
    (out / "run.json").unlink()
    for file in files(out):
        (out / file).unlink()
    assert "releases" in str(call("state", "releases", job, "--out", tmp_path / "again"))


def test_a_run_that_was_not_stopped_publishes_on(tmp_path: Path, url: str) -> None:
    """Shards change under it; the next run catches up with what it has published."""
    path = write_job(tmp_path / "job", url)
    text = with_account(LIMIT, text=path.read_text())
    accounts.write(path, text)
    call("state", "init", path)
    shards = load_job(path).state.shards

    def resharded(job: Job, *given: Any, **more: Any) -> object:
        begun = begin(job, *given, **more)
        subprocess.run(
            [sys.executable, "-m", "dpstream", "state", "reshard", "--project", str(path),
             "--shards", "5"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            check=True, capture_output=True, timeout=120,
        )  # fmt: skip
        return begun

    with mock.patch.object(stream, "begin", resharded):
        stream.run_job(load_job(path))
    stores.close_all()
    published = files(tmp_path / "job" / "out")
    accounts.write(path, text.replace(f"shards = {shards}", "shards = 5"))
    for _ in range(2):
        assert call("run", path)["resumed"] is True
    assert files(tmp_path / "job" / "out") == published
    assert call("state", "info", path)["restoring"] is False
