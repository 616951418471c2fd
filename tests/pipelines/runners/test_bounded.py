"""A pipeline that hands over files runs to its end, and its failures have codes."""

from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest

from dpstream.accounting.errors import RunError, UsageError
from dpstream.dp_transforms.telemetry import guarded
from dpstream.pipelines.runners.bounded import Runner, run_to_end
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
