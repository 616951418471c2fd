"""The same recorded stream, the same job: the same bytes on every runner, and from version to
version.  ``REWRITE=1`` writes the digests anew (of the bounded run); numbers are recorded where
there are none."""

import json
import os
from pathlib import Path
from unittest import mock

import pytest

from dpstream.accounting.calibration import calibrate
from dpstream.dp_transforms import run
from dpstream.pipelines.stream import run_job
from tests.runners.engines import need_flink
from tests.runners.golden import (
    DIGESTS,
    JOBS,
    NUMBERS,
    digest,
    golden_job,
    published,
    recorded_in,
    recorded_numbers,
    write_stream,
)
from tests.runners.prism import binary


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    write_stream(folder)
    return folder


def check(name: str, recorded: Path, folder: Path, runner: str, flags: list[str]) -> None:
    job, numbers = golden_job(name, recorded, folder), recorded_in(NUMBERS)
    if os.environ.get("REWRITE") and name not in numbers:
        NUMBERS.write_text(json.dumps({**numbers, name: calibrate(job.plan)}, indent=2) + "\n")
    with recorded_numbers(name):
        result = run_job(job, runner, flags)
    files = published(job)
    line = job.plan.timeline
    assert len(files) == 1 + line.windows * line.triggers and not result.stopped
    digests = recorded_in(DIGESTS)
    if os.environ.get("REWRITE") and runner == "DirectRunner":
        DIGESTS.write_text(json.dumps({**digests, name: digest(files)}, indent=2) + "\n")
        return
    assert digests[name] == digest(files)


@pytest.mark.parametrize("name", JOBS)
def test_bounded(name: str, recorded: Path, tmp_path: Path) -> None:
    check(name, recorded, tmp_path, "DirectRunner", [])


def test_numbers_are_of_the_rules_they_were_recorded_by() -> None:
    """Old ones stay: what was begun by earlier rules keeps its bytes."""
    rules = {name: json.loads(text)["rules"] for name, text in recorded_in(NUMBERS).items()}
    assert {name for name, number in rules.items() if number >= 4} == {
        "usual", "usual_combined", "remembered", "remembered_a_while"
    }  # fmt: skip


@pytest.mark.parametrize("name", ["tree", "toeplitz", "sliding", "public"])
def test_a_run_from_before(name: str, recorded: Path, tmp_path: Path) -> None:
    """A store that holds no numbers goes on by the rules of its time: the recorded bytes."""
    job = golden_job(name, recorded, tmp_path)
    with mock.patch.object(run, "calibrate", lambda plan: ""):
        run_job(job)
    assert recorded_in(DIGESTS)[name] == digest(published(job))


@pytest.mark.parametrize("name", JOBS)
def test_prism(name: str, recorded: Path, tmp_path: Path) -> None:
    flags = ["--streaming", f"--prism_location={binary()}"]
    check(name, recorded, tmp_path, "PrismRunner", flags)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "plain" else pytest.mark.slow) for n in JOBS]
)
def test_flink(name: str, recorded: Path, tmp_path: Path) -> None:
    need_flink()
    check(name, recorded, tmp_path, "FlinkRunner", ["--parallelism=2"])
    assert not job_servers(), "a Flink that nobody uses any more goes on"


def job_servers() -> list[bytes]:
    """Command lines of this process's children that are job servers."""
    lists = [path.read_text().split() for path in Path("/proc/self/task").glob("*/children")]
    lines = [Path(f"/proc/{child}/cmdline").read_bytes() for some in lists for child in some]
    return [line for line in lines if b"job-server" in line]
