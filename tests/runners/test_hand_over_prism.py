"""Batches pass between stages of an engine by reference, each taken once and none left behind."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow as pa
import pytest
from apache_beam.transforms.userstate import BagStateSpec

from dpstream.accounting.errors import RunError
from dpstream.dp_transforms import batches, bounding, flow
from dpstream.dp_transforms.batches import HAND_OVER, ArrowBatchCoder
from dpstream.dp_transforms.telemetry import forget_error
from dpstream.pipelines.runners.errors import coded
from dpstream.pipelines.runners.table import make_runner
from dpstream.pipelines.stream.run import run_job
from dpstream.state import open as stores
from tests.golden.refusals import Refused
from tests.paced import paced
from tests.runners.engines import need_flink
from tests.runners.flink import LOCAL
from tests.runners.golden import (
    digest,
    golden_job,
    published,
    recorded_digest,
    recorded_numbers,
    write_stream,
)
from tests.runners.prism import binary, wait_for

#: Rows wait for a later trigger time, and some come late.
NAME = "late"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    write_stream(folder)
    return folder


@pytest.fixture(autouse=True)
def no_batch_is_small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All are handed over by reference, and none is left after the test."""
    monkeypatch.setattr(batches, "HAND_OVER_ROWS", 1)
    yield
    assert len(HAND_OVER) == 0
    forget_error()


@pytest.fixture(scope="module")
def flags() -> list[str]:
    return [f"--prism_location={binary()}", "--prism_log_level=error"]


@pytest.fixture(
    params=[
        "PrismRunner",
        # Threads of Beam's workers in this process end with the job's error, some while after it.
        pytest.param(
            "FlinkRunner",
            marks=pytest.mark.filterwarnings(
                "ignore::pytest.PytestUnhandledThreadExceptionWarning"
            ),
        ),
    ]
)
def engine(request: pytest.FixtureRequest, flags: list[str]) -> tuple[str, list[str]]:
    """Its name, and its flags."""
    need_flink()
    return request.param, flags if request.param == "PrismRunner" else LOCAL


def test_a_bundle_that_fails_after_it_has_taken_its_batches(
    recorded: Path,
    tmp_path: Path,
    engine: tuple[str, list[str]],
    monkeypatch: pytest.MonkeyPatch,
    refused: Refused,
) -> None:
    """Its run ends with the stage's own error, and the next one goes on from the store."""
    job, decide, calls = golden_job(NAME, recorded, tmp_path), bounding.decide, list[int]()

    def fails(*args: Any) -> Any:
        calls.append(args[3].num_rows)
        if len(calls) == 5:
            raise RunError("state", "has failed in the test", "run again")
        return decide(*args)

    monkeypatch.setattr(flow, "decide_records", fails)
    with recorded_numbers(NAME):
        refused(run_job, job, *engine)
    assert sum(calls) and len(HAND_OVER) == 0
    with recorded_numbers(NAME):
        assert run_job(job, *engine).resumed
    assert digest(published(job)) == recorded_digest(NAME)


def test_a_run_that_is_stopped_frees_what_it_holds(
    recorded: Path, tmp_path: Path, engine: tuple[str, list[str]]
) -> None:
    """Drained and cancelled in the middle of a paced recording, while rows wait; then goes on."""
    job, stop, held = golden_job(NAME, recorded, tmp_path), threading.Event(), list[int]()

    def in_the_middle() -> bool:
        held.append(len(HAND_OVER))
        return held[-1] > 0 and any(Path(job.sink.path).glob("window-000001/*"))

    def stopping() -> None:
        wait_for(in_the_middle)
        stop.set()

    thread = threading.Thread(target=stopping)
    thread.start()
    with recorded_numbers(NAME):
        with paced(20_000):
            assert run_job(job, *engine, stop=stop).stopped
        thread.join()
        assert len(HAND_OVER) == 0
        stores.close_all()
        assert run_job(job, *engine).resumed
    assert digest(published(job)) == recorded_digest(NAME)


def test_what_is_held_does_not_grow_with_the_stream(
    recorded: Path, tmp_path: Path, flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a pace: what lies between two trigger times, not what has passed."""
    job, give, held = golden_job("silent", recorded, tmp_path), HAND_OVER.give, list[int]()

    def watched(batch: pa.RecordBatch) -> bytes | None:
        held.append(len(HAND_OVER))
        return give(batch)

    monkeypatch.setattr(HAND_OVER, "give", watched)
    with recorded_numbers("silent"), paced(6_000):
        run_job(job, "PrismRunner", flags)
    assert digest(published(job)) == recorded_digest("silent")
    assert len(held) > 1_000 and max(held) < len(held) / 10


class _Take(beam.DoFn):
    """A stage of its own, for its state."""

    ROWS = BagStateSpec("rows", ArrowBatchCoder())

    def process(
        self,
        element: tuple[int, pa.RecordBatch],
        rows: Any = beam.DoFn.StateParam(ROWS),  # noqa: B008 - Beam's way to declare state
    ) -> None:
        time.sleep(0)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_batch_that_two_stages_ask_for_is_refused(flags: list[str], stages: int) -> None:
    """Never another batch, never none."""

    def batch_of(number: int) -> tuple[int, pa.RecordBatch]:
        return number, pa.RecordBatch.from_pydict({"n": [number] * 10})

    def run() -> None:
        engine = make_runner("PrismRunner", flags)
        try:
            pipeline = beam.Pipeline(runner=engine.runner, options=engine.options)
            typed = beam.Map(batch_of).with_output_types(tuple[int, pa.RecordBatch])
            batches = pipeline | beam.Create([1, 2, 3], reshuffle=False) | typed
            for stage in range(stages):
                _ = batches | f"Take{stage}" >> beam.ParDo(_Take())
            pipeline.run().wait_until_finish()
        finally:
            engine.close()

    with HAND_OVER.open():
        if stages == 1:
            return run()
        error = _error_of(run)
    assert isinstance(error, RunError) and "a second time" in str(error)
    return None


def _error_of(work: Callable[[], None]) -> Exception:
    forget_error()  # of an earlier run of this process
    with pytest.raises(Exception) as failure:
        work()
    return coded(failure.value)
