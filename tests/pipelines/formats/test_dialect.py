"""Declared dialects: characters, numbers and times, against Python's own readers."""

import csv
import io
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpstream.pipelines.formats.dialect import instants, number_texts, recoded
from dpstream.pipelines.formats.rows import Rows
from dpstream.pipelines.formats.texts import read_text
from dpstream.pipelines.project.dialect import ENCODINGS, encoding_of, reading_of
from dpstream.pipelines.project.sections import CsvSection, TableSection, TimeColumn
from tests.golden.pinned import check, of_refusals


@pytest.mark.parametrize("encoding", sorted(ENCODINGS - {"utf-8"}))
@settings(max_examples=25, deadline=None)
@given(damage=st.binary(max_size=9), size=st.integers(1, 7))
def test_damage_stays_within_its_line(encoding: str, damage: bytes, size: int) -> None:
    """Whatever bytes a line has, and wherever a block ends, the next line is read as written."""
    wide = encoding.startswith("utf-16")  # of which a line end is a code unit, not a byte
    units = [damage[at : at + 1 + wide] for at in range(0, len(damage), 1 + wide)]
    ends = (b"\n", b"\n\0", b"\0\n")
    damage = b"".join(unit for unit in units if len(unit) == 1 + wide and unit not in ends)
    header = "id,x\n1,".encode(encoding)
    after = "\nabc,42\n".encode(encoding)
    data = header + damage + after
    section = CsvSection(encoding=encoding)
    rows = [
        row
        for part in read_text("csv", io.BytesIO(data), ["id", "x"], csv=section)
        if isinstance(part, Rows)
        for row in part.batch.to_pylist()
    ]
    assert rows[-1] == {"id": "abc", "x": "42"}
    stream = recoded(io.BytesIO(data), encoding)
    pieces = b"".join(iter(partial(stream.read, size), b""))
    assert pieces == recoded(io.BytesIO(data), encoding).read(len(data))


@pytest.mark.parametrize(
    "name", ["utf-7", "utf-16", "iso2022_jp", "hz", "utf-32", "cp037", "base64", "x\0"]
)
def test_encodings_in_which_a_byte_decides_about_others_are_not_read(name: str) -> None:
    assert encoding_of(name) is None


def test_an_encoding_has_many_names() -> None:
    assert {encoding_of(name) for name in ("latin-1", "ISO-8859-1", "l1")} == {"iso8859-1"}
    text = "Zoë €\n"
    data = recoded(io.BytesIO(text.encode("cp1252")), "windows-1252").read(100)
    assert data.decode() == text


@given(st.binary(min_size=1, max_size=4), st.sampled_from(("ascii", "iso8859-8", "cp874")))
def test_bytes_that_are_no_characters_do_not_become_some_together(data: bytes, name: str) -> None:
    """Two people would be one: bytes of UTF-8 in a text that is declared to be none."""
    text = recoded(io.BytesIO(data), name).read(9)
    try:
        assert text.decode() == data.decode(name)
    except UnicodeDecodeError:
        for decode in (partial(data.decode, name), text.decode):
            with pytest.raises(UnicodeDecodeError):
                decode()


FORMATS = (
    "%d.%m.%Y %H:%M", "%m/%d/%y %I:%M %p", "%Y%m%d%H%M%S", "%B %d, %Y", "%d-%b-%Y %H:%M:%S.%f",
    "%d/%b/%Y:%H:%M:%S %z", "%%%Y-%m-%d",
)  # fmt: skip
PIECES = [
    *("0", "1", "2", "9", "12", "13", "29", "30", "31", "1999", "2024", "Feb", "March", "am", "PM"),
    *("+0200", "-05:30", "Z", " ", ".", ":", "/", ",", "-", "%"),
]


@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=300, deadline=None)
@given(
    at=st.datetimes(datetime(1969, 1, 1), datetime(2068, 12, 31)),
    change=st.tuples(st.integers(0, 20), st.sampled_from(PIECES)),
)
def test_times_are_those_of_strptime(form: str, at: datetime, change: tuple[int, str]) -> None:
    """Where Python reads a text, the instant is Python's; where it does not, there is none."""
    text = at.replace(tzinfo=UTC).strftime(form)
    where, piece = change
    damaged = text[:where] + piece + text[where + len(piece) :]
    for each in (text, damaged):
        try:
            expected = datetime.strptime(each, form)
        except ValueError:
            expected = None
        got = instants(pa.array([each]), TimeColumn("t", format=form))[0].as_py()
        if expected is not None and expected.tzinfo is None:
            expected = expected.replace(tzinfo=UTC)
        if got is None:
            # Python also reads spaces, one digit of a day and more forms of an offset.
            assert each != text
        else:
            assert got == expected


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("unit", ["s", "ms", "us"])
def test_numbers_beyond_all_times_are_none(unit: Literal["s", "ms", "us"]) -> None:
    """The least of 64 bits too, by which libraries mark a missing time, and without a word."""
    time = TimeColumn("t", unit=unit)
    for column in (
        pa.array([-(2**63), 2**63 - 1]),
        pa.array([str(-(2**63)), "9" * 30]),
        pa.array([1e308, float("-inf")]),
    ):
        assert instants(column, time).null_count == 2


def test_local_times_beyond_all_times_are_none() -> None:
    """They do not wrap around when their offset is taken away."""
    column = pa.array([-(2**63), 0, 2**63 - 1], pa.timestamp("us"))
    for zone in ("Asia/Tokyo", "America/New_York"):
        assert instants(column, TimeColumn("t", zone=zone)).is_valid().to_pylist() == [0, 1, 0]


@settings(max_examples=200, deadline=None)
@given(
    amount=st.decimals(-(10**9), 10**9, places=2, allow_nan=False),
    signs=st.sampled_from([(",", "."), (".", ","), (",", " "), (".", "'"), (",", "")]),
    text=st.text("0123456789.,' +-eE", max_size=9),
)
def test_numbers_have_the_declared_signs(amount, signs, text: str) -> None:  # type: ignore[no-untyped-def]
    decimal, thousands = signs
    csv = CsvSection(decimal=decimal, thousands=thousands)
    written = f"{amount:,.2f}".replace(",", "T").replace(".", decimal).replace("T", thousands)
    read, other = number_texts(pa.array([written, text]), csv).to_pylist()
    assert float(read) == float(amount)
    if other:  # what is read as a number has no sign in another place
        plain = text.replace(thousands, "") if thousands else text
        assert float(other) == float(plain.replace(decimal, "."))
        assert not thousands or all(len(group) >= 3 for group in text.split(thousands)[1:])


def test_what_cannot_be_declared_is_refused() -> None:
    sections: dict[str, dict[str, Any]] = {
        "two signs": {"csv": CsvSection(delimiter=";;")},
        "a quote": {"csv": CsvSection(delimiter='"')},
        "a digit": {"csv": CsvSection(delimiter="1")},
        "one sign for both": {"csv": CsvSection(decimal=",", thousands=",")},
        "a letter": {"csv": CsvSection(thousands="x")},
        "stateful": {"csv": CsvSection(encoding="iso2022_jp")},
        "unknown": {"csv": CsvSection(encoding="klingon")},
        "no names": {"csv": CsvSection(names=())},
        "names twice": {"csv": CsvSection(names=("a", "a"))},
        "of JSON Lines": {"csv": CsvSection(delimiter=";"), "path": "a.jsonl"},
        "a unit and a zone": {"time_column": TimeColumn("t", unit="s", zone="UTC")},
        "no zone": {"time_column": TimeColumn("t", zone="Mars/Olympus")},
        "a path": {"time_column": TimeColumn("t", zone="../../etc/passwd")},
        "no date": {"time_column": TimeColumn("t", format="%H:%M")},
        "a year twice": {"time_column": TimeColumn("t", format="%Y %y-%m-%d")},
        "half a clock": {"time_column": TimeColumn("t", format="%Y-%m-%d %I:%M")},
        "a directive of others": {"time_column": TimeColumn("t", format="%Y-%m-%d %c")},
        "a percent sign": {"time_column": TimeColumn("t", format="%Y-%m-%d %")},
    }
    calls = {
        name: partial(reading_of, "table.t", TableSection(**{"path": "a.csv", **section}), ())
        for name, section in sections.items()
    }
    check(Path(__file__).with_name("dialects.txt"), of_refusals(calls))


_NOTE = st.text(st.sampled_from('ab,"\n\r é\xff'), max_size=6)


@given(st.lists(st.tuples(_NOTE, _NOTE), min_size=1, max_size=9), st.sampled_from(("\n", "\r\n")))
def test_line_breaks_between_quotes_are_text_where_they_are_declared(
    rows: list[tuple[str, str]], end: str
) -> None:
    """As Python's module writes and reads them; else no line that a record is torn into is one."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, quoting=csv.QUOTE_ALL, lineterminator=end)
    writer.writerows([("a", "b"), *rows])
    declared = CsvSection(line_breaks_in_quotes=True)
    assert values(buffer.getvalue(), declared) == rows


def values(text: str, declared: CsvSection) -> list[tuple[str | None, ...]]:
    parts = read_text("csv", io.BytesIO(text.encode()), ("a", "b"), csv=declared)
    columns = [part.batch.columns for part in parts if isinstance(part, Rows)]
    return [row for a, b in columns for row in zip(a.to_pylist(), b.to_pylist(), strict=True)]


def test_an_open_quote_changes_no_other_row_unless_breaks_are_declared() -> None:
    text = 'a,b\n1,x\n2,"y\n3,z\n4,"w\n5,v\n'
    assert values(text, CsvSection()) == [("1", "x"), ("3", "z"), ("5", "v")]
    declared = CsvSection(line_breaks_in_quotes=True)
    assert values(text, declared) == [("1", "x"), ("5", "v")]


def test_bytes_that_are_no_text_do_not_become_line_breaks() -> None:
    parts = read_text(
        "csv", io.BytesIO(b'a,b\n"1\xff\xfe","x\ny"\n'), ("a", "b"),
        csv=CsvSection(line_breaks_in_quotes=True),
    )  # fmt: skip
    [part] = parts
    assert isinstance(part, Rows)
    assert part.batch.to_pylist() == [{"a": None, "b": "x\ny"}]
