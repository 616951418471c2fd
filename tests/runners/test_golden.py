"""The same recorded stream, the same job: the same bytes on every runner, and from version to
version.  ``REWRITE=1`` writes numbers and digests anew (of the bounded run)."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from dpstream.accounting.budget.allocation import Budget
from dpstream.accounting.budget.calibration import calibrate, calibrated
from dpstream.dp_transforms import batches
from dpstream.dp_transforms.batches import HAND_OVER, HAND_OVER_ROWS
from dpstream.dp_transforms.beam import buffer
from dpstream.pipelines.stream.run import run_job
from tests.golden.pinned import check as check_text
from tests.runners.engines import need_flink
from tests.runners.golden import (
    JOBS,
    NUMBERS,
    STREAMS,
    digest,
    golden_job,
    listing,
    published,
    recorded_digest,
    recorded_numbers,
    recorded_numbers_of_all,
    write_stream,
)
from tests.runners.prism import binary


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    write_stream(folder)
    return folder


def check(name: str, recorded: Path, folder: Path, runner: str, flags: list[str]) -> None:
    job, bounded = golden_job(name, recorded, folder), runner == "DirectRunner"
    if os.environ.get("REWRITE") and bounded:
        numbers = recorded_numbers_of_all() | {name: calibrate(job.plan)}
        NUMBERS.write_text(
            json.dumps({n: numbers[n] for n in JOBS if n in numbers}, indent=2) + "\n"
        )
    with recorded_numbers(name):
        result = run_job(job, runner, flags)
    files = published(job)
    timeline = job.plan.timeline
    assert len(files) == 1 + timeline.windows * timeline.triggers and not result.stopped
    if bounded:
        check_text(STREAMS / f"{name}.txt", listing(files))
    assert recorded_digest(name) == digest(files)


@pytest.mark.parametrize("name", JOBS)
def test_bounded(name: str, recorded: Path, tmp_path: Path) -> None:
    check(name, recorded, tmp_path, "DirectRunner", [])


@pytest.mark.parametrize("name", JOBS)
def test_recorded_numbers_are_those_of_today(name: str, recorded: Path, tmp_path: Path) -> None:
    """A run that begins now has them, but for the last bits of another processor."""
    plan, text = golden_job(name, recorded, tmp_path).plan, recorded_numbers_of_all()[name]
    ours, theirs = calibrated(plan, calibrate(plan)).budget, calibrated(plan, text).budget
    # A p-identity is rounded to whole numbers, which the last bits can move by one.
    assert figures(ours) == pytest.approx(figures(theirs), rel=5e-3 if ours.plain else 1e-9)


def figures(budget: Budget) -> list[float]:
    """What a run draws and tests with."""
    streams = [noise for noise in (budget.selection, budget.units, *budget.values) if noise]
    out = [budget.epsilon, budget.delta, budget.mu, budget.theta, budget.b]
    out += [x for s in streams for x in (s.sensitivity, s.share, s.sigma, *s.sd.tolist())]
    for array in (budget.tau, budget.weights):
        out += [] if array is None else np.asarray(array, float).ravel().tolist()
    return out


@pytest.mark.parametrize(
    ("name", "rows"),
    [*((name, 1) for name in JOBS), *((name, HAND_OVER_ROWS) for name in ("plain", "late"))],
)
def test_prism(
    name: str, rows: int, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By reference and on threads, also of the smallest batches; and some as bytes and on the
    runner's own thread, as most of these batches are by default."""
    monkeypatch.setattr(batches, "HAND_OVER_ROWS", rows)
    if rows == 1:
        monkeypatch.setattr(buffer, "_WORTH_A_THREAD", 0)
    flags = ["--streaming", f"--prism_location={binary()}"]
    check(name, recorded, tmp_path, "PrismRunner", flags)
    assert len(HAND_OVER) == 0


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
    lines = [
        Path(f"/proc/{child}/cmdline").read_bytes() for children in lists for child in children
    ]
    return [line for line in lines if b"job-server" in line]
