"""Which windows a first job has: of one length, or of a calendar, and what is said of them."""

from datetime import UTC, datetime, timedelta

import pytest

from dpstream.pipelines.drafting.windows import suited, windows
from tests.golden.refusals import Refused


def at(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).astimezone(UTC)


@pytest.mark.parametrize(
    ("start", "end", "requested", "zone", "expected"),
    [
        ("2024-01-01Z", "2024-01-03Z", "day", None, ("2024-01-01T00:00:00Z", "1d", 2, None)),
        ("2024-01-01Z", "2024-01-03Z", "12h", None, ("2024-01-01T00:00:00Z", "12h", 4, None)),
        ("2024-02-01Z", "2025-01-01Z", "months", None, ("2024-02-01", "1 month", 11, "UTC")),
        ("2023-10-01Z", "2024-04-01Z", "quarter", None, ("2023-10-01", "1 quarter", 2, "UTC")),
        ("2024-01-01Z", "2026-01-01Z", "Year", None, ("2024-01-01", "1 year", 2, "UTC")),
        (
            "2024-03-01T00:00+01:00",
            "2024-05-01T00:00+02:00",
            "day",
            "Europe/Berlin",
            ("2024-03-01", "1 day", 61, "Europe/Berlin"),
        ),
        (
            "2024-03-04T00:00-05:00",
            "2024-03-18T00:00-04:00",
            "week",
            "America/New_York",
            ("2024-03-04", "1 week", 2, "America/New_York"),
        ),
    ],
)
def test_what_fits_has_no_note(
    start: str,
    end: str,
    requested: str,
    zone: str | None,
    expected: tuple[str, str, int, str | None],
) -> None:
    proposal = windows(
        at(start.replace("Z", "+00:00")), at(end.replace("Z", "+00:00")), requested, zone
    )
    assert (proposal.start, *proposal[2:5]) == expected and not proposal.note


@pytest.mark.parametrize("day", ["2024-01-01", "2024-01-03", "2024-01-07T23:00:00"])
@pytest.mark.parametrize("zone", [None, "UTC"])
def test_weeks_begin_on_mondays(day: str, zone: str | None) -> None:
    proposal = windows(at(f"{day}+00:00"), at("2024-01-15+00:00"), "week", zone)
    assert proposal.start[:10] == "2024-01-01" and proposal.number == 2
    assert bool(proposal.note) == (day != "2024-01-01")


def test_a_range_inside_months_has_notes_on_both_ends() -> None:
    proposal = windows(at("2024-01-15+00:00"), at("2024-03-05T06:00+00:00"), "month")
    assert proposal[:5] == ("2024-01-01", "2024-03-05T06:00:00Z", "1 month", 3, "UTC")
    assert "--start" in proposal.note and "--end" in proposal.note


def test_what_suits_a_stretch() -> None:
    days = {2: "hour", 14: "day", 90: "week", 700: "month", 4000: "year"}
    start = at("2020-01-01+00:00")
    assert {n: suited(start, start + timedelta(days=n)) for n in days} == days


@pytest.mark.parametrize(
    ("end", "requested"),
    [("2024-01-01", "day"), ("2024-02-01", "0d"),
     ("2024-02-01", "fortnight"), ("2024-02-01", "99999999w")],
)  # fmt: skip
def test_what_is_no_window(end: str, requested: str, refused: Refused) -> None:
    refused(lambda: windows(at("2024-01-01+00:00"), at(f"{end}+00:00"), requested))
