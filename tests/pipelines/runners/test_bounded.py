"""A pipeline that hands over files runs to its end, and its failures have codes."""

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest

from dpstream.accounting.errors import RunError, UsageError
from dpstream.dp_transforms.telemetry import guarded
from dpstream.pipelines.runners.bounded import Runner, run_to_end, sparing_memory
from tests.runners.engines import need_flink

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

    run_to_end(runner, build, lambda: len(list(folder.iterdir())) == 3)


def test_all_is_there_at_the_end(tmp_path: Path) -> None:
    run(Runner("DirectRunner"), tmp_path, Touch(str(tmp_path)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "3"]


@pytest.mark.slow
def test_what_does_not_end_by_itself_is_ended(tmp_path: Path) -> None:
    need_flink()
    run(Runner("FlinkRunner"), tmp_path, Touch(str(tmp_path)))
    assert len(list(tmp_path.iterdir())) == 3


def test_a_failure_says_the_stage_and_nothing_of_the_data(tmp_path: Path) -> None:
    with pytest.raises(RunError) as failed:
        run(Runner("DirectRunner"), tmp_path, Fails())
    assert "somebody" not in str(failed.value) and "touch" in str(failed.value)


def test_only_flink_is_told_its_parallelism() -> None:
    assert Runner("FlinkRunner", ("--x",), 3).beam_args == ["--x", "--parallelism=3"]
    assert Runner("PrismRunner", ("--x",), 3).beam_args == ["--x"]


@pytest.mark.parametrize("name", ["DataflowRunner", "NoRunner"])
def test_a_runner_whose_workers_share_no_folders_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="--runner"):
        Runner(name).check()
    Runner("DirectRunner").check()


ARRAYS = """
import resource
import numpy as np
from dpstream.pipelines.runners.bounded import sparing_memory
with sparing_memory():
    for turn in range(11):
        if turn == 1:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        array = None
        array = np.ones(1 << 24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

FAULTS = 10 * 128 * 2**20 // 2**21
OF_THE_C_LIBRARY = {
    "MALLOC_MMAP_THRESHOLD_": "131072",
    "MALLOC_TRIM_THRESHOLD_": "131072",
    "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072",
}


def test_objects_that_are_there_are_collected_again_after_a_run() -> None:
    assert gc.get_freeze_count() == 0
    with pytest.raises(ZeroDivisionError), sparing_memory():
        assert gc.get_freeze_count() > 1000
        raise ZeroDivisionError
    assert gc.get_freeze_count() == 0


def new_memory(variable: str | None) -> int:
    """Page faults of ten arrays of 128 MiB, one after the other, with a variable for the C
    library: 64 each where the kernel gives 2 MiB at once, 32768 of 4 KiB."""
    others = {name: value for name, value in os.environ.items() if name not in OF_THE_C_LIBRARY}
    more = {} if variable is None else {variable: OF_THE_C_LIBRARY[variable]}
    out = subprocess.run(
        [sys.executable, "-c", ARRAYS],
        env=others | more,
        capture_output=True,
        text=True,
        check=True,
    )
    return int(out.stdout)


def test_large_arrays_take_memory_that_is_there() -> None:
    assert new_memory(None) < FAULTS // 2


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
