"""The template's launcher: one file, a kind and a name, and what each kind needs beside them.

Nothing of a job stays on its disk.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dpstream.accounting.errors import UsageError
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.launch.launcher import check_remote, fetch, main, parser
from dpstream.pipelines.project.job_parts import SinkConfig, SourceConfig
from dpstream.pipelines.project.text import MAX_FILE_BYTES
from tests.pipelines.launch import test_batch, test_census
from tests.pipelines.launch.building import CLOUD

CENSUS = ["--kind=census", "--name=persons", "--out_folder=gs://b/out"]
BATCH = ["--kind=batch", "--out_folder=gs://b/out", "--ticket=gs://b/tickets/one.json"]


def test_a_project_file_is_fetched_or_refused(make_job: Callable[..., Job], tmp_path: Path) -> None:
    project, local = make_job().path, tmp_path / "local"
    local.mkdir()
    assert fetch(str(project), local).read_bytes() == project.read_bytes()
    (tmp_path / "big").write_bytes(b" " * (MAX_FILE_BYTES + 1))
    for name in ("big", "none"):
        with pytest.raises(UsageError) as error:
            fetch(str(tmp_path / name), tmp_path)
        assert error.value.field == "--project_file" and str(tmp_path) not in str(error.value)


def test_exit_codes_and_dry_runs(
    make_job: Callable[..., Job], capsys: pytest.CaptureFixture[str]
) -> None:
    assert parser().parse_args(["--project_file=x", "--dry_run"]).dry_run == "true"
    assert parser().parse_args(["--project_file=x"]).dry_run == "false"
    with pytest.raises(SystemExit):
        parser().parse_args([])
    assert main([f"--project_file={make_job().path}", "--dry_run"]) == UsageError.exit_code
    assert "store" in capsys.readouterr().out


def dry_run(
    folder: Path, text: str, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> tuple[int, str]:
    (folder / "dpstream.toml").write_text(text)
    code = main([f"--project_file={folder / 'dpstream.toml'}", *flags, *CLOUD, "--dry_run"])
    return code, capsys.readouterr().out


def test_census_tables_of_a_section(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = dry_run(tmp_path, test_census.PROJECT, CENSUS, capsys)
    report = json.loads(printed)
    assert code == 0 and report["program"] == "p" and report["out_folder"] == "gs://b/out"
    assert report["options"]["runner"] == "DataflowRunner" and "streaming" not in report["options"]


def test_a_batch_of_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = dry_run(tmp_path, test_batch.PROJECT, BATCH, capsys)
    report = json.loads(printed)
    assert code == 0 and report["ticket"] == "gs://b/tickets/one.json"
    assert report["table"] == "gs://b/rides.table" and "streaming" not in report["options"]


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (CENSUS[:2], "--out_folder"), (BATCH[:2], "--ticket"), (CENSUS + BATCH[2:], "--ticket"),
        (["--out_folder=gs://b/out"], "--out_folder"), ([*CENSUS, "--streaming"], "--streaming"),
    ],
)  # fmt: skip
def test_each_kind_has_its_parameters(
    flags: list[str], field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, printed = dry_run(tmp_path, test_census.PROJECT, flags, capsys)
    assert code == 2 and field in printed


@pytest.fixture
def remote(make_job: Callable[..., Job]) -> Job:
    job, replace = make_job(), msgspec.structs.replace
    return replace(
        job,
        source=SourceConfig("pubsub", subscription="projects/p/subscriptions/s"),
        privacy=replace(job.privacy, secret=SecretSource("gcp:projects/p/secrets/s/versions/1")),
        state=replace(job.state, store="spanner://p/i/d"),
        sink=SinkConfig(
            "pubsub",
            topic="projects/p/topics/t",
            dead_letter=str(job.path.parent / "dead_letter" / job.name),
        ),
    )


def test_a_job_with_nothing_on_the_launcher(remote: Job) -> None:
    check_remote(remote)


@pytest.mark.parametrize(
    ("table", "change", "field"),
    [
        ("state", {"store": "sqlite:/x.db"}, "store"),
        ("privacy", {"secret": SecretSource("env:K")}, "secret"),
        ("source", {"kind": "csv"}, "table.path"),
        ("source", {"kind": "folder", "path": "/in"}, "table.path"),
        ("sink", {"kind": "csv"}, "sink.path"),
        ("sink", {"dead_letter": "/dead"}, "dead_letter"),
    ],
)
def test_what_lies_on_its_disk(table: str, change: dict[str, Any], field: str, remote: Job) -> None:
    changed = msgspec.structs.replace(getattr(remote, table), **change)
    with pytest.raises(UsageError) as error:
        check_remote(msgspec.structs.replace(remote, **{table: changed}))
    assert error.value.field == field
