"""The demo's truth: clamped delays, the first flights of each aircraft; what is there stays.

The demo's page and chart: whole, without script or path, axes within the clamp.
"""

from datetime import UTC, datetime, timedelta
from functools import cache
from importlib import resources
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dpstream.accounting.budget.allocation import allocate
from dpstream.pipelines import demo
from dpstream.pipelines.demo import (
    PUBLIC_ONLY,
    chart,
    distances,
    joined,
    page,
    prepare,
    read_flights,
    truth,
)
from dpstream.pipelines.formats.encodings import read_releases
from dpstream.pipelines.jobs.job import job_in
from dpstream.pipelines.project.project import decode_project
from dpstream.pipelines.stream.run import run_job
from tests.reports import Page

KEYS = (("EWR", "UA"), ("JFK", "B6"))
START = datetime(2013, 1, 1, 5, tzinfo=UTC)


def finals() -> pa.Table:
    """Releases beside the truth, a row a key and week, the delay's noise far beyond its clamp."""
    rng = np.random.default_rng(0)
    rows = [
        {"window_start": START + timedelta(days=7 * week), "trigger_time": START,
         "origin": origin, "carrier": carrier, "flights": 100.0 + rng.normal(0, 9),
         "flights_sd": 9.0, "mean_delay": float(rng.uniform(-20, 40)), "mean_delay_sd": 900.0,
         "true_flights": 100, "true_delay": 7.0, "counted_flights": 90}
        for week in range(40)
        for origin, carrier in KEYS
    ]  # fmt: skip
    return pa.Table.from_pylist(rows)


@cache
def demo_page() -> str:
    """A page of the demo's own plan."""
    text = (
        resources.files("dpstream.pipelines").joinpath("examples/flights.toml").read_text("utf-8")
    )
    plan = job_in(decode_project(text.encode(), Path("/nowhere/dpstream.toml"))).plan
    summary = "Released: 80 rows.\nMedian distance: 21."
    return page(plan, allocate(plan), finals(), finals(), KEYS, summary)


def test_page() -> None:
    text = demo_page()
    document = Page(text)
    assert document.open == [] and not document.every("script") and not document.every("img")
    assert "http" not in text.replace("http-equiv", "") and "nowhere" not in text
    assert len(document.every("svg")) == 2 * len(KEYS) + 1
    ids = [attrs["id"] for _, attrs in document.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert PUBLIC_ONLY in document.text and "Median distance: 21." in document.text
    assert "(6, 1e-09)-differential privacy" in document.text and "What is promised" in document.of(
        "h2"
    )


def test_chart() -> None:
    table = finals()
    figure = chart(table, table, KEYS)
    assert len(figure.axes) == 2 * len(KEYS) + 1
    delays = [axes for axes in figure.axes if "delay" in axes.get_title(loc="left")]
    assert len(delays) == 2
    assert all(-60 <= low < high <= 60 for axes in delays for low, high in [axes.get_ylim()])


def flights(count: int, delays: list[float | None]) -> pa.Table:
    micros = pa.array([n * 1_000_000 for n in range(count)]).view(pa.timestamp("us", "UTC"))
    return pa.table({
        "tailnum": ["N1"] * (count - 1) + [None], "origin": ["JFK"] * count,
        "carrier": ["B6"] * count, "time_hour": micros, "dep_delay": delays,
    })  # fmt: skip


def test_the_truth_of_a_week() -> None:
    delays = [100.0, -100.0, 30.0, None, *[0.0] * 8]
    [row] = truth(flights(12, delays), 7 * 86_400_000_000, 0).to_pylist()
    # One flight has no aircraft and one no delay; of an aircraft the first eight count.
    assert (row["window"], row["true_flights"], row["counted_flights"]) == (0, 10, 8)
    assert row["true_delay"] == (60 - 60 + 30) / 10


def test_what_is_there_is_not_made_again(tmp_path: Path) -> None:
    pq.write_table(flights(1, [1.0]), tmp_path / "flights.parquet")
    data = (tmp_path / "flights.parquet").read_bytes()
    job = prepare(tmp_path)
    key = (tmp_path / "flights.secret").read_bytes()
    assert prepare(tmp_path).plan.hash == job.plan.hash
    assert (tmp_path / "flights.secret").read_bytes() == key
    assert (tmp_path / "flights.parquet").read_bytes() == data


def test_released_values_are_near_the_truth(tmp_path: Path) -> None:
    """The figures of the demo; a fresh key moves them by less than one flight."""
    job = prepare(tmp_path)
    run_job(job)
    timeline = job.plan.timeline
    last = demo.finals(read_releases(job.sink.path), timeline.start, timeline.window)
    table = joined(last, truth(read_flights(), timeline.window, timeline.start))
    flights, minutes = distances(table)
    assert flights <= 22 and minutes <= 6.5
    assert table.num_rows > 1150
