"""The same recorded stream, the same job: the same bytes on every runner, and from version to
version.  ``REWRITE=1`` writes numbers and digests anew (of the bounded run)."""

import importlib
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import apache_beam as beam
import msgspec
import numpy as np
import pytest

from dpstream.accounting.budget.allocation import Budget
from dpstream.accounting.budget.calibration import calibrate, calibrated
from dpstream.accounting.mixing import Mixing
from dpstream.dp_transforms import batches
from dpstream.dp_transforms.batches import HAND_OVER, HAND_OVER_ROWS
from dpstream.dp_transforms.beam import buffer
from dpstream.dp_transforms.flow import DPStream
from dpstream.pipelines.runners.table import make_runner
from dpstream.pipelines.stream.run import run_job
from dpstream.state import open as stores
from tests.dp_transforms.runs import begin_mixed, factors, mixed_plan, mixed_released
from tests.golden.pinned import check as check_text
from tests.lanes import few_first
from tests.runners.engines import need, need_flink
from tests.runners.feed import Collect, collected
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
from tests.streams import COUNT, SUM, generate


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


# Mixed cells on another runner: the same bytes as in memory.


@pytest.mark.slow
def test_prism_gives_the_same_bytes_as_memory(tmp_path: Path) -> None:
    mixing = Mixing(factors(4, 5))
    plan = mixed_plan(mixing, aggregates=(COUNT, SUM))
    source = generate(plan).batches(150)
    expected = mixed_released(begin_mixed(plan, tmp_path / "a", mixing), source)
    run, out = begin_mixed(plan, tmp_path / "b", mixing, 4), tmp_path / "out"
    out.mkdir()
    engine = make_runner("PrismRunner", [f"--prism_location={binary()}"])
    with beam.Pipeline(engine.runner, engine.options) as pipeline:
        output = pipeline | beam.Create(source, reshuffle=False) | DPStream(plan, run)
        _ = output.releases | Collect(out)
    stores.close_all()
    assert collected(out) == expected


# The same bytes on other processors: golden jobs under numpy's, BLAS's and LLVM's least
# instructions, and the numbers of a run under an emulated older processor.


#: The one job whose numbers differ on a processor without AVX-512, one that publishes means and
#: their sds, and one for each encoder.
NAMES = ("threshold", "shared", "tree", "blt", "combined")


def least_instructions() -> dict[str, str]:
    """An environment in which numpy, BLAS and libm use what every x86-64 processor has."""
    umath: Any = importlib.import_module("numpy._core._multiarray_umath")
    present = [name for name in umath.__cpu_dispatch__ if umath.__cpu_features__.get(name)]
    return {
        "NPY_DISABLE_CPU_FEATURES": " ".join(present),
        "OPENBLAS_CORETYPE": "Nehalem",
        "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-FMA4",
    }


OLD_JIT = {"NUMBA_CPU_NAME": "nehalem", "NUMBA_CPU_FEATURES": ""}


@pytest.mark.parametrize(
    "case",
    few_first([(NAMES[:2], {}), (NAMES, {}), (NAMES, OLD_JIT)]),
    ids=["few", "numpy", "compiled"],
)
def test_golden_bytes(case: tuple[tuple[str, ...], dict[str, str]], tmp_path: Path) -> None:
    names, more = case
    env = os.environ | least_instructions() | more
    if more:
        env["NUMBA_CACHE_DIR"] = str(tmp_path / "cache")
    command = [sys.executable, "-m", "tests.runners.golden", str(tmp_path), *names]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    digests = dict(line.split() for line in done.stdout.splitlines())
    assert digests == {name: recorded_digest(name) for name in names}


#: sd of a sum's noise, noisy count and noisy sum whose mean has an sd that shows whether the first
#: was squared by libm's pow, which rounds as the processor's instructions have it.
HARD = [
    (188.62268545469308, 3203.0, -460.4),
    (324.2290931097627, 4075.7, 825.5),
    (121.09636269621947, 2740.9, 870.1),
    (279.3384745551803, 4294.2, -932.8),
    (173.5386399460121, 4322.7, 82.9),
    (121.6700810698184, 1533.6, -154.6),
]
RATIOS = """
import json, sys
import numpy as np
from dpstream.accounting.fields import Aggregate
from dpstream.accounting.aggregates import quotient
mean, out = Aggregate("m", "mean", "x", (0.0, 100.0), 1.0), []
for sd, count, total in json.loads(sys.argv[1]):
    given = np.array([total]), np.array([count]), (np.float64(sd), np.float64(sd / 7))
    out.append(float(quotient(mean, 50, *given)[1][0]))
print(json.dumps(out))
"""


def test_sds_of_means() -> None:
    command = [sys.executable, "-c", RATIOS, json.dumps(HARD)]
    sds = []
    for env in (os.environ, os.environ | least_instructions()):
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        sds.append(json.loads(done.stdout))
    exact = []
    for sd, count, total in HARD:
        spread = total * count / (count * count + (sd / 7) * (sd / 7)) * (sd / 7)
        exact.append(math.sqrt(sd * sd + spread * spread) / count)
    assert sds == [exact, exact]


def rounded_figures(budget: Budget) -> list[float | int | list[float]]:
    """Everything of a budget that draws, tests or is published."""
    streams = [budget.selection, budget.units, *budget.values]
    out: list[float | int | list[float]] = [budget.mu, budget.b]
    for noise in streams:
        if noise is not None:
            out += [noise.sigma, noise.sd.tolist(), noise.strategy_object.parameters.tolist()]
    if budget.tau is not None:
        out.append(budget.tau.tolist())
    if budget.weights is not None:
        out.append(budget.weights.tolist())
    return out


SCRIPT = """
import json, sys
from dpstream.accounting.budget.calibration import calibrated
from pathlib import Path
from dpstream.pipelines.jobs.job import load_job
from tests.runners.test_instruction_sets import figures
for name, text in json.loads(Path(sys.argv[1]).read_text()).items():
    plan = load_job(Path(sys.argv[2], name, "dpstream.toml")).plan
    print(json.dumps([name, figures(calibrated(plan, text).budget)]))
"""


@pytest.mark.slow
def test_numbers_on_an_older_processor(tmp_path: Path) -> None:
    """What is read there is what was committed here, to the bit (qemu-user, Nehalem)."""
    emulator = shutil.which("qemu-x86_64")
    need(emulator, "qemu-x86_64 is missing (apt-get install qemu-user)")
    assert emulator is not None
    stream = tmp_path / "recorded"
    stream.mkdir()
    write_stream(stream, users=10)
    numbers, ours = recorded_numbers_of_all(), {}
    for name, text in numbers.items():
        job = golden_job(name, stream, tmp_path / name)
        ours[name] = rounded_figures(calibrated(job.plan, text).budget)
    command = [emulator, "-cpu", "Nehalem", sys.executable, "-c", SCRIPT, NUMBERS, tmp_path]
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = dict(json.loads(line) for line in done.stdout.splitlines())
    assert theirs == ours


def test_a_run_takes_its_numbers_from_the_store(tmp_path: Path) -> None:
    """One part in 10^15 of a sigma is other noise: the recorded numbers are the ones in use."""
    stream = tmp_path / "recorded"
    stream.mkdir()
    write_stream(stream, users=10)
    plan = golden_job("plain", stream, tmp_path / "plain").plan
    text = recorded_numbers_of_all()["plain"]
    numbers = json.loads(text)
    numbers["streams"][0]["sigma"] = float(np.nextafter(numbers["streams"][0]["sigma"], np.inf))
    other = calibrated(plan, msgspec.json.encode(numbers).decode()).budget
    ours = calibrated(plan, text).budget
    assert other.selection is not None and ours.selection is not None
    assert other.selection.sigma > ours.selection.sigma and other.mu == ours.mu
