"""What the flow relies on, on Flink: local with LOOPBACK, and a cluster with an outer pool."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.dp_transforms.telemetry import forget_error
from dpstream.pipelines.runners.errors import coded
from tests.runners import flink
from tests.runners.engines import Pool, results, started
from tests.runners.flink import cluster, local, pool
from tests.runners.spike import Shape, expected, outputs

__all__ = ["cluster", "local", "pool"]
pytestmark = [
    pytest.mark.slow,  # every CI run has a golden job on Flink
    # Threads of Beam's workers in this process end with the job's error, some while after it.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]
ENDLESS = Shape(endless=True)


def test_every_row_is_in_its_trigger_locally(tmp_path: Path, local: list[str]) -> None:
    with started("FlinkRunner", local, ENDLESS, tmp_path) as result:
        assert results(ENDLESS, tmp_path, result) == expected(ENDLESS)
        assert str(result.state) == "RUNNING"
        result.cancel()
        with pytest.raises(RuntimeError, match="CANCELLED"):
            result.wait_until_finish()


def test_a_refusal_of_a_stage_comes_out(tmp_path: Path, local: list[str]) -> None:
    forget_error()
    flags = [*local, "--number_of_execution_retries=0"]
    with (
        started("FlinkRunner", flags, Shape(fails_at=3), tmp_path) as result,
        pytest.raises(RuntimeError) as caught,
    ):
        result.wait_until_finish()
    error = coded(caught.value)
    assert (type(error), error.rule) == (PolicyError, "was refused for a test")
    forget_error()
    elsewhere = coded(caught.value)  # as where only the job server's text comes back
    assert (type(elsewhere), elsewhere.field) == (PolicyError, "store")
    assert "test" not in elsewhere.rule


def on(cluster: flink.session.Cluster, pool: Pool) -> list[str]:
    return [
        f"--flink_master={cluster.master}", "--environment_type=EXTERNAL", "--parallelism=2",
        f"--environment_config={pool.address}",
    ]  # fmt: skip


def test_kills_change_nothing(tmp_path: Path, cluster: flink.session.Cluster, pool: Pool) -> None:
    """kill -9 of a Python worker, then of a task manager, while the stream goes on."""
    shape = ENDLESS._replace(batches=120, trigger_times=50, pace=0.3)
    with started("FlinkRunner", on(cluster, pool), shape, tmp_path) as result:
        _wait(result, lambda: len(outputs(tmp_path)[0]) >= 12)
        os.kill(pool.workers()[0], signal.SIGKILL)
        before = len(outputs(tmp_path)[0])
        _wait(result, lambda: len(outputs(tmp_path)[0]) >= before + 12)
        cluster.workers[0].kill()
        cluster.add_worker()
        assert len(outputs(tmp_path)[0]) < 180, "killed while the stream goes on"
        assert results(shape, tmp_path, result) == expected(shape)


def test_a_worker_that_is_killed_while_it_starts(
    tmp_path: Path, cluster: flink.session.Cluster, pool: Pool
) -> None:
    """It never comes to its task manager, which waits for it without a limit."""
    with started("FlinkRunner", on(cluster, pool), ENDLESS, tmp_path) as result:
        _wait(result, lambda: pool.workers() != [])
        os.kill(pool.workers()[0], signal.SIGKILL)
        assert results(ENDLESS, tmp_path, result) == expected(ENDLESS)


def _wait(result: Any, condition: Callable[[], bool], seconds: float = 300.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "did not happen in time"
        assert str(result.state) == "RUNNING"
        time.sleep(0.1)
