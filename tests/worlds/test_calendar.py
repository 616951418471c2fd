"""Jobs by the calendar, from `dpstream init` to the report, against another implementation."""

import json
from datetime import datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import duckdb
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from dpstream.accounting import calendars, zones
from dpstream.accounting.calendars import NOMINAL, Calendar
from dpstream.accounting.plan.timeline import Timeline
from dpstream.pipelines.cli.main import cli
from dpstream.pipelines.jobs.job import load_job
from dpstream.pipelines.stream.passes import DueInput, trigger_time_of

ZONE = "Europe/Berlin"
FIRST, LAST = (datetime(year, 1, 1, tzinfo=ZoneInfo(ZONE)) for year in (2003, 2025))


def call(*words: str) -> Result:
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 0, result.output
    return result


def history(folder: Path) -> Path:
    """Commits of 22 years: at all hours, and at the first and last second of each month."""
    rng = np.random.default_rng(11)
    drawn = rng.uniform(0, (LAST - FIRST).total_seconds(), 6_000)
    moments = [FIRST + timedelta(seconds=float(second)) for second in drawn]
    edges = [
        datetime(y, m, 1, tzinfo=ZoneInfo(ZONE)) for y in range(2003, 2025) for m in range(1, 13)
    ]
    moments += [edge.astimezone(ZoneInfo("UTC")) - timedelta(seconds=1) for edge in edges[1:]]
    moments += edges
    size = len(moments)
    table = pa.table(
        {
            "author": rng.permutation(size),  # each a unit of its own
            "path": [("src", "docs", "tests")[n % 3] for n in range(size)],
            "at": pa.array([moment.astimezone(ZoneInfo("UTC")) for moment in moments]),
        }
    )
    pq.write_table(table, folder / "commits.parquet")
    return folder / "commits.parquet"


def test_a_run_keeps_the_list_that_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine learns of other clocks: the run goes on, and a new job has the new list."""
    monkeypatch.chdir(tmp_path)
    flags = ["--unit", "author", "--key", "path", "--time", "at", "--window", "quarter"]
    flags += ["--zone", ZONE, "--start", "2003-01-01", "--end", "2004-01-01", "--epsilon", "1"]
    data = str(history(tmp_path))
    call("init", data, *flags, "--job", "old")
    call("run", "old")
    before, offsets = load_job(name="old").plan, zones.zone_of(ZONE)
    autumn = int(np.searchsorted(offsets.changes, before.timeline.end or 0)) - 1
    moved = offsets._replace(changes=offsets.changes.copy())
    moved.changes[autumn] += NOMINAL["day"]
    monkeypatch.setattr(calendars, "zone_of", lambda _: moved)
    assert "4 of 4" in call("report", "old").output
    call("init", data, *flags, "--job", "new", "--data-set", "commits")
    assert load_job(name="new").plan.timeline.calendar != before.timeline.calendar
    assert load_job(name="old").plan == before


@pytest.mark.parametrize(
    ("zone", "start", "end"),
    [
        ("America/Los_Angeles", "2024-01-31", "2024-03-02"),
        ("Asia/Tokyo", "2024-02-01", "2024-03-03"),
    ],
)
def test_a_public_sample_gives_local_days(
    zone: str, start: str, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("v.csv").write_text("who,page,at\n1,a,2024-02-01T05:30:00Z\n2,a,2024-03-01T20:00:00Z\n")
    flags = ["--unit", "who", "--key", "page", "--time", "at", "--epsilon", "1", "--window", "day"]
    call("init", "v.csv", *flags, "--zone", zone, "--public-sample")
    text = Path("dpstream.toml").read_text()
    assert f'start = "{start}"' in text and f'end = "{end}"' in text
    assert " unusable" not in call("check").output


@pytest.mark.parametrize(("unit", "ticks"), [("s", 1), ("ms", 1_000)])
def test_epoch_times_are_not_shifted_by_the_zone_of_a_calendar(
    unit: str, ticks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of four records are in February of Los Angeles, which begins at 8 in UTC."""
    monkeypatch.chdir(tmp_path)
    edges = [datetime(2024, month, 1, 8, tzinfo=ZoneInfo("UTC")) for month in (2, 3)]
    seconds = [int(edge.timestamp()) + more for edge in edges for more in (-1, 0)]
    lines = [f"{number},a,{second * ticks}\n" for number, second in enumerate(seconds)]
    Path("v.csv").write_text("who,page,at\n" + "".join(lines))
    flags = [
        "--unit",
        "who",
        "--key",
        "page",
        "--time",
        "at",
        "--epsilon",
        "1",
        "--window",
        "month",
    ]
    flags += ["--time-unit", unit, "--zone", "America/Los_Angeles"]
    call("init", "v.csv", *flags, "--start", "2024-02-01", "--end", "2024-03-01")
    checked = json.loads(call("check", "--json").stdout)["operator_only"]
    assert (checked["read"], checked["usable"]) == (4, 2)
    assert checked["unusable"][0]["first"] == [["v.csv", 0], ["v.csv", 3]]


def test_an_instant_of_a_calendar_is_local_and_an_endless_run_has_no_last_one() -> None:
    begin = int(np.datetime64("2024-01-01T05:00", "us").astype(np.int64))
    listed = Calendar.of("month", "America/New_York")
    length = NOMINAL["month"]
    endless = Timeline(begin, None, length, length, length, calendar=listed)
    year = msgspec.structs.replace(endless, end=begin + 366 * NOMINAL["day"])
    days = ("2024-02-01", "2024-02-29", "2024-03-01")
    assert [trigger_time_of(year, day) for day in days] == [1, 1, 2]
    assert DueInput(None).instant(endless) is None


@pytest.mark.parametrize(
    ("window", "covers", "number"), [("month", "window", 264), ("quarter", "1 year", 88)]
)
def test_years_of_months_are_published(
    window: str, covers: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ["--unit", "author", "--key", "path", "--time", "at", "--window", window]
    flags += ["--zone", ZONE, "--start", "2003-01-01", "--end", "2025-01-01", "--epsilon", "90"]
    call("init", str(history(tmp_path)), *flags, "--covers", covers, "--contributions", "1")
    assert f'calendar = "{ZONE}"' in Path("dpstream.toml").read_text()
    for command in ("check", "plan", "run"):
        call(command)
    released = ds.dataset("releases/commits", format="parquet", exclude_invalid_files=True)
    table = released.to_table()
    assert len(set(table["window_start"].to_pylist())) == number
    with duckdb.connect(config={"threads": 1}) as db:
        db.execute(f"SET TimeZone = '{ZONE}'")
        db.register("released", table)
        worst = db.sql(
            f"""SELECT max(abs(records - ifnull(n, 0))), max(records_sd), count(n)
            FROM released LEFT JOIN (
                SELECT path, date_trunc('{window}', "at") AS since, count(*) AS n
                FROM 'commits.parquet' GROUP BY ALL
            ) AS exact ON released.path = exact.path AND window_start = since"""
        ).fetchall()[0]
    assert table.num_rows == 3 * number and worst[0] < 6 * worst[1] < 3
    assert worst[2] > 0.99 * table.num_rows  # a key that was released goes on in an empty month
    assert f"{number} of {number}" in call("report").output
    assert "2024-" in Path("commits.report.html").read_text()
    assert f"{1 if covers == 'window' else 12} month" in call("account", "show").output
