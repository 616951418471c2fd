"""The same recorded stream, the same job: the same bytes on every runner, and from version to
version.  ``REWRITE=1`` writes the digests anew (of the bounded run)."""

import json
import os
from pathlib import Path

import pytest

from pipelines.stream import run_job
from tests.runners.engines import need_flink
from tests.runners.golden import JOBS, digest, golden_job, published, write_stream
from tests.runners.prism import binary

DIGESTS = Path(__file__).parents[1] / "golden" / "streams.json"


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    write_stream(folder)
    return folder


def check(name: str, recorded: Path, folder: Path, runner: str, flags: list[str]) -> None:
    job = golden_job(name, recorded, folder)
    result = run_job(job, runner, flags)
    files = published(job)
    line = job.plan.timeline
    assert len(files) == 1 + line.windows * line.triggers and not result.stopped
    digests = json.loads(DIGESTS.read_text()) if DIGESTS.exists() else {}
    if os.environ.get("REWRITE") and runner == "DirectRunner":
        DIGESTS.write_text(json.dumps({**digests, name: digest(files)}, indent=2) + "\n")
        return
    assert digests[name] == digest(files)


@pytest.mark.parametrize("name", JOBS)
def test_bounded(name: str, recorded: Path, tmp_path: Path) -> None:
    check(name, recorded, tmp_path, "DirectRunner", [])


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
