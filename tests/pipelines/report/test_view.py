"""Texts of the page: what columns mean, what pictures say (pages are in test_report).

Axes of values over time: bands are cut at what a column can be, values never.

Words of the report: any key is one safe line, and settings show nothing secret.

The table of all keys: its rows, its first rows without a script, and what it says it holds.
"""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dpstream.accounting.arrays import Float64
from dpstream.accounting.fields import Aggregate
from dpstream.accounting.weights import SelectionWeights
from dpstream.pipelines.connectors.final import TOO_UNCERTAIN, too_uncertain
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.render.charts import Picture
from dpstream.pipelines.report.data import collect, gathered, inventory, value_schema
from dpstream.pipelines.report.text import (
    FIRST_ROWS,
    KEY_TEXT,
    Column,
    instant,
    key_label,
    plain,
    public_source,
    rows_text,
    settings,
    stamp,
    table,
    visible,
    window_name,
    with_error,
)
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
from tests.pipelines.sql.shop import with_text
from tests.reports import edit, put, row

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


def places_of(picture: Picture) -> Float64:
    """Where the points of a picture that can be pointed at lie."""
    return np.array([place for *place, _ in json.loads(picture.tips)])


def days(count: int) -> list[datetime]:
    return [datetime(2024, 1, 1, tzinfo=UTC) + timedelta(days=n) for n in range(count)]


@pytest.mark.parametrize(("count", "joined"), [(1, True), (5, True), (5, False), (100, False)])
def test_points_can_be_pointed_at(count: int, joined: bool) -> None:
    values = np.linspace(10.0, 20.0, count)
    values[count // 2] = NAN if count > 1 else 10.0
    line = Series(days(count), values, np.ones(count))
    drawn = max(count - 1, 1)
    words = "Values of a key by window"
    picture = picture_over_time("x", line, Bounds(0.0), words, joined, ["a"] * drawn)
    places = places_of(picture)
    assert len(places) == drawn
    assert ((places > 0) & (places < 1)).all()
    # From left to right, and the greater the higher.
    assert (np.diff(places[:, 0]) > 0).all() and (np.diff(places[:, 1]) < 0).all()
    assert picture.svg.startswith('<svg role="img"') and "Values of a key" in picture.svg


def test_panels_of_one_page_have_the_same_times() -> None:
    late = np.array([NAN, NAN, NAN, 11.0, 12.0])
    pictures = [
        picture_over_time(
            "x", Series(days(5), values, np.ones(5)), Bounds(0.0), "words", False,
            ["a"] * int(np.isfinite(values).sum()),
        )
        for values in (np.arange(10.0, 15.0), late)
    ]  # fmt: skip
    all_days, last_days = map(places_of, pictures)
    np.testing.assert_allclose(last_days[:, 0], all_days[3:, 0], atol=0.03)  # widths of labels
    assert last_days[0, 0] > 0.6


def test_what_columns_mean(make_job: Callable[..., Job]) -> None:
    count, total = make_job().plan.aggregates
    assert meaning(count) == "number of records"
    assert meaning(total) == "sum of value, bounded to 0 … 10"


def test_guarantees_of_many_periods_are_the_first_and_the_last() -> None:
    rows = [{"periods": float(n)} for n in range(9)]
    assert first_and_last(rows[:1]) == [] and first_and_last(rows[:5]) == rows[:5]
    assert first_and_last(rows) == [*rows[:4], rows[8]]


def test_a_scatter_says_its_numbers() -> None:
    assert scatter_of("n", np.zeros(0), np.zeros(0)) is None
    chart = scatter_of("n", np.array([10.0]), np.array([5.0]))
    assert chart is not None and "1 released values" in chart.text and "0.5" in chart.text


def test_a_line_says_its_points(make_job: Callable[..., Job]) -> None:
    count = make_job().plan.aggregates[0]
    when = [datetime(2024, 1, n, tzinfo=UTC) for n in (1, 2, 3)]
    values, sds = np.array([10.0, np.nan, 30.0]), np.array([1.0, 1.0, 2.0])
    chart = over_time("x", Series(when, values, sds), ["one", "two", "three"], count, "Words")
    assert chart is not None and chart.text == "Words: 2 values, the last 30 ± 3.92"
    assert "one: 10 ± 1.96" in chart.tips and "three: 30" in chart.tips
    assert "two" not in chart.tips
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


@pytest.mark.parametrize(
    ("text", "rendered"),
    [
        ("abc", "abc"),
        ("a\nb", "a\\u000ab"),
        ("\u202ex", "\\u202ex"),
        ("x" * 6, "xxxxx… (6 characters)"),
    ],
)
def test_any_text_is_one_line(text: str, rendered: str) -> None:
    assert visible(text, 5) == rendered


def test_keys_of_several_columns() -> None:
    row = {"a": b"\x00\xff", "b": "", "c": 7}
    assert key_label(row, ["a", "b", "c"]) == "0x00ff · (empty text) · 7"


@pytest.mark.parametrize(
    ("micros", "text"),
    [(0, "1970-01-01 UTC"), (60_000_000, "1970-01-01 00:01 UTC"),
     (1_000_000, "1970-01-01 00:00:01 UTC"), (1 << 62, f"{1 << 62} µs")],
)  # fmt: skip
def test_instants(micros: int, text: str) -> None:
    assert instant(micros) == text


def test_settings_have_no_path_and_no_key(make_job: Callable[..., Job]) -> None:
    job = make_job()
    rows = dict(settings(job, job.plan))
    assert rows["contributions"] == "4" and rows["start"] == "2024-01-01 UTC"
    assert rows["secret"].startswith("INSECURE") and rows["aggregate total: kind"] == "sum"
    text = " ".join(rows.values())
    assert "0f0f" not in text and str(job.state.path) not in text
    assert window_name(job.plan.timeline, 0) == "2024-01-01 UTC to 2024-01-02 UTC"


def test_what_a_job_leaves_open_is_shown_as_its_run_has_it(make_job: Callable[..., Job]) -> None:
    job, weights = make_job(), SelectionWeights(3.0, 0.5)
    privacy = msgspec.structs.replace(job.plan.privacy, weights=weights)
    timeline = job.plan.timeline
    assert timeline.end is not None
    longer = msgspec.structs.replace(timeline, end=timeline.end + timeline.window)
    now = msgspec.structs.replace(job.plan, privacy=privacy, timeline=longer)
    other = msgspec.structs.replace(
        now, privacy=msgspec.structs.replace(privacy, skip=False), remember="never"
    )
    for plan, earlier_keys, skip in (
        (now, "published from the window's start, for the run", "yes"),
        (other, "not known", "no"),
    ):
        rows = dict(settings(job, plan))
        assert rows["keys of earlier windows"] == earlier_keys and rows["mechanism.skip"] == skip
        assert "privacy.usual_weights" not in rows and "3" in rows["mechanism.weights"]


def test_a_query_is_shown_by_its_digest_alone(tmp_path: Path) -> None:
    job = with_text(tmp_path, "SELECT page, n AS x FROM visits WHERE page <> 'Quitte'")
    rows = dict(settings(job, job.plan))
    assert rows["query of rows, digest"] == job.plan.query and "Quitte" not in str(rows)


def test_times_for_programs() -> None:
    assert stamp(0) == "1970-01-01T00:00:00Z" and stamp(1_500_000) == "1970-01-01T00:00:01.500000Z"
    assert stamp(1 << 62) == str(1 << 62)


def test_a_column_as_it_is() -> None:
    assert plain("") == "" and plain(b"\x00") == "0x00" and plain("a\n") == "a\\u000a"


@pytest.mark.parametrize(
    ("name", "rendered"),
    [
        ("csv:/home/somebody/private/week.csv", "csv:week.csv"),
        ("parquet:../in/*.parquet", "parquet:*.parquet"),
        ("folder:gs://bucket/of/somebody/", "folder:somebody"),
        ("csv:C:\\Users\\somebody\\week.csv", "csv:week.csv"),
        ("kafka:visits", "kafka:visits"),
        ("pubsub:projects/p/subscriptions/s", "pubsub:projects/p/subscriptions/s"),
    ],
)
def test_sources_without_their_paths(name: str, rendered: str) -> None:
    assert public_source(name) == rendered


MakeJob = Callable[..., Job]
COLUMNS = [Column(name, name, name, f"{name}_sd") for name in ("records", "total")]


def test_values_with_their_errors() -> None:
    assert with_error(None, 1.0) == with_error(1.0, None) == with_error(np.nan, 1.0) == "–"
    assert with_error(100.0, 10.0) == "100 ± 19.6"


@pytest.mark.parametrize(
    ("value", "sd", "hidden"),
    [(10.0, 3.0, False), (10.0, 3.001, True), (0.0, 0.0, True), (-100.0, 1.0, True)],
)
def test_values_that_are_withheld(value: float, sd: float, hidden: bool) -> None:
    """An sd of 30% of a value is shown, a larger one is not; nor is what is not above zero."""
    assert too_uncertain(np.array([value]), np.array([sd]), 0.3).tolist() == [hidden]
    assert too_uncertain(np.array([value]), np.array([sd]), None).tolist() == [False]
    assert (with_error(value, sd, 0.3) == TOO_UNCERTAIN) == hidden
    assert with_error(value, sd) != TOO_UNCERTAIN and with_error(None, sd, 0.3) == "–"


def test_rows_of_a_run(make_job: MakeJob) -> None:
    job = edit(make_job(), ('end = "2024-01-02', 'end = "2024-01-04'))
    put(job, 4, [row("a", 1234.56789), row("b", 5.0)], window=0)
    put(job, 4, [{**row("a", 20.0), "total": None}], window=2)
    keys = collect(job.plan, inventory(job)).all_keys
    key_table = table(job.plan.key, keys, job.plan.timeline, COLUMNS, "keys.csv")
    data = key_table.data
    assert data["keys"] == [("a",), ("b",)] and data["names"] == ["key"] and data["texts"] == [True]
    assert data["key"] == [0, 0, 1] and data["window"] == [0, 1, 0]
    assert data["starts"] == ["2024-01-01 UTC", "2024-01-03 UTC"]
    assert data["ends"] == ["2024-01-02 UTC", "2024-01-04 UTC"]
    assert data["from"][1] == "2024-01-03T00:00:00Z" and data["to"][0] == "2024-01-02T00:00:00Z"
    assert data["columns"][0]["values"] == [1234.5679, 20.0, 5.0]
    assert data["columns"][1] == {
        "title": "total", "values": [3703.7037, None, 15.0], "sds": [10.0, 10.0, 10.0],
    }  # fmt: skip
    assert key_table.first[0] == (["a"], "2024-01-03 UTC", ["20 ± 9.8", "–"])
    assert [key for key, _, _ in key_table.first] == [["a"], ["b"]]
    assert key_table.caption == "All 2 rows with all their 3 values."


def test_texts_are_cut_and_rows_in_the_page_few(make_job: MakeJob) -> None:
    job = make_job()
    put(job, 1, [row(f"{i:03}" + "k" * 300, 10.0) for i in range(40)])
    keys = collect(job.plan, inventory(job)).all_keys
    key_table = table(job.plan.key, keys, job.plan.timeline, COLUMNS, "keys.csv")
    assert len(key_table.first) == FIRST_ROWS and len(key_table.data["keys"]) == 40
    assert all(len(text) < KEY_TEXT + 30 for [text] in key_table.data["keys"])
    assert key_table.data["keys"][0][0].endswith("(303 characters)")


def test_an_empty_key_is_shown_by_name_and_saved_empty(make_job: MakeJob) -> None:
    job = make_job()
    put(job, 1, [row("", 50.0)])
    keys = collect(job.plan, inventory(job)).all_keys
    key_table = table(job.plan.key, keys, job.plan.timeline, COLUMNS, "keys.csv")
    assert key_table.data["keys"] == [("",)] and key_table.first[0][0] == ["(empty text)"]


def test_what_is_left_out_is_said(make_job: MakeJob) -> None:
    job = make_job()
    put(job, 4, [row(f"{i}", 10.0 + i) for i in range(10)])
    group = inventory(job).releases

    def parts() -> list[tuple[int, object]]:
        from dpstream.pipelines.report.data import newest

        return [(0, part) for part in newest(job.plan, group)]

    keys = gathered(parts(), parts(), ["key"], "records", value_schema(job.plan), 4)  # type: ignore[arg-type]
    words = rows_text(keys)
    assert "The 4 busiest of 10 rows" in words and "4 of 10 values" in words
    assert "at least" not in words and "at least 10 rows" in rows_text(keys._replace(exact=False))
