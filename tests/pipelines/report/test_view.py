"""Texts of the page: what columns mean, what pictures say (pages are in test_report).

Axes of values over time: bands are cut at what a column can be, values never.
"""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from dpstream.accounting.fields import Aggregate
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.report.view import (
    Bounds,
    Series,
    bounds_of,
    chart_of_lines,
    first_and_last,
    limits,
    meaning,
    noise,
    over_time,
    picture_over_time,
    scatter_of,
    unbroken,
)

NAN = float("nan")


def test_what_columns_can_be() -> None:
    mean = Aggregate("m", "mean", "v", (-60.0, 60.0))
    assert bounds_of(mean) == Bounds(-60.0, 60.0)
    assert bounds_of(Aggregate("n", "count")) == bounds_of(Aggregate("u", "units")) == Bounds(0.0)
    assert bounds_of(Aggregate("s", "sum", "v", (0.0, 9.0))) == Bounds(0.0)
    assert bounds_of(Aggregate("s", "sum", "v", (-9.0, 0.0))) == Bounds(None, 0.0)
    assert bounds_of(Aggregate("s", "sum", "v", (-9.0, 9.0))) == Bounds()


def test_a_noisy_mean_stays_within_its_clamp() -> None:
    values, reach = np.array([10.0, 20.0]), np.array([4000.0, 4000.0])
    assert limits(values, reach, Bounds(-60.0, 60.0)) == (-60.0, 60.0)
    # One of many does not decide; but no value is ever cut.
    values, reach = np.full(50, 10.0), np.full(50, 2.0)
    values[7], reach[7] = 40.0, 4000.0
    low, high = limits(values, reach, Bounds(-60.0, 60.0))
    assert 4.0 < low < 8.0 and 40.0 < high < 43.0
    values, reach = np.array([10.0, 20.0]), np.array([1.0, 1.0])
    low, high = limits(values, reach, Bounds(-60.0, 60.0))
    assert 8.0 < low < 9.0 and 21.0 < high < 22.0  # no wider than needed


def test_a_count_begins_at_nothing_but_shows_what_noise_made_negative() -> None:
    low, high = limits(np.array([50.0]), np.array([80.0]), Bounds(0.0))
    assert low == 0.0 and high > 130.0 - 5.0
    low, _ = limits(np.array([50.0, -7.0]), np.array([80.0, 80.0]), Bounds(0.0))
    assert -30.0 < low < -7.0
    _, high = limits(np.array([-50.0]), np.array([80.0]), Bounds(None, 0.0))
    assert high == 0.0
    low, high = limits(np.array([5.0]), np.array([0.0]), Bounds())
    assert low < 5.0 < high


@pytest.mark.parametrize(
    ("values", "without_gap"),
    [
        ([1, 2, 3], True), ([NAN, NAN, 1, 2, 3], True), ([1, 2], False), ([NAN, 1, 2], False),
        ([1, NAN, 2, 3], False), ([1, 2, 3, NAN], False), ([NAN, NAN, NAN], False),
    ],
)  # fmt: skip
def test_a_series_without_gaps_is_joined(values: list[float], without_gap: bool) -> None:
    line = Series(days(len(values)), np.array(values, float), np.ones(len(values)))
    assert unbroken(line.values) == without_gap
    if np.isfinite(line.values).any():
        drawn = picture_over_time("c", line, Bounds(0.0), "words", joined=False).svg
        again = picture_over_time("c", line, Bounds(0.0), "words", joined=False).svg
        assert drawn == again and ("stroke-opacity: 0.5" in drawn) == without_gap


def days(count: int) -> list[datetime]:
    return [datetime(2024, 1, 1, tzinfo=UTC) + timedelta(days=n) for n in range(count)]


@pytest.mark.parametrize(("count", "joined"), [(1, True), (5, True), (5, False), (100, False)])
def test_points_can_be_pointed_at(count: int, joined: bool) -> None:
    values = np.linspace(10.0, 20.0, count)
    values[count // 2] = NAN if count > 1 else 10.0
    line = Series(days(count), values, np.ones(count))
    picture = picture_over_time("x", line, Bounds(0.0), "Values of a key by window", joined)
    places = picture.places
    assert places is not None and len(places) == (count - 1 if count > 1 else 1)
    assert ((places > 0) & (places < 1)).all()
    # From left to right, and the greater the higher.
    assert (np.diff(places[:, 0]) > 0).all() and (np.diff(places[:, 1]) < 0).all()
    assert picture.svg.startswith('<svg role="img"') and "Values of a key" in picture.svg


def test_panels_of_one_page_have_the_same_times() -> None:
    late = np.array([NAN, NAN, NAN, 11.0, 12.0])
    pictures = [
        picture_over_time(
            "x", Series(days(5), values, np.ones(5)), Bounds(0.0), "words", joined=False
        )
        for values in (np.arange(10.0, 15.0), late)
    ]
    all_days, last_days = (picture.places for picture in pictures)
    assert all_days is not None and last_days is not None
    np.testing.assert_allclose(last_days[:, 0], all_days[3:, 0], atol=0.03)  # widths of labels
    assert last_days[0, 0] > 0.6


def test_what_columns_mean(make_job: Callable[..., Job]) -> None:
    count, total = make_job().plan.aggregates
    assert meaning(count) == "count of records"
    assert meaning(total) == "sum of value, bounded to 0 … 10"


def test_guarantees_of_many_periods_are_the_first_and_the_last() -> None:
    rows = [{"periods": float(n)} for n in range(9)]
    assert first_and_last(rows[:1]) == [] and first_and_last(rows[:5]) == rows[:5]
    assert first_and_last(rows) == [*rows[:4], rows[8]]


def test_a_scatter_says_its_numbers() -> None:
    assert scatter_of("n", np.zeros(0), np.zeros(0)) is None
    chart = scatter_of("n", np.array([10.0]), np.array([5.0]))
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


FIGURES = {
    "streams": [
        {"name": "selection", "sd": [1.0, 2.0, 3.0]},
        {"name": "count", "sd": [4.0, 5.0, 6.0]},
    ],
    "tau": [7.0, 8.0, 9.0],
}


def test_pictures_say_their_numbers() -> None:
    chart = chart_of_lines("n", "Title", "up", [("sd", [2.0, 3.0])])
    assert chart["legend"] == [("s0", "sd")]
    assert "sd from 2 at the first to 3 at the last" in chart["text"]


def test_selection_and_values_apart() -> None:
    selection, values = noise(FIGURES)
    assert [name for _, name in selection["legend"]] == [
        "threshold tau", "sd of the selection's noise",
    ]  # fmt: skip
    assert [name for _, name in values["legend"]] == ["sd of count"]
    public = {**FIGURES, "tau": None}
    [only] = noise(public)
    assert [name for _, name in only["legend"]] == ["sd of selection", "sd of count"]
