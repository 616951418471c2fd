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
from typing import Any, NamedTuple, NoReturn

import apache_beam as beam
import pytest

from dpstream.pipelines.runners import parts
from dpstream.pipelines.runners.guard import with_parent
from dpstream.pipelines.runners.job_servers import descendants
from dpstream.pipelines.runners.table import Engine, make_runner
from tests.runners import spike

ROOT = Path(__file__).parents[2]


def need(part: object, text: str) -> None:
    """A part must be here: a failure in CI, a loud skip elsewhere."""
    if part:
        return
    if os.environ.get("CI") == "true":
        pytest.fail(text)
    without(text)


def without(text: str) -> NoReturn:
    """Skip loudly, in CI too: a part that not every machine of CI has, whose test says what holds
    without it.  The text says what ``is missing``."""
    warnings.warn(pytest.PytestWarning(text), stacklevel=3)
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
    with launched(runner, flags, shape, folder) as (result, _):
        yield result


@contextmanager
def launched(
    runner: str, flags: list[str], shape: spike.Shape, folder: Path
) -> Iterator[tuple[Any, Engine]]:
    """The same, with its engine: what waits for the stream must drain it before a cancel."""
    engine = make_runner(runner, flags)
    pipeline = beam.Pipeline(runner=engine.runner, options=engine.options)
    spike.build(pipeline, shape, str(folder))
    result = pipeline.run()
    try:
        yield result, engine
    finally:
        engine.drain()
        with suppress(Exception):
            result.cancel()
        with suppress(Exception):
            result.wait_until_finish(duration=10_000)
        engine.close()


def results(
    shape: spike.Shape, folder: Path, result: Any, seconds: float = 300.0
) -> dict[tuple[int, int], int]:
    """Sums by (shard, trigger time) once all are there, or the job or the time is at its end."""
    until = time.monotonic() + seconds
    wanted = shape.shards * shape.trigger_times
    while time.monotonic() < until:
        ended = str(result.state) in ("DONE", "FAILED", "CANCELLED")
        sums, _ = spike.outputs(folder)
        if len(sums) >= wanted or ended:
            return sums
        time.sleep(0.1)
    return spike.outputs(folder)[0]


class Pool(NamedTuple):
    """A worker pool: where it listens, and the process that everything of it descends from."""

    address: str
    pid: int

    def workers(self) -> list[int]:
        """Its Python workers, the oldest first."""
        return sorted(
            pid
            for pid in descendants(self.pid)
            if b"runners.harness" in (line := _command(pid)) and b"guard.py" not in line
        )


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


@contextmanager
def worker_pool() -> Iterator[Pool]:
    """A pool of Python workers as a process that ends with this one; each worker is a process."""
    process = subprocess.Popen(
        with_parent(
            [sys.executable, "-m", "dpstream.pipelines.runners.worker_pool", "--service_port=0"]
        ),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    with process, process.stdout:
        try:
            address = process.stdout.readline().split()[-1].rstrip(".")
            yield Pool(address, process.pid)
        finally:
            process.terminate()
