"""Sources without end on Prism: what they gave, when, and behind which watermark.

Prism is looked for in PRISM_LOCATION, `.tools/bin`, and on the path.  With CI=true a missing one
fails the tests; elsewhere they are skipped, loudly.
"""

import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow as pa
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import TimerSpec, on_timer
from apache_beam.utils.timestamp import Timestamp

from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.runners.table import PRISM_WHOLE_BUNDLES
from dpstream.pipelines.runners.worker_pool import LoopbackPrismRunner
from dpstream.pipelines.stream.run import Result, run_job

ROOT = Path(__file__).parents[2]


def binary() -> str:
    """Prism's program; no test goes on without it."""
    named = os.environ.get("PRISM_LOCATION")
    for candidate in (named, ROOT / ".tools" / "bin" / "prism", shutil.which("prism")):
        if candidate and Path(candidate).exists():
            return str(candidate)
    text = "Prism is missing (make prism)"
    if os.environ.get("CI") == "true":
        pytest.fail(text)
    warnings.warn(pytest.PytestWarning(text), stacklevel=2)
    pytest.skip(text)


@contextmanager
def engine() -> Iterator[LoopbackPrismRunner]:
    """A runner, and an end to its Prism."""
    runner = LoopbackPrismRunner()
    try:
        yield runner
    finally:
        runner.close()


class Seen:
    """What came out of a source: batches and dead letters in order, each with its wall time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.records: list[tuple[float, pa.RecordBatch]] = []
        self.dead: list[tuple[float, pa.RecordBatch]] = []
        self.rung: int | None = None

    def batches(self, name: str = "records") -> list[pa.RecordBatch]:
        """The batches so far."""
        with self.lock:
            return [batch for _, batch in getattr(self, name)]

    def rows(self) -> int:
        """Rows so far."""
        return sum(batch.num_rows for batch in self.batches())


#: Prism's workers are threads of this process; a DoFn finds what it fills by its number.
_SEEN: dict[int, Seen] = {}


BELL = TimerSpec("bell", TimeDomain.WATERMARK)
_SET = beam.DoFn.TimerParam(BELL)


class _Bell(beam.DoFn):
    """Rings when the watermark passes an instant (micros): notes the rows that had come."""

    def __init__(self, number: int, at: int) -> None:
        self.number, self.at = number, at

    def process(self, element: Any, bell: Any = _SET) -> None:
        bell.set(Timestamp(micros=self.at))

    @on_timer(BELL)
    def ring(self) -> None:
        seen = _SEEN[self.number]
        with seen.lock:
            seen.rung = sum(batch.num_rows for _, batch in seen.records)


class _Keep(beam.DoFn):
    def __init__(self, number: int, name: str) -> None:
        self.number, self.name = number, name

    def process(self, element: pa.RecordBatch) -> None:
        seen = _SEEN[self.number]
        with seen.lock:
            getattr(seen, self.name).append((time.time(), element))


@contextmanager
def running(source: beam.PTransform, bell: int | None = None) -> Iterator[tuple[Seen, Any]]:
    """A source on Prism: what it gave so far, and the pipeline's result; stopped at the end.

    ``Seen.rung``: rows that had come when the watermark passed ``bell`` (micros).
    """
    program, seen = binary(), Seen()
    _SEEN[id(seen)] = seen
    flags = [
        f"--prism_location={program}",
        "--prism_log_level=warn",
        "--streaming",
        PRISM_WHOLE_BUNDLES,
    ]
    runner = LoopbackPrismRunner()
    pipeline = beam.Pipeline(runner=runner, options=PipelineOptions(flags))
    read = pipeline | "Source" >> source
    for name in ("records", "dead"):
        output = read["dead_letter" if name == "dead" else name]
        _ = output | name >> beam.ParDo(_Keep(id(seen), name))
    if bell is not None:
        every = (pipeline | beam.Create([None]), read["records"] | beam.Map(lambda _: None))
        pair = beam.Map(lambda _: ("k", 0)).with_output_types(tuple[str, int])
        typed = every | beam.Flatten() | pair
        _ = typed | "Bell" >> beam.ParDo(_Bell(id(seen), bell))
    result = pipeline.run()
    try:
        yield seen, result
    finally:
        runner.drain()
        with suppress(Exception):
            result.cancel()
        with suppress(Exception):
            result.wait_until_finish(duration=10_000)
        runner.close()
        del _SEEN[id(seen)]


def wait_for(condition: Callable[[], bool], seconds: float = 180.0) -> None:
    """Wait until something is so.

    Raises:
        AssertionError: it is not, in time.
    """
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "did not happen in time"
        time.sleep(0.02)


def run_while(job: Job, work: Callable[[], None]) -> Result:
    """The job on Prism until the work is done (a runner wants the main thread)."""
    stop, failed = threading.Event(), list[BaseException]()

    def go() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)
        stop.set()

    thread = threading.Thread(target=go, daemon=True)
    thread.start()
    flags = [f"--prism_location={binary()}", "--prism_log_level=warn"]
    try:
        return run_job(job, "PrismRunner", flags, stop=stop)
    finally:
        thread.join()
        assert failed == []
