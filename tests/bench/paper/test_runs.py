"""A contest is checked whole before anything runs."""

from pathlib import Path

import pytest

from dpstream.accounting.errors import UsageError
from tests.bench.paper.jobs import Frame, Setting
from tests.bench.paper.modes import parse_mode
from tests.bench.paper.runs import Contest, check, provenance


def contest(folder: Path, mode: str, triggers: int) -> Contest:
    frame = Frame(folder / "none.parquet", "int", folder / "runs", 6.0, 1e-9)
    return Contest(frame, [Setting(parse_mode(mode), triggers, 4)], contributions=4)


def test_every_job_is_written_and_checked(tmp_path: Path) -> None:
    [job] = check(contest(tmp_path, "sticky", 10))
    assert job.exists() and not (job.parent / "state.db").exists()
    promise = contest(tmp_path, "sticky", 10).promise
    assert (promise.epsilon, promise.delta) == (6.0, 1e-9)


@pytest.mark.parametrize(("mode", "triggers"), [("sticky", 7), ("sticky", 0), ("nothing=1", 10)])
def test_what_cannot_be_run(mode: str, triggers: int, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        check(contest(tmp_path, mode, triggers))


def test_a_result_says_where_it_was_made() -> None:
    origin = provenance()
    assert "date" in origin and "numpy" in str(origin)
