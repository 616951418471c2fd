"""The launcher on Dataflow: nothing stays on its disk, and Beam gets what the flow rests on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dpstream.accounting.errors import UsageError
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.launch.stream import check_remote, fetch, main, parser
from dpstream.pipelines.project.job_parts import SinkConfig, SourceConfig
from dpstream.pipelines.project.text import MAX_FILE_BYTES


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
    assert main([f"--project_file={make_job().path}", "--dry_run"]) == UsageError.exit_code
    assert "store" in capsys.readouterr().out
