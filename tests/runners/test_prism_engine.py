"""What the flow relies on, on Prism: state, timers in order, holds, cancelling, errors."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import apache_beam as beam
import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.dp_transforms.telemetry import forget_error
from dpstream.pipelines.runners.errors import coded
from dpstream.pipelines.runners.job_servers import descendants
from dpstream.pipelines.runners.table import make_runner
from tests.bench.common import tree_seconds
from tests.runners import prism
from tests.runners.engines import ROOT, results, started
from tests.runners.spike import Shape, expected, outputs

#: A watermark that stops inside the millisecond before each trigger time, rows that come after it.
HOSTILE = Shape(
    start=1_700_000_000_000_000, step=20_000, every=120_000, batches=48, trigger_times=7,
    shift=-500, pace=0.02,
)  # fmt: skip


@pytest.fixture(scope="module")
def flags() -> list[str]:
    """Flags of an engine that is here."""
    return [f"--prism_location={prism.binary()}"]


@pytest.mark.parametrize(
    "shape",
    [Shape(), Shape(endless=True), HOSTILE, HOSTILE._replace(start=HOSTILE.start + 123)],
    ids=["ends", "endless", "hostile", "hostile, trigger times inside a millisecond"],
)
def test_every_row_is_in_its_trigger(tmp_path: Path, flags: list[str], shape: Shape) -> None:
    with started("PrismRunner", flags, shape, tmp_path) as result:
        assert results(shape, tmp_path, result) == expected(shape)
    _, off = outputs(tmp_path)
    assert all(0 < micros < 2_000 for micros in off), "timers fire just after their trigger time"


@pytest.mark.parametrize(
    "wrong",
    [{"first_at": -1_000, "second_at": 0}, {"first_at": 0, "second_at": 0}],
    ids=["first stage a tick early", "stages at one instant"],
)
def test_timers_too_early_lose_rows(
    tmp_path: Path, flags: list[str], wrong: dict[str, Any]
) -> None:
    shape = HOSTILE._replace(**wrong)
    with started("PrismRunner", flags, shape, tmp_path) as result:
        assert results(shape, tmp_path, result) != expected(shape)


class _Sleep(beam.DoFn):
    """Sleeps without output, and notes the CPU seconds that Prism spent meanwhile."""

    #: Workers are threads of this process.
    spent: ClassVar[list[float]] = []

    def process(self, element: int) -> None:
        before = _prism_seconds()
        time.sleep(2)
        self.spent.append(_prism_seconds() - before)


def _prism_seconds() -> float:
    (pid,) = (
        pid
        for pid in descendants(os.getpid())
        if Path(f"/proc/{pid}/comm").read_text() == "prism\n"
    )
    return tree_seconds(pid)


def test_waiting_for_a_bundle_costs_prism_nothing(flags: list[str]) -> None:
    """Beam's own build takes a whole core from the last output of a bundle to its response."""
    engine = make_runner("PrismRunner", flags)
    _Sleep.spent.clear()
    with beam.Pipeline(runner=engine.runner, options=engine.options) as pipeline:
        _ = pipeline | beam.Create([0], reshuffle=False) | beam.ParDo(_Sleep())
    engine.close()
    (spent,) = _Sleep.spent
    assert spent < 0.2


def test_an_endless_stream_is_cancelled(tmp_path: Path, flags: list[str]) -> None:
    shape = Shape(endless=True)
    with started("PrismRunner", flags, shape, tmp_path) as result:
        results(shape, tmp_path, result)
        assert str(result.state) == "RUNNING"
        result.cancel()
        with pytest.raises(RuntimeError, match="CANCELLED"):
            result.wait_until_finish()


def test_a_refusal_of_a_stage_comes_out(tmp_path: Path, flags: list[str]) -> None:
    forget_error()
    with (
        started("PrismRunner", flags, Shape(fails_at=3), tmp_path) as result,
        pytest.raises(RuntimeError) as caught,
    ):
        result.wait_until_finish()
    error = coded(caught.value)
    assert (type(error), error.field, error.rule) == (
        PolicyError, "store", "was refused for a test",
    )  # fmt: skip


def test_an_interrupt_ends_it_and_its_engine(tmp_path: Path, flags: list[str]) -> None:
    program = (
        "from pathlib import Path; from tests.runners.engines import *; "
        f"folder, shape = Path({str(tmp_path)!r}), spike.Shape(endless=True)\n"
        f"with started('PrismRunner', {flags!r}, shape, folder) as result:\n"
        "    results(shape, folder, result); print('there', flush=True)\n"
        "    result.wait_until_finish()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )  # fmt: skip
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == b"there\n"
        assert outputs(tmp_path)[0] == expected(Shape(endless=True))
        engine = _children(child.pid)
        assert engine
        child.send_signal(signal.SIGINT)
        child.wait(60)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    until = time.monotonic() + 30
    while any(Path(f"/proc/{number}").exists() for number in engine):
        assert time.monotonic() < until, "Prism outlives its program"
        time.sleep(0.1)


def _children(number: int) -> list[int]:
    text = Path(f"/proc/{number}/task/{number}/children").read_text()
    return [int(child) for child in text.split()]
