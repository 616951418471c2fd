"""The job of a tuning: read before it is chosen, and written as a new job with its comments."""

from pathlib import Path
from typing import Any

import pytest

from dpstream.accounting.errors import DpstreamError, PolicyError, UsageError
from dpstream.accounting.fields import Aggregate
from dpstream.pipelines.jobs.job import load_job
from dpstream.pipelines.project.copying import append_section, check_new_name
from dpstream.pipelines.project.job_section import ChoiceSection
from dpstream.pipelines.project.project import Project, load_project
from dpstream.pipelines.tuning.ask import (
    Request,
    ask,
    base_job,
    in_column_units,
    render,
    scale_text,
)
from tests.projects import write_project

BOUNDS = ", bounds = [0, 120]"
MEAN = f'aggregate.seconds = {{ kind = "mean", column = "seconds"{BOUNDS} }}\n'


@pytest.mark.parametrize("grid", [1.0, 0.1, 0.01, 0.3, 1e-6, 0.7, 0.25, 2.0**-24, 2.0**-30])
@pytest.mark.parametrize(
    ("low", "high"),  # the last: the nearest float lies inside
    [(-7, 13), (0, 1), (-3_333_333, 10**7), (-835_840_887_170_031, 902_871_036_464_559)],
)
def test_bounds_snap_back_to_their_grid_units(grid: float, low: int, high: int) -> None:
    bounds = in_column_units(low, high, grid)
    made = Aggregate("x", "sum", "x", bounds=bounds, grid=grid)
    assert made.grid_bounds() == (low, high)


@pytest.mark.parametrize("layout", ["lines", "tables", "inline"])
def test_what_was_chosen_is_read_back_however_the_job_is_written(
    layout: str, tmp_path: Path
) -> None:
    """The file keeps every byte, the new section the comments; store and folder are its own."""
    changes = {
        "lines": [("key = ", "# mine\nkey = ")],
        "tables": [
            ('aggregate.views = { kind = "count" }\n', "# mine\n"),
            (MEAN, ""),
            ('sink = { kind = "parquet", path = "releases" }\n',
             '[job.daily.sink]\nkind = "parquet"\npath = "releases"\n'
             '[job.daily.aggregate.views]\nkind = "count"\n'
             '[job.daily.aggregate.seconds]\nkind = "mean"\ncolumn = "seconds"\n'),
        ],
        "inline": [("contributions = 8\n", 'contributions = 8  # mine\nstore = "a/daily.db"\n')],
    }[layout]  # fmt: skip
    path = write_project(tmp_path, *changes)
    before = path.read_bytes()
    choice = ChoiceSection("proxy", bounds=("seconds",))
    project = load_project(path)
    text, section = render(project, "daily", "chosen", 9, (("seconds", 0, 5),), choice)
    append_section(project, "chosen", text, section, "--as")
    assert path.read_bytes().startswith(before) and section.count("# mine") == 1
    made, old = load_job(path, "chosen"), load_project(path).sections.job["daily"]
    assert made.plan.privacy.contributions == 9 and made.tuning == choice
    assert made.plan.aggregates[1].bounds == (0, 5)
    assert made.state.store == f"sqlite:{tmp_path}/chosen.store.db"
    assert made.sink.path == f"{tmp_path}/releases-chosen" and old["contributions"] == 8


def test_missing_bounds_come_from_a_declared_range(tmp_path: Path) -> None:
    project = load_project(write_project(tmp_path))
    assert base_job(project, "daily", False)[1] == ()
    job, names = base_job(project, "daily", True)
    assert names == ("seconds",) and job.plan.privacy.contributions == 1
    assert project.sections.job["daily"]["contributions"] == 8, "the project stays as it is"
    missing = load_project(write_project(tmp_path, (BOUNDS, "")))
    with pytest.raises(UsageError) as error:
        base_job(missing, "daily", False)
    assert error.value.field == "job.daily.choice.range.seconds"


def test_a_new_job_takes_no_others_place(tmp_path: Path) -> None:
    project = load_project(path := write_project(tmp_path))
    check_new_name(project, "new", "--as")
    for name in ("daily", "a b"):
        with pytest.raises(UsageError, match="--as"):
            check_new_name(project, name, "--as")
    choice = ChoiceSection("proxy")
    for _ in range(2):  # the same again is left alone
        text, section = render(load_project(path), "daily", "new", 9, (), choice)
        append_section(load_project(path), "new", text, section, "--as")
    before = path.read_bytes()
    text, section = render(load_project(path), "daily", "new", 7, (), choice)
    with pytest.raises(UsageError, match="says otherwise"):
        append_section(load_project(path), "new", text, section, "--as")
    assert path.read_bytes() == before


def project_in(folder: Path) -> Project:
    """A project with a job over a week, without an account."""
    return load_project(write_project(folder))


@pytest.mark.parametrize(
    ("given", "kind", "field"),
    [({}, UsageError, "--first"), ({"first": "2h"}, UsageError, "--epsilon"),
     ({"first": "2h", "epsilon": 1.0}, PolicyError, "account"),
     ({"proxy": "/x/*.csv", "epsilon": 1.0}, UsageError, "--proxy"),
     ({"proxy": "/x/*.csv", "first": "8d"}, UsageError, "--first"),
     ({"proxy": "/x/*.csv", "quantile": 0.5, "cover": 0.5}, UsageError, "--cover"),
     ({"proxy": "/x/*.csv", "scale": 0.0}, UsageError, "--scale")],
)  # fmt: skip
def test_what_is_refused(
    given: dict[str, Any], kind: type[DpstreamError], field: str, tmp_path: Path
) -> None:
    project = project_in(tmp_path)
    with pytest.raises(kind) as error:
        ask(Request(project, "daily", "new", **given))
    assert error.value.field == field


def test_other_data_costs_nothing_and_the_digest_is_the_questions(tmp_path: Path) -> None:
    project = project_in(tmp_path)
    before = project.path.read_bytes()
    request = Request(project, "daily", "new", proxy="/x/*.csv")
    question, description = ask(request), ask(request).describe()
    assert (description["how"], description["epsilon"], description["histograms"]) == (
        "proxy",
        None,
        [],
    )
    assert question.digest == ask(request).digest and len(question.digest) == 32
    assert question.digest != ask(request._replace(quantile=0.5)).digest
    assert question.digest == ask(request._replace(new="other")).digest
    assert project.path.read_bytes() == before


def test_a_factor_is_exact() -> None:
    from fractions import Fraction

    assert (scale_text(None, Fraction(7, 3)), scale_text(0.1, Fraction(1))) == ("7/3", "1/10")
