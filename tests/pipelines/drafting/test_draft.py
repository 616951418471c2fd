"""The text of a first job: planned as it stands, whatever its columns are called."""

from pathlib import Path
from typing import Any

import pytest

from dpstream.accounting.fields import Field
from dpstream.pipelines.drafting.columns import DataFile
from dpstream.pipelines.drafting.draft import (
    Answers,
    bounded,
    checked,
    grid_of,
    project_text,
    source_path,
    with_covers,
)
from dpstream.pipelines.project.text import Windows
from tests.golden.refusals import Refused
from tests.pipelines.drafting import begun

OUT = begun(Path("/jobs"))
WEEKS = Windows("2024-01-01T00:00:00Z", "2024-02-05T00:00:00Z", "7d")
ANSWERS = Answers(
    file=DataFile("/jobs/data/a [1].csv", Path("/jobs/data/a [1].csv"), "csv", None),
    unit=Field("who", "int"), key=(Field("page"), Field("lang")), time="at", values=(),
    windows=WEEKS, every=None, epsilon=1.0, delta=1e-8, contributions=10,
)  # fmt: skip


def test_a_job_says_what_was_answered() -> None:
    job = checked(project_text(ANSWERS, OUT), OUT)
    plan = job.plan
    assert (plan.unit, plan.key, plan.event_time) == (ANSWERS.unit, ANSWERS.key, "at")
    assert plan.timeline.triggers == 1 and plan.timeline.windows == 5
    assert (plan.privacy.epsilon, plan.privacy.delta, plan.privacy.contributions) == (1, 1e-8, 10)
    assert job.secret.file == "/jobs/visits.secret" and job.source.kind == "csv"
    assert job.ledger is not None and job.ledger.path == "/jobs/visits.account.db"


def test_what_is_suggested_in_comments_works() -> None:
    text = project_text(ANSWERS, OUT)
    assert 'covers = "lifetime"' in text and "'1d' also shows it grow" in text
    text = text.replace('covers = "lifetime"', 'covers = "window"').replace(
        'release_every = "7d"', 'release_every = "1d"'
    )
    plan = checked(text, OUT).plan
    assert plan.timeline.period == plan.timeline.window and plan.timeline.triggers == 7


def test_a_second_job_is_added_to_what_is_there() -> None:
    before = "# ours\n" + project_text(ANSWERS, OUT) + "\n\n"
    second = OUT._replace(before=before, job="hourly", new_data_set=None, new_table=False)
    text = project_text(ANSWERS._replace(epsilon=0.5), second)
    assert text.startswith(before.rstrip("\n")) and text.count("[table.visits]") == 1
    first, other = checked(text, OUT), checked(text, second)
    assert (first.plan.privacy.epsilon, other.plan.privacy.epsilon) == (1.0, 0.5)
    assert first.state.store != other.state.store and first.sink.path != other.sink.path
    assert first.ledger == other.ledger


def test_odd_names_are_written_whole() -> None:
    odd = 'a"b\\c\n\x7f #é'
    replies = ANSWERS._replace(unit=Field(odd), key=(Field("records"),), values=(
        bounded("records", 0, 1), bounded("count", -0.5, 0.25), bounded("_x", 0, 1e6)))  # fmt: skip
    plan = checked(project_text(replies, OUT), OUT).plan
    assert plan.unit.column == odd
    assert [a.name for a in plan.aggregates] == [
        "count", "mean_records", "mean_count", "x",
    ]  # fmt: skip
    assert [a.column for a in plan.aggregates][1:] == ["records", "count", "_x"]
    assert plan.aggregates[2].bounds == (-0.5, 0.25)


def test_a_file_is_no_pattern_and_a_pattern_is(tmp_path: Path) -> None:
    (tmp_path / "a[1].csv").touch()
    assert source_path(str(tmp_path / "a[1].csv"), tmp_path) == "a[[]1].csv"
    assert source_path(str(tmp_path / "*.csv"), tmp_path / "jobs") == "../*.csv"


@pytest.mark.parametrize(
    ("width", "grid"), [(100, 1), (120, 1), (1, 0.01), (0.5, 0.001), (1e6, 1e4)]
)
def test_the_grid_fits_the_bounds(width: float, grid: float) -> None:
    assert grid_of(0, width) == grid


@pytest.mark.parametrize("bounds", [(1, 1), (5, 0), (float("nan"), 1), (0, float("inf"))])
def test_what_are_no_bounds(bounds: tuple[float, float], refused: Refused) -> None:
    refused(bounded, "x", *bounds)


@pytest.mark.parametrize(
    "change",
    [{"epsilon": -1.0}, {"epsilon": float("nan")},
     {"epsilon": 2000.0}, {"delta": 1.0}, {"delta": 0.0},
     {"contributions": 0}, {"every": "2d"},
     {"every": "soon"}, {"key": (Field("_page"),)},
     {"windows": WEEKS._replace(length="1us")}],
)  # fmt: skip
def test_what_a_plan_would_refuse_is_refused_by_its_flag(
    change: dict[str, Any], refused: Refused
) -> None:
    refused(lambda: checked(project_text(ANSWERS._replace(**change), OUT), OUT))


@pytest.mark.parametrize(
    ("covers", "period"),
    [("Window", "7d"), (" Lifetime ", None), ("14d", "14d"), ("10d", ""), ("everything", "")],
)
def test_what_the_budget_covers(covers: str, period: str | None, refused: Refused) -> None:
    """A window, everything, or a length of whole windows."""
    if period != "":
        assert with_covers(ANSWERS, OUT, covers).period == period
        return
    refused(with_covers, ANSWERS, OUT, covers)
