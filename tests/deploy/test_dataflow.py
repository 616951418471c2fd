"""The flex template: metadata, the launcher's dry run, and a launch that does not wait."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from apache_beam.runners.runner import PipelineResult

from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.launch import launcher
from dpstream.pipelines.launch.launcher import (
    check_remote,
    fetch,
    flags,
    main,
    options_of,
    parser,
)
from dpstream.pipelines.runners.table import RUNNERS, refuse_unknown
from dpstream.pipelines.stream.run import run_job
from dpstream.state import open as stores
from tests import accounts
from tests.audit.leaks import make_job
from tests.golden.refusals import Refused

FLAGS = RUNNERS["DataflowRunner"].flags

FOLDER = Path(__file__).parents[2] / "deploy" / "dataflow"
METADATA: dict[str, Any] = json.loads((FOLDER / "metadata.json").read_text())
IMAGE = "europe-docker.pkg.dev/p/r/dpstream:1"
REMOTE = """
version = 1
[data_set.shop]
unit = { name = "user" }
secret = "gcp:projects/p/secrets/noise/versions/1"
[table.visits]
subscription = "projects/p/subscriptions/s"
unit_column = "user"
time_column = "time"
[job.visits]
table = "visits"
key = ["page"]
aggregate.visits = { kind = "count" }
start = "2026-01-01T00:00:00Z"
window = "1h"
release_every = "1m"
max_skew = "1m"
budget = { epsilon = 2.0, delta = 1e-6, covers = "window" }
contributions = 8
store = "spanner://p/i/d"
shards = 64
sink = { kind = "pubsub", topic = "projects/p/topics/t" }
"""
UNIT = 'unit = { name = "user" }'
LOCAL = 'account = { path = "shop.account.db", limit = { epsilon = 9, delta = 0.1 } }'


def remote(folder: Path, *edits: tuple[str, str]) -> Job:
    """A job that lies nowhere on this machine, after some edits."""
    text = REMOTE
    for old, new in edits:
        assert old in text
        text = text.replace(old, new, 1)
    path = folder / "dpstream.toml"
    accounts.write(path, text)
    return load_job(path)


def test_metadata_is_exactly_once_and_streaming() -> None:
    assert METADATA["streaming"] is True
    assert METADATA["supportsExactlyOnce"] is True and METADATA["supportsAtLeastOnce"] is False
    fields = {"name", "description", "streaming", "supportsExactlyOnce", "supportsAtLeastOnce",
             "parameters"}  # fmt: skip
    assert set(METADATA) == fields


def test_every_parameter_is_the_launchers_or_beams() -> None:
    own = {action.dest for action in parser()._actions} - {"help"}
    names = [parameter["name"] for parameter in METADATA["parameters"]]
    assert own <= set(names) and len(set(names)) == len(names)
    refuse_unknown([f"--{name}=x" for name in names if name not in own], FLAGS)
    fields = {"name", "label", "helpText", "paramType", "regexes", "isOptional"}
    for parameter in METADATA["parameters"]:
        assert set(parameter) <= fields and {"name", "label", "helpText"} <= set(parameter)
        assert parameter["paramType"] in ("TEXT", "GCS_READ_FILE", "GCS_WRITE_FOLDER", "BOOLEAN")
    for action in parser()._actions:
        if action.dest in names:
            [parameter] = [p for p in METADATA["parameters"] if p["name"] == action.dest]
            assert parameter["isOptional"] is not action.required


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("project_file", ["gs://b/a/dpstream.toml"], ["/a/dpstream.toml", "gs://b/visits.json"]),
        ("kind", ["job", "batch"], ["census", "sql", ""]),
        ("name", ["daily"], ["a b", ""]),
        ("out_folder", ["gs://b/out"], ["out"]),
        ("sdk_container_image", [IMAGE, IMAGE + "@sha256:" + "0" * 64], ["dp stream", ""]),
    ],
)
def test_patterns_of_parameters(name: str, good: list[str], bad: list[str]) -> None:
    [parameter] = [p for p in METADATA["parameters"] if p["name"] == name]
    [pattern] = parameter["regexes"]
    assert all(re.fullmatch(pattern, text) for text in good)
    assert not any(re.fullmatch(pattern, text) for text in bad)


def test_flags_for_dataflow() -> None:
    given = ["--project=p", "--region=europe-west4", "--temp_location=gs://b/t",
             f"--sdk_container_image={IMAGE}"]  # fmt: skip
    all_flags = flags(given, streaming=True)
    options = options_of(all_flags)
    assert options["runner"] == "DataflowRunner" and options["streaming"] is True
    assert options["sdk_location"] == "container"
    assert options.get("enable_streaming_engine", True) is True
    assert options["sdk_container_image"] == IMAGE and options["project"] == "p"
    assert flags(all_flags, streaming=True) == all_flags, "nothing is given twice"
    assert "--sdk_location=container" not in flags(given[:3], streaming=True)
    refuse_unknown([flag for flag in all_flags if not flag.startswith("--runner")], FLAGS)


@pytest.mark.parametrize(
    "flag",
    [
        "--dataflow_service_options=streaming_mode_at_least_once",
        "--experiments=streaming_mode_at_least_once",
        "--runner=DirectRunner",
    ],
)
def test_flags_that_are_refused(tmp_path: Path, flag: str, refused: Refused) -> None:
    refused(flags, [flag], streaming=True)


@pytest.mark.parametrize(
    "edit",
    [
        ('store = "spanner://p/i/d"', 'store = "s.db"'),
        ("gcp:projects/p/secrets/noise/versions/1", "file:noise.secret"),
        ("gcp:projects/p/secrets/noise/versions/1", "env:KEY"),
        ('subscription = "projects/p/subscriptions/s"',
          'folder = "in"\nformat = "parquet"'),
        (UNIT, f"{UNIT}\n{LOCAL}"),
    ],
    ids=["sqlite", "secret file", "environment", "local folder", "account"],
)  # fmt: skip
def test_what_the_launchers_disk_would_lose(
    tmp_path: Path, edit: tuple[str, str], refused: Refused
) -> None:
    check_remote(remote(tmp_path))
    refused(lambda: check_remote(remote(tmp_path, edit)))


def test_an_account_that_outlives_the_launcher(tmp_path: Path) -> None:
    account = 'account = { path = "spanner://p/i/ledger", id = "0acc0acc0acc0acc" }'
    job = remote(tmp_path, (UNIT, f"{UNIT}\n{account}"))
    check_remote(job)
    assert job.ledger is not None and job.ledger.path == "spanner://p/i/ledger"


def test_local_releases_are_refused(tmp_path: Path, refused: Refused) -> None:
    files = (
        'kind = "pubsub", topic = "projects/p/topics/t"',
        'kind = "parquet", path = "releases"',
    )
    refused(lambda: check_remote(remote(tmp_path, files)))


@pytest.mark.parametrize("named", ["refused", "/mnt/refused"])
def test_a_folder_for_dead_letters_is_refused(tmp_path: Path, named: str, refused: Refused) -> None:
    """It would be on each worker's disk; who names none is told that they are not kept."""
    shards = "shards = 64"
    job = remote(tmp_path, (shards, f'{shards}\ndead_letter = "{named}"'))
    refused(check_remote, job)
    check_remote(remote(tmp_path, (shards, f'{shards}\ndead_letter = "dead_letter/visits"')))


def test_the_dry_run_prints_options_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    remote(tmp_path)
    monkeypatch.setattr(launcher, "run_job", mock.Mock(side_effect=AssertionError))
    args = [f"--project_file={tmp_path / 'dpstream.toml'}", "--dry_run=true", "--project=p"]
    assert main(args) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["store"] == "spanner://p/i/d" and report["shards"] == 64
    assert report["options"]["streaming"] is True and report["options"]["project"] == "p"
    assert main([args[0], "--dry_run", "--runner=DirectRunner"]) == 2
    assert "--runner" in capsys.readouterr().out


def test_the_launchers_module_is_that_program(tmp_path: Path) -> None:
    namespace = runpy.run_path(str(FOLDER / "launcher.py"), run_name="imported")
    assert namespace["main"] is main
    completed = subprocess.run(
        [sys.executable, str(FOLDER / "launcher.py"), f"--project_file={tmp_path / 'none.toml'}"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (
        completed.returncode == 2
        and "--project_file" in completed.stdout
        and "Traceback" not in completed.stderr
    )


def test_a_launch_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole job on an engine that runs at once: begun, handed over, and nobody waits."""
    job = make_job(tmp_path / "job")
    waited = mock.Mock(side_effect=AssertionError)
    monkeypatch.setattr(PipelineResult, "wait_until_finish", waited)
    monkeypatch.setattr("dpstream.pipelines.stream.run.wait_or_stop", waited)
    result = run_job(job, "DirectRunner", detach=True)
    assert result.run_id and not waited.called
    assert (tmp_path / "job" / "releases" / "run.json").exists()
    stores.close_all()
    monkeypatch.undo()
    assert run_job(job, "DirectRunner", detach=True).run_id == result.run_id


def test_a_project_file_from_any_file_system(tmp_path: Path, refused: Refused) -> None:
    """With the query of the job that is launched, which lies beside it."""
    local = tmp_path / "local"
    local.mkdir()
    text = REMOTE.replace("shards = 64", 'query = "live.sql"')
    (tmp_path / "a.toml").write_text(text)
    (tmp_path / "live.sql").write_text("SELECT page FROM visits")
    assert fetch(str(tmp_path / "a.toml"), local).read_text() == text
    assert (local / "live.sql").read_text() == "SELECT page FROM visits"
    (tmp_path / "b.toml").write_text("#" * (2 << 20))
    for name in ("b.toml", "none.toml"):
        error = refused(fetch, str(tmp_path / name), local)
        assert error.field == "--project_file" and str(tmp_path) not in str(error)
