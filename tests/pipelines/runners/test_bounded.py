"""A pipeline that hands over files runs to its end, and its failures have codes.

Memory of a run: what the program around it has decided stays (see also tests/runners).
"""

import gc
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest

from dpstream.accounting.errors import RunError, UsageError
from dpstream.dp_transforms.telemetry import guarded
from dpstream.pipelines.runners import bounded
from dpstream.pipelines.runners.bounded import Runner, run_to_end, sparing_memory
from tests.runners.engines import need_flink

pytestmark = pytest.mark.usefixtures("unfrozen")


@pytest.mark.parametrize("name", ["", *bounded._SET])
def test_who_has_set_the_allocator_has_decided(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in bounded._SET:
        monkeypatch.delenv(other, raising=False)
    if name:
        monkeypatch.setenv(name, "1")
    calls: list[bool] = []
    monkeypatch.setattr(bounded, "_keep_freed", lambda: calls.append(True))
    with sparing_memory():
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0
    assert calls == ([] if name else [True])


def test_objects_frozen_by_others_stay_so() -> None:
    gc.freeze()
    try:
        with sparing_memory():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


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
    with pytest.raises(UsageError, match="--runner"):
        Runner("NoRunner").engine()
