"""Durations and times are exact; what is wrong is said in the project file's own words."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.pipelines.project.project import decode_project
from dpstream.pipelines.project.sections import ProjectSections
from dpstream.pipelines.project.text import (
    closest,
    duration_micros,
    instant_micros,
    parse_toml,
    raise_decode_error,
    refuse_data_dependent,
)


@pytest.mark.parametrize(
    ("text", "micros"),
    [("0s", 0), ("1us", 1), ("100ms", 100_000), ("86.4s", 86_400_000), ("1w", 604_800_000_000),
     (" 0.1m ", 6_000_000), ("0.000001s", 1)],
)  # fmt: skip
def test_durations_are_exact(text: str, micros: int) -> None:
    assert duration_micros("window", text) == micros


@pytest.mark.parametrize("text", ["", "5", "-1s", "1e3s", "0.5us", "999999999999999999w"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(UsageError) as error:
        duration_micros("window", text)
    assert error.value.field == "window"


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
def test_what_is_no_instant(text: str) -> None:
    with pytest.raises(UsageError) as error:
        instant_micros("start", text)
    assert error.value.field == "start"


@pytest.mark.parametrize("text", [b"a = ", b"\xff", b"a = " + b"[" * 5000])
def test_what_is_no_toml(text: bytes) -> None:
    with pytest.raises(UsageError) as error:
        parse_toml(text)
    assert error.value.field == "project file"
    assert parse_toml(b"[a]\nb = 1") == {"a": {"b": 1}}


@pytest.mark.parametrize("key", ["session_gap", "trigger_count", "watermark_delay"])
def test_records_never_decide_when_something_is_published(key: str) -> None:
    refuse_data_dependent({"time": {"window": "1d"}, "other": 3})
    with pytest.raises(PolicyError) as error:
        refuse_data_dependent({"time": {key: "1s"}})
    assert error.value.field == f"time.{key}"


def test_a_near_name_is_suggested() -> None:
    assert closest("epsilom", ["delta", "epsilon"]).startswith("did you mean 'epsilon'?")
    assert closest("zzz", ["b", "a"]) == "known here: a, b"


VIA = {"table": "b", "on": [["x"]]}


@pytest.mark.parametrize(
    ("tables", "field", "message"),
    [
        ({"table": {"a": {"pth": "x"}}}, "table.a.pth", "did you mean 'path'"),
        ({"data_set": {"a": {}, "b": {"unit": {}}}}, "data_set.b.unit.name", "is required"),
        ({"table": {"a": {"format": "ftp"}}}, "table.a.format", "'parquet', 'csv', 'jsonl'"),
        ({"table": {"a": {}, "b": {"path": 3}}}, "table.b.path", "expected str"),
        ({"table": {"a": {"unit_via": VIA}}}, "table.a.unit_via.on[0]", "2"),
        ({"version": 2}, "version", "1"),
    ],
)
def test_decoding_errors_name_their_field(tables: dict[str, Any], field: str, message: str) -> None:
    sections = {"version": 1} | tables
    with pytest.raises(msgspec.ValidationError) as wrong:
        msgspec.convert(sections, ProjectSections)
    with pytest.raises(UsageError) as error:
        raise_decode_error(wrong.value, ProjectSections, sections)
    assert error.value.field == field and message in str(error.value)


def test_an_unknown_name_is_shown_short_and_printable() -> None:
    for name in ("V" * 5000, "\x1b[31mred", "\u202eback"):
        with pytest.raises(UsageError) as error:
            decode_project(f"version = 1\n[{json.dumps(name)}]".encode(), Path())
        assert str(error.value).isprintable() and len(str(error.value)) < 1000
