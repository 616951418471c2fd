"""Lines of text files: each is a row or refused on its own."""

import io

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.formats.compression import BrokenFileError
from dpstream.pipelines.formats.lines import BOM, MAX_LINE_BYTES
from dpstream.pipelines.formats.rows import Refused
from dpstream.pipelines.formats.texts import (
    csv_header,
    csv_positions,
    read_csv,
    read_text,
)


@pytest.mark.parametrize(
    ("text", "header"),
    [(b"a,b\n1,2", ["a", "b"]), (BOM + b'"a,x",b\r\n', ["a,x", "b"]), (b"", None), (b"\n1", None),
     (b"\xff,b\n", None), (b'"a\n', None), (b"x" * (MAX_LINE_BYTES + 1), None)],
)  # fmt: skip
def test_headers(text: bytes, header: list[str] | None) -> None:
    assert csv_header(io.BytesIO(text)) == header


def test_a_missing_column_shows_no_other_name() -> None:
    assert csv_positions(["b", "a"], ["a", "b"]) == [1, 0]
    for header in (["SECRET", "b"], ["a", "a", "SECRET"]):
        with pytest.raises(UsageError) as error:
            csv_positions(header, ["a"])
        assert error.value.field == "column 'a'" and "SECRET" not in str(error.value)


def test_no_line_changes_another() -> None:
    text = b'a,b\n1,x\n2\n"3,y\n,"4 ""q"""\n5,""\n'
    rows, refused = dict[int, dict[str, str | None]](), dict[int, str]()
    for part in read_csv(io.BytesIO(text), ["b", "a"]):
        if isinstance(part, Refused):
            refused |= dict(zip(part.offsets.tolist(), part.reasons, strict=True))
        else:
            rows |= dict(enumerate(part.batch.to_pylist(), part.offset))
    assert refused == {1: "field_count", 2: "malformed"}
    assert rows == {
        0: {"b": "x", "a": "1"},
        3: {"b": '4 "q"', "a": None},
        4: {"b": "", "a": "5"},
    }


PIECES = [b"1", b"x", b'"y"', b'"a,b"', b'""', b'"', b",", b",", b"\r", b"\n", b"\r\n", b"\0",
          b"1,2\n", b'"1","2"\n', b"1,2\r\n", BOM]  # fmt: skip


def rows_of(data: bytes) -> list[tuple[str | None, ...] | str]:
    """Every row, or why it is none."""
    rows = dict[int, tuple[str | None, ...] | str]()
    for part in read_csv(io.BytesIO(b"a,b\n" + data), ["a", "b"]):
        if isinstance(part, Refused):
            rows |= dict(zip(part.offsets.tolist(), part.reasons, strict=True))
        else:
            columns = [column.to_pylist() for column in part.batch.columns]
            rows |= dict(enumerate(zip(*columns, strict=True), part.offset))
    return [rows[number] for number in range(len(rows))]


@given(st.lists(st.sampled_from(PIECES), max_size=25).map(b"".join))
@example(b'1,2\n"1,2\n3",4\n')
@example(b'a"b,"c"\n1,2\n')
@example(b"1,2\r\n1,\r2\n")
@settings(deadline=None)
def test_lines_in_company_are_what_they_are_alone(data: bytes) -> None:
    together, alone = rows_of(data), [rows_of(line) for line in data.split(b"\n")]
    assert together == [row for rows in alone for row in rows]


class BreaksOff(io.BytesIO):
    """A compressed text whose rest cannot be unpacked."""

    def read(self, size: int | None = -1) -> bytes:
        chunk = super().read(size)
        if not chunk:
            raise BrokenFileError
        return chunk


def test_a_text_that_breaks_off_is_refused_once() -> None:
    [refused] = read_text("jsonl", BreaksOff(b""), ["a"])
    assert isinstance(refused, Refused) and refused.reasons == ["unreadable_file"]
    [rows] = read_text("jsonl", io.BytesIO(b'{"a": 1}\n{"a": true}\n'), ["a"])
    assert not isinstance(rows, Refused) and rows.batch["a"].to_pylist() == ["1", "true"]
