"""The job file of a tuning: rewritten with its comments, read back as what was chosen."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dpstream.accounting.errors import UsageError
from dpstream.accounting.plan.fields import Aggregate
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.jobs.tables import TuningConfig
from dpstream.pipelines.tuning.file import base_job, check_out, in_column_units, render, write


@pytest.mark.parametrize("grid", [1.0, 0.1, 0.01, 0.3, 1e-6, 0.7])
@pytest.mark.parametrize(
    ("low", "high"),  # the last: the nearest float lies inside
    [(-7, 13), (0, 1), (-3_333_333, 10**7), (-835_840_887_170_031, 902_871_036_464_559)],
)
def test_clamps_snap_back_to_their_grid_units(grid: float, low: int, high: int) -> None:
    bounds = in_column_units(low, high, grid)
    made = Aggregate("x", "sum", "x", clamp=bounds, grid=grid)
    assert made.grid_bounds() == (low, high)


def test_comments_stay_and_figures_are_written(make_job: Callable[..., Job]) -> None:
    path = make_job().path
    path.write_text("# mine\n" + path.read_text())
    grid = base_job(path, True)[0].plan.aggregates[1].grid
    low, high = 0, round(5 / grid)
    text = render(path, 9, (("total", low, high),), TuningConfig("proxy", clamps=("total",)))
    assert text.startswith("# mine\n") and "contributions = 9" in text
    assert "clamp = [0, 5]" in text and 'how = "proxy"' in text


def test_missing_clamps_come_from_a_declared_range(make_job: Callable[..., Job]) -> None:
    path = make_job().path
    assert base_job(path, False)[1] == () and base_job(path, True)[1] == ("total",)
    assert base_job(path, True)[0].plan.privacy.contributions == 1
    path.write_text(path.read_text().replace("clamp = [0, 10]\n", ""))
    with pytest.raises(UsageError) as error:
        base_job(path, False)
    assert error.value.field == "choice.range.total"


def test_a_new_file_loses_nothing(tmp_path: Path) -> None:
    job, out = tmp_path / "job.toml", tmp_path / "out.toml"
    job.write_text("x")
    check_out(job, out, existing=False)
    write(out, "one")
    write(out, "one")
    check_out(job, out, existing=True)
    for refused in (
        lambda: write(out, "two"),
        lambda: check_out(job, out, False),
        lambda: check_out(job, job, True),
        lambda: check_out(job, tmp_path / "other" / "out.toml", False),
    ):
        with pytest.raises(UsageError) as error:
            refused()
        assert error.value.field == "--out"
    assert out.read_text() == "one"
