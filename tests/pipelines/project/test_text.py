"""Durations and times are exact; what is wrong is said in the project file's own words.

Windows: calendar months where they are exact, weeks from Mondays, nothing lost.
"""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dpstream.pipelines.project.project import decode_project
from dpstream.pipelines.project.sections import ProjectSections
from dpstream.pipelines.project.text import (
    duration_micros,
    instant,
    instant_micros,
    parse_toml,
    raise_decode_error,
    refuse_data_dependent,
    suited,
    windows,
)
from tests.golden.refusals import Refused


@pytest.mark.parametrize(
    ("text", "micros"),
    [("0s", 0), ("1us", 1), ("100ms", 100_000), ("86.4s", 86_400_000), ("1w", 604_800_000_000),
     (" 0.1m ", 6_000_000), ("0.000001s", 1)],
)  # fmt: skip
def test_durations_are_exact(text: str, micros: int) -> None:
    assert duration_micros("window", text) == micros


@pytest.mark.parametrize("text", ["", "5", "-1s", "1e3s", "0.5us", "999999999999999999w"])
def test_what_is_no_duration(text: str, refused: Refused) -> None:
    refused(duration_micros, "window", text)


def test_instants_are_exact_whatever_their_offset() -> None:
    base = instant_micros("start", "2024-02-29T12:00:00Z")
    assert base == 1_709_208_000_000_000
    assert instant_micros("start", "2024-02-29t14:30:00.000001+02:30") == base + 1
    assert instant_micros("start", "2024-02-29 07:00:00-05:00") == base


@pytest.mark.parametrize(
    "text",
    ["2024-02-29T12:00:00", "2023-02-29T12:00:00Z", "2024-01-01T24:00:00Z",
     "2024-01-01T00:00:00.0000001Z", "2024-01-01T00:00:00+24:00", "yesterday"],
)  # fmt: skip
def test_what_is_no_instant(text: str, refused: Refused) -> None:
    refused(instant_micros, "start", text)


@pytest.mark.parametrize("text", [b"a = ", b"\xff", b"a = " + b"[" * 5000])
def test_what_is_no_toml(text: bytes, refused: Refused) -> None:
    refused(parse_toml, text)
    assert parse_toml(b"[a]\nb = 1") == {"a": {"b": 1}}
    assert parse_toml(b"\xef\xbb\xbf[a]\nb = 1") == {"a": {"b": 1}}


@pytest.mark.parametrize("key", ["session_gap", "trigger_count", "watermark_delay"])
def test_records_never_decide_when_something_is_published(key: str, refused: Refused) -> None:
    refuse_data_dependent({"time": {"window": "1d"}, "other": 3})
    refused(refuse_data_dependent, {"time": {key: "1s"}})


VIA = {"table": "b", "on": [["x"]]}


@pytest.mark.parametrize(
    "tables",
    [
        {"table": {"a": {"pth": "x"}}},
        {"data_set": {"a": {}, "b": {"unit": {}}}},
        {"table": {"a": {"format": "ftp"}}},
        {"table": {"a": {}, "b": {"path": 3}}},
        {"table": {"a": {"unit_via": VIA}}},
        {"version": 2},
    ],
)
def test_decoding_errors_name_their_field(tables: dict[str, Any], refused: Refused) -> None:
    sections = {"version": 1} | tables
    with pytest.raises(msgspec.ValidationError) as wrong:
        msgspec.convert(sections, ProjectSections)
    refused(raise_decode_error, wrong.value, ProjectSections, sections)


def test_an_unknown_name_is_shown_short_and_printable(refused: Refused) -> None:
    for name in ("V" * 5000, "\x1b[31mred", "\u202eback"):
        error = refused(decode_project, f"version = 1\n[{json.dumps(name)}]".encode(), Path())
        assert str(error).isprintable() and len(str(error)) < 1000


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


def test_days_and_times(refused: Refused) -> None:
    noon = at("2024-01-31T12:00:00")
    assert instant("--start", " 2024-01-31 ") == at("2024-01-31")
    assert instant("--start", "2024-01-31 12:00:00") == noon
    assert instant("--start", "2024-01-31T14:00:00+02:00") == noon
    for text in ("2024-02-30", "yesterday", "31.1.2024", ""):
        refused(instant, "--start", text)


@pytest.mark.parametrize(
    ("end", "requested"),
    [("2024-01-01", "day"), ("2024-02-01", "0d"),
     ("2024-02-01", "fortnight"), ("2024-02-01", "99999999w")],
)  # fmt: skip
def test_what_is_no_window(end: str, requested: str, refused: Refused) -> None:
    refused(lambda: windows(at("2024-01-01"), at(end), requested))
