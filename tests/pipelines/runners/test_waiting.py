"""The end of a run: waiting, warnings, coded errors, and pipelines that end."""

import errno
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import apache_beam as beam
import duckdb
import pyarrow as pa
import pytest

from dpstream.accounting.errors import DpstreamError, PolicyError, RunError, instance
from dpstream.dp_transforms import flow
from dpstream.dp_transforms.telemetry import first_error, guarded
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.runners import errors
from dpstream.pipelines.runners.bounded import Runner, run_to_end
from dpstream.pipelines.runners.errors import coded, say
from dpstream.pipelines.runners.memory import sparing_memory
from dpstream.pipelines.runners.waiting import QUIET_SECONDS, Stillness, quiet_seconds
from tests.golden.refusals import Refused
from tests.growing import arrive, place
from tests.pipelines.cli.called import call
from tests.runners.engines import need_flink


@pytest.mark.parametrize(("live", "seconds"), [(False, QUIET_SECONDS), (True, 43_200)])
def test_two_triggers_at_the_streams_own_pace(
    live: bool, seconds: float, make_job: Callable[..., Job]
) -> None:
    assert quiet_seconds(make_job().plan.timeline, live) == seconds


def test_it_is_said_again_after_twice_the_time_and_any_change_is_progress() -> None:
    now, messages = [0.0], list[DpstreamError | str]()
    still = Stillness(10, messages.append, lambda: now[0])
    at = []
    for second in range(100):
        now[0] = float(second)
        before = len(messages)
        still.look("other" if second >= 60 else "same")
        at += [second] if len(messages) > before else []
    # The first look is progress, too; and so is the change at 60.
    assert at == [10, 20, 40, 70, 80]
    assert {instance(error, DpstreamError).field for error in messages} == {"runner"}


CANARY = "CANARY7741"


@pytest.fixture(autouse=True)
def nothing_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "first_error", lambda: None)


def test_a_coded_cause_is_found_however_deep() -> None:
    cause = PolicyError("sink.kind", "rule", "fix")
    middle = ValueError("of Beam")
    middle.__context__ = cause
    outer = RuntimeError("of a runner")
    outer.__cause__ = middle
    assert coded(outer) is cause


class _Interrupted(beam.DoFn):
    """What Ctrl-C does while a stage waits."""

    def process(self, element: int) -> None:
        raise KeyboardInterrupt


def test_an_interrupt_is_none_of_the_runners_failures() -> None:
    """Beam wraps it in an error of its own, as it does every exception of a stage."""
    with pytest.raises(RuntimeError) as wrapped, beam.Pipeline("FnApiRunner") as pipeline:
        pipeline | beam.Create([1]) | beam.ParDo(_Interrupted())
    with pytest.raises(KeyboardInterrupt):
        coded(wrapped.value)


def test_a_workers_error_comes_first_where_the_exception_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker_error = RunError("state", "rule", "fix")
    monkeypatch.setattr(errors, "first_error", lambda: worker_error)
    assert coded(RuntimeError("anything")) is worker_error


def test_of_text_the_class_alone_is_shown() -> None:
    refusal = coded(KeyError("SECRET-USER"))
    assert (type(refusal), refusal.field) == (RunError, "runner")
    assert "SECRET" not in str(refusal) and "KeyError" in str(refusal)
    text = "dpstream.accounting.errors.PolicyError: user.SECRET: no field of a stage"
    assert coded(RuntimeError(text)).field == "runner"


class _OfAModule(RunError):
    """A class that is defined elsewhere."""


def test_an_error_of_a_remote_worker_is_one_that_is_known_word_for_word() -> None:
    samples = [RunError("table visits", "has no row", "add one"), _OfAModule("x", "is y", "do z")]
    for one in samples:
        text = (
            f"java.lang.Error: ...\ndpstream.some.where.{type(one).__name__}: {one} [while running"
        )
        assert coded(RuntimeError(text), samples) is one
    for text in ("dpstream.RunError: table SECRET: has no row. Fix: add one.",
                 "dpstream.RunError: table visits: has no SECRET. Fix: add one.",
                 "dpstream.PolicyError: table visits: has no row. Fix: add one."):  # fmt: skip
        refusal = coded(RuntimeError(text), samples)
        assert refusal.field == "runner" and "SECRET" not in str(refusal)
    text = "dpstream.accounting.errors.PolicyError: secret: is not the key. Fix: no."
    assert coded(RuntimeError(text)).field == "secret"


LIMITS = (
    MemoryError(CANARY), pa.ArrowMemoryError(CANARY), duckdb.OutOfMemoryException(CANARY),
    RuntimeError("can't start new thread"), OSError(errno.ENOMEM, CANARY),
)  # fmt: skip


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: type(limit).__name__)
def test_a_memory_limit_in_a_stage_is_named_whatever_raises_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: Exception
) -> None:
    monkeypatch.setattr(errors, "first_error", first_error)
    arrive(place(tmp_path), 9)
    with mock.patch.object(flow, "seal", side_effect=limit):
        done = call("run", "--project", tmp_path, "--json")
    assert done.exit_code == 4
    refusal = json.loads(done.stderr.strip().splitlines()[-1])
    assert refusal["field"] == "memory" and "stage." in refusal["rule"]
    assert "threads = 1" in refusal["fix"]
    assert CANARY not in done.output and type(limit).__name__ not in done.output


@pytest.mark.parametrize(
    "text",
    [
        "Traceback: x\nnumpy._core._exceptions._ArrayMemoryError: Unable to allocate",
        "dpstream.accounting.errors.RunError: memory: there is not enough for stage.bound. Fix",
        "terminate called after throwing an instance of 'std::bad_alloc'",
        "RuntimeError: can't start new thread",
    ],
)
def test_a_memory_limit_of_a_worker_elsewhere_is_told_by_its_text(text: str) -> None:
    for error in (RuntimeError(text + CANARY), MemoryError(CANARY)):
        refusal = coded(error)
        assert (type(refusal), refusal.field) == (RunError, "memory")
        assert CANARY not in str(refusal) and "Error" not in str(refusal)


@pytest.mark.parametrize("field", ["public_keys", "account.limit", "table", "records", "shards"])
def test_the_field_of_a_worker_elsewhere_is_told(field: str) -> None:
    refusal = coded(RuntimeError(f"x dpstream.accounting.errors.PolicyError: {field}: no. Fix: y."))
    assert (type(refusal), refusal.field) == (PolicyError, field)


def test_a_warning_is_one_line_of_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    say("plain words")
    assert capsys.readouterr() == ("", "Warning: plain words\n")


pytestmark = pytest.mark.usefixtures("unfrozen")


class Touch(beam.DoFn):
    """Makes a file."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def process(self, name: int) -> Any:
        (Path(self._folder) / str(name)).touch()
        yield name


class Fails(beam.DoFn):
    """Cannot."""

    @guarded("touch")
    def process(self, name: int) -> Any:
        raise ValueError("of somebody")
        yield name


def run(runner: Runner, folder: Path, what: beam.DoFn) -> None:
    def build(pipeline: beam.Pipeline) -> None:
        names = pipeline | beam.Create([1, 2, 3]) | beam.Reshuffle()
        names | beam.ParDo(what).with_output_types(int)

    run_to_end(runner, "run", build, lambda: len(list(folder.iterdir())) == 3)


def test_all_is_there_at_the_end(tmp_path: Path) -> None:
    run(Runner("DirectRunner"), tmp_path, Touch(str(tmp_path)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "3"]


@pytest.mark.slow
def test_what_does_not_end_by_itself_is_ended(tmp_path: Path) -> None:
    need_flink()
    run(Runner("FlinkRunner"), tmp_path, Touch(str(tmp_path)))
    assert len(list(tmp_path.iterdir())) == 3


def test_a_failure_says_the_stage_and_nothing_of_the_data(tmp_path: Path, refused: Refused) -> None:
    failed = refused(lambda: run(Runner("DirectRunner"), tmp_path, Fails()))
    assert "somebody" not in str(failed) and "touch" in str(failed)


def test_only_flink_is_told_its_parallelism() -> None:
    assert Runner("FlinkRunner", ("--x",), 3).beam_args == ["--x", "--parallelism=3"]
    assert Runner("PrismRunner", ("--x",), 3).beam_args == ["--x"]


@pytest.mark.parametrize("name", ["DataflowRunner", "NoRunner"])
def test_a_runner_whose_workers_share_no_folders_is_refused(name: str, refused: Refused) -> None:
    refused(lambda: Runner(name).check())
    Runner("DirectRunner").check()


ARRAYS = """
import resource, threading
from dpstream.pipelines.runners.memory import share_one_heap, sparing_memory
SHARE
import numpy as np

def faults():
    for turn in range(11):
        if turn == 1:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        array = None
        array = np.ones(1 << 24)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

with sparing_memory():
    thread = threading.Thread(target=faults)
    thread.START()
    thread.JOIN()
"""

FAULTS = 10 * 128 * 2**20 // 2**21
OF_THE_C_LIBRARY = {
    "MALLOC_MMAP_THRESHOLD_": "131072",
    "MALLOC_TRIM_THRESHOLD_": "131072",
    "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072",
}
OF_ALL_THREADS = {"SHARE": "share_one_heap()", "START": "start", "JOIN": "join"}
OF_OTHER_THREADS = OF_ALL_THREADS | {"SHARE": ""}
OF_THE_FIRST = OF_OTHER_THREADS | {"START": "run", "JOIN": "is_alive"}


def test_objects_that_are_there_are_collected_again_after_a_run() -> None:
    assert gc.get_freeze_count() == 0
    with pytest.raises(ZeroDivisionError), sparing_memory():
        assert gc.get_freeze_count() > 1000
        raise ZeroDivisionError
    assert gc.get_freeze_count() == 0


def new_memory(variable: str | None, words: dict[str, str] = OF_THE_FIRST) -> int:
    """Page faults of ten arrays of 128 MiB, one after the other, with a variable for the C
    library: 64 each where the kernel gives 2 MiB at once, 32768 of 4 KiB."""
    others = {name: value for name, value in os.environ.items() if name not in OF_THE_C_LIBRARY}
    more = {} if variable is None else {variable: OF_THE_C_LIBRARY[variable]}
    script = ARRAYS
    for word, value in words.items():
        script = script.replace(word, value)
    out = subprocess.run(
        [sys.executable, "-c", script],
        env=others | more,
        capture_output=True,
        text=True,
        check=True,
    )
    return int(out.stdout)


@pytest.mark.parametrize("words", [OF_THE_FIRST, OF_ALL_THREADS])
def test_large_arrays_take_memory_that_is_there(words: dict[str, str]) -> None:
    assert new_memory(None, words) < FAULTS // 2


def test_heaps_of_further_threads_are_too_small() -> None:
    """The reason for one heap; where this fails, it is not needed any more."""
    assert new_memory(None, OF_OTHER_THREADS) >= FAULTS


@pytest.mark.parametrize("variable", OF_THE_C_LIBRARY)
def test_who_has_set_the_c_library_has_decided(variable: str) -> None:
    assert new_memory(variable) >= FAULTS


def test_objects_frozen_by_others_stay_so() -> None:
    gc.freeze()
    try:
        with sparing_memory():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
