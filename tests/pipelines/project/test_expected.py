"""Names that complete data has, against the calendar of Python's own library."""

import itertools
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from dpstream.pipelines.project.expected import Expectation, proposed
from tests.golden.refusals import Refused


def micros(moment: datetime) -> int:
    return (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


@pytest.mark.parametrize(
    "zone", ["UTC", "Europe/Berlin", "America/St_Johns", "Australia/Lord_Howe"]
)
@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("raw/date={day}/*.csv.gz", "raw/date=%Y-%m-%d/*.csv.gz"),
        ("y={day:%Y}/m={day:%m}/d={day:%d}/_SUCCESS", "y=%Y/m=%m/d=%d/_SUCCESS"),
        ("{month}.csv", "%Y-%m.csv"),
        ("at-{hour}.csv", "at-%Y-%m-%dT%H.csv"),
    ],
)
def test_each_instant_of_a_year_is_in_the_period_of_its_local_time(
    text: str, form: str, zone: str
) -> None:
    begin, end = datetime(2023, 12, 30, 7, tzinfo=UTC), datetime(2025, 1, 3, 11, tzinfo=UTC)
    periods = Expectation.of(text, zone).periods(micros(begin), micros(end))
    assert all(a.end == b.begin for a, b in itertools.pairwise(periods))
    named, at, moment = dict[str, list[int]](), 0, begin
    while moment < end:
        named.setdefault(moment.astimezone(ZoneInfo(zone)).strftime(form), []).append(
            micros(moment)
        )
        moment += timedelta(minutes=30)
    assert [period.name for period in periods] == [*named]
    for period, instants in zip(periods, named.values(), strict=True):
        at += sum(period.begin <= instant < period.end for instant in instants)
    # Where clocks are set back by half an hour, a local time is in one of two hours.
    assert at >= sum(map(len, named.values())) - (zone == "Australia/Lord_Howe")


def test_rules_that_are_none(refused: Refused) -> None:
    for text in (
        "raw/*.csv",
        "raw/{day}/{hour}.csv",
        "raw/{day}/{user}.csv",
        "raw/{day:%m-%d}.csv",
        "raw/{day:%Y-%m}.csv",
        "raw/{month:%Y-%m-%d}.csv",
        "raw/{day:%Y%m%d%H}.csv",
        "raw/{day!r}.csv",
    ):
        refused(Expectation.of, text, "UTC")


def test_proposals() -> None:
    for pattern, path, rule in (
        ("raw/date=*/*.csv.gz", "raw/date=2024-01-01/p-0.csv.gz", "raw/date={day}/*.csv.gz"),
        ("in/visits-*.csv", "in/visits-20240101.csv", "in/visits-{day:%Y%m%d}.csv"),
        ("in/*/*.csv", "in/2024-01/a.csv", "in/{month}/*.csv"),
        ("in/*.csv", "in/ann.csv", None),
        ("**/date=*/a.csv", "x/y/date=2024-01-01/a.csv", None),
    ):
        assert proposed(pattern, path) == rule
        if rule is not None:
            Expectation.of(rule, "UTC")
