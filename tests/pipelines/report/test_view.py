"""Texts of the page: what columns mean, what pictures say (pages are in test_report)."""

from collections.abc import Callable
from datetime import UTC, datetime

import numpy as np

from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.report.series import Series
from dpstream.pipelines.report.view import _ends, _scatter, meaning, over_time


def test_what_columns_mean(make_job: Callable[..., Job]) -> None:
    count, total = make_job().plan.aggregates
    assert meaning(count) == "count of records"
    assert meaning(total) == "sum of value, clamped to 0 … 10"


def test_guarantees_of_many_periods_are_the_first_and_the_last() -> None:
    rows = [{"periods": float(n)} for n in range(9)]
    assert _ends(rows[:1]) == [] and _ends(rows[:5]) == rows[:5]
    assert _ends(rows) == [*rows[:4], rows[8]]


def test_a_scatter_says_its_numbers() -> None:
    assert _scatter("n", np.zeros(0), np.zeros(0)) is None
    chart = _scatter("n", np.array([10.0]), np.array([5.0]))
    assert chart is not None and "1 released values" in chart["text"] and "0.5" in chart["text"]


def test_a_line_says_its_points(make_job: Callable[..., Job]) -> None:
    count = make_job().plan.aggregates[0]
    when = [datetime(2024, 1, n, tzinfo=UTC) for n in (1, 2, 3)]
    values, sds = np.array([10.0, np.nan, 30.0]), np.array([1.0, 1.0, 2.0])
    chart = over_time("x", Series(when, values, sds), ["one", "two", "three"], count, "Words")
    assert chart is not None and chart["text"] == "Words: 2 values, the last 30 ± 3.92"
    assert "one: 10 ± 1.96" in chart["tips"] and "three: 30" in chart["tips"]
    assert "two" not in chart["tips"]
    nothing = Series(when, np.full(3, np.nan), sds)
    assert over_time("x", nothing, ["one", "two", "three"], count, "Words") is None
