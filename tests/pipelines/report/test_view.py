"""Texts of the page: values with their errors, what columns mean (pages are in test_report)."""

from collections.abc import Callable

import numpy as np

from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.report.view import _meaning, _noise_chart, _scatter, _some, _with_error


def test_values_with_their_errors() -> None:
    assert _with_error(None, 1.0) == _with_error(1.0, None) == "–"
    assert _with_error(100.0, 10.0) == "100 ± 19.6"


def test_what_columns_mean(make_job: Callable[..., Job]) -> None:
    count, total = make_job().plan.aggregates
    assert _meaning(count) == "count of records"
    assert _meaning(total) == "sum of value, clamped to 0 … 10"


def test_guarantees_of_many_periods_are_the_first_and_the_last() -> None:
    rows = [{"periods": float(n)} for n in range(9)]
    assert _some(rows[:1]) == [] and _some(rows[:5]) == rows[:5]
    assert _some(rows) == [*rows[:4], rows[8]]


def test_pictures_say_their_numbers() -> None:
    chart = _noise_chart("n", "Title", "up", [("sd", [2.0, 3.0])])
    assert chart["legend"] == [("s0", "sd")]
    assert "sd from 2 at the first to 3 at the last" in chart["words"]
    assert _scatter("n", np.zeros(0), np.zeros(0)) is None
    shown = _scatter("n", np.array([10.0]), np.array([5.0]))
    assert shown is not None and "1 released values" in shown["words"] and "0.5" in shown["words"]
