"""Running the small stream of ``spike`` on an engine, and what the engines need.

A part that is missing fails the tests where CI=true, else they are skipped, loudly.
"""

import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import apache_beam as beam
import pytest

from pipelines.runners import parts
from pipelines.runners.table import make_runner
from tests.emulator import free_port
from tests.runners import spike

ROOT = Path(__file__).parents[2]


def need(found: object, text: str) -> None:
    """A part must be here: a failure in CI, a loud skip elsewhere."""
    if found:
        return
    if os.environ.get("CI") == "true":
        pytest.fail(text)
    warnings.warn(pytest.PytestWarning(text), stacklevel=2)
    pytest.skip(text)


def need_flink() -> Path:
    """The job server's jar; Java must run."""
    need(parts.java_version(), "Java is missing (install Java 17)")
    jar = parts.job_server()
    need(jar, "Flink's job server is missing (make flink)")
    assert jar is not None
    return jar


@contextmanager
def started(runner: str, flags: list[str], shape: spike.Shape, folder: Path) -> Iterator[Any]:
    """The stream on an engine, cancelled at the end if it still runs."""
    engine = make_runner(runner, flags)
    pipeline = beam.Pipeline(runner=engine.runner, options=engine.options)
    spike.build(pipeline, shape, str(folder))
    result = pipeline.run()
    try:
        yield result
    finally:
        with suppress(Exception):
            result.cancel()
        with suppress(Exception):
            result.wait_until_finish(duration=10_000)
        engine.close()


def results(
    shape: spike.Shape, folder: Path, result: Any, seconds: float = 90.0
) -> dict[tuple[int, int], int]:
    """Sums by (shard, cut) once all are there, or the job or the time is at its end."""
    until = time.monotonic() + seconds
    wanted = shape.shards * shape.cuts
    while time.monotonic() < until:
        ended = str(result.state) in ("DONE", "FAILED", "CANCELLED")
        sums, _ = spike.found(folder)
        if len(sums) >= wanted or ended:
            return sums
        time.sleep(0.1)
    return spike.found(folder)[0]


class Pool(NamedTuple):
    """A worker pool: where it listens, and the number of its process and of its group."""

    address: str
    pid: int


@contextmanager
def worker_pool() -> Iterator[Pool]:
    """Beam's pool of Python workers as a process, each worker a process of its own."""
    port = free_port()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [
            sys.executable, "-m", "apache_beam.runners.worker.worker_pool_main",
            f"--service_port={port}",
        ],
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield Pool(f"localhost:{port}", process.pid)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 9)  # its workers are in the pool's group
        process.wait()
