"""Windows: calendar months where they are exact, weeks from Mondays, nothing lost."""

from datetime import UTC, datetime, timedelta

import pytest

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.jobs.windows import instant, suited, windows


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


@pytest.mark.parametrize(
    ("start", "end", "requested", "length"),
    [
        ("2024-02-01", "2024-03-01", "month", "29d"),
        ("2023-12-01", "2024-01-01", "months", "31d"),
        ("2023-10-01", "2024-01-01", "quarter", "92d"),
        ("2024-01-01", "2025-01-01", "Year", "366d"),
        ("2024-01-01", "2024-01-03", "day", "1d"),
        ("2024-01-01", "2024-01-03", "12h", "12h"),
    ],
)
def test_what_is_exact_has_no_note(start: str, end: str, requested: str, length: str) -> None:
    proposal = windows(at(start), at(end), requested)
    assert proposal == (f"{start}T00:00:00Z", f"{end}T00:00:00Z", length, "")


@pytest.mark.parametrize(
    ("start", "requested", "length"),
    [("2024-01-01", "month", "28d"), ("2024-01-02", "year", "364d"),
     ("2024-01-01", "quarter", "91d"), ("2024-01-01T01:00:00", "month", "28d")],
)  # fmt: skip
def test_what_stands_for_the_calendar_is_said(start: str, requested: str, length: str) -> None:
    proposal = windows(at(start), at("2025-01-02"), requested)
    assert proposal.length == length and f"a {requested} of the calendar has not" in proposal.note
    assert proposal.end == "2025-01-02T00:00:00Z" and "cuts the last window short" in proposal.note


@pytest.mark.parametrize("day", ["2024-01-01", "2024-01-03", "2024-01-07T23:00:00"])
def test_weeks_begin_on_mondays(day: str) -> None:
    proposal = windows(at(day), at("2024-01-15"), "week")
    assert (proposal.start, proposal.length) == ("2024-01-01T00:00:00Z", "7d")
    assert ("Monday" in proposal.note) == (day != "2024-01-01")


def test_what_suits_a_stretch() -> None:
    days = {2: "hour", 14: "day", 90: "week", 700: "month", 4000: "year"}
    start = at("2020-01-01")
    assert {n: suited(start, start + timedelta(days=n)) for n in days} == days


def test_days_and_times() -> None:
    noon = at("2024-01-31T12:00:00")
    assert instant("--start", " 2024-01-31 ") == at("2024-01-31")
    assert instant("--start", "2024-01-31 12:00:00") == noon
    assert instant("--start", "2024-01-31T14:00:00+02:00") == noon
    for text in ("2024-02-30", "yesterday", "31.1.2024", ""):
        with pytest.raises(UsageError, match="--start: is neither"):
            instant("--start", text)


@pytest.mark.parametrize(
    ("end", "requested", "field"),
    [("2024-01-01", "day", "--end"), ("2024-02-01", "0d", "--window"),
     ("2024-02-01", "fortnight", "--window"), ("2024-02-01", "99999999w", "--window")],
)  # fmt: skip
def test_what_is_no_window(end: str, requested: str, field: str) -> None:
    with pytest.raises(UsageError) as error:
        windows(at("2024-01-01"), at(end), requested)
    assert error.value.field == field
