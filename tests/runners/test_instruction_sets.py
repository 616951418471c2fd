"""The same bytes on other processors: golden jobs under numpy's, BLAS's and LLVM's least
instructions, and the numbers of a run under an emulated older processor."""

import importlib
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from dpstream.accounting.budget.allocation import Budget
from dpstream.accounting.budget.calibration import calibrated
from tests.lanes import few_first
from tests.runners.engines import need
from tests.runners.golden import (
    NUMBERS,
    golden_job,
    recorded_digest,
    recorded_numbers_of_all,
    write_stream,
)

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
from dpstream.accounting.aggregates import ratio
mean, out = Aggregate("m", "mean", "x", (0.0, 100.0), 1.0), []
for sd, count, total in json.loads(sys.argv[1]):
    given = np.array([total]), np.array([count]), (np.float64(sd), np.float64(sd / 7))
    out.append(float(ratio(mean, 50, *given)[1][0]))
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
        spread = total / count * (sd / 7)
        exact.append(math.sqrt(sd * sd + spread * spread) / count)
    assert sds == [exact, exact]


def figures(budget: Budget) -> list[float | int | list[float]]:
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
        ours[name] = figures(calibrated(job.plan, text).budget)
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
