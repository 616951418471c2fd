"""The project file in Python: the same answers and charges as of the commands."""

from pathlib import Path

import pytest

import dpstream
from dpstream.accounting.errors import UsageError
from tests.pipelines.cli.called import call
from tests.pipelines.frames.rows import a_job
from tests.pipelines.sql import asking


def test_it_is_found_and_its_jobs_are_those_of_load_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = a_job(tmp_path)
    monkeypatch.chdir(tmp_path)
    project = dpstream.project()
    assert project.path == job.path
    assert project.job().plan.hash == dpstream.project(tmp_path).job(job.name).plan.hash
    with pytest.raises(UsageError):
        project.job("none")
    with pytest.raises(UsageError):
        dpstream.project(tmp_path / "none.toml")


def test_a_statement_is_charged_once_whoever_asks_it(tmp_path: Path) -> None:
    file, statement = asking.data_set(tmp_path), asking.dp("page, COUNT(*) AS n")
    project = dpstream.project(file)
    first = project.sql(statement)
    assert first.charged and not project.sql(statement).charged
    outcome = call("sql", "--project", file, statement, "--json")
    assert outcome.exit_code == 0 and len(asking.charges(tmp_path)) == 1
    assert project.connect().execute(statement).fetch_arrow_table() == first.table
    assert project.sql(statement, fresh=True).charged and len(asking.charges(tmp_path)) == 2


def test_a_table_in_memory_is_charged_in_the_data_set(tmp_path: Path) -> None:
    project = dpstream.project(asking.data_set(tmp_path))
    account = project.account()
    answer = dpstream.count(
        asking.visits(), unit="uid", key="page", epsilon=1.0, max_keys=2, max_rows=2,
        account=account,
    )  # fmt: skip
    assert answer.charged and len(asking.charges(tmp_path)) == 1
    with pytest.raises(UsageError):
        project.account("none")


def test_a_setting_moves_a_place(tmp_path: Path) -> None:
    job = a_job(tmp_path)
    moved = dpstream.project(
        tmp_path, settings=[f"job.{job.name}.store=sqlite:{tmp_path / 'moved.db'}"]
    )
    assert moved.job().state.path == tmp_path / "moved.db"
    assert moved.job().plan.hash == job.plan.hash
